"""`Tensor` of `triton_python_backend_utils`: a named array on its way into or out of a model."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from _weir_datatypes import DTYPES, NUMBERS, name_of_numpy
from _weir_dlpack import export_array, import_array
from _weir_errors import TritonModelException

_LENGTH = struct.Struct("<I")


class Tensor:
    """A tensor made by a model from a numpy array, or received as an input.

    Arrays of received tensors are the model's own: writable, and valid as long as the model keeps them. BYTES tensors
    are object arrays of `bytes`. BF16 has no numpy type: `to_dlpack` and `from_dlpack` exchange it with frameworks that
    know it.

    Raises TritonModelException for an empty name or a type Triton has not, TypeError for what is no array.
    """

    __slots__ = ("_array", "_content", "_datatype", "_name", "_shape")

    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                f"    1. Tensor(arg0: str, arg1: numpy.ndarray)\n\nInvoked with: {name!r}, {array!r}"
            )
        datatype = name_of_numpy(array.dtype)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        if datatype == "BF16":
            array = array.view(DTYPES["BF16"])
        self._set(name, datatype, array)

    def _set(self, name: str, datatype: str, array: np.ndarray) -> None:
        if not isinstance(name, str) or not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = name
        self._datatype = datatype
        self._shape: Sequence[int] = array.shape
        self._array: np.ndarray | None = array
        self._content: bytes | np.ndarray = b""

    @classmethod
    def received(cls, name: str, datatype: str, shape: Sequence[int], content: bytes | np.ndarray) -> Tensor:
        """An input over its `content` as it travelled: bytes, or a private uint8 array."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._shape = shape
        tensor._array = None
        tensor._content = content
        return tensor

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._datatype}, {list(self._shape)})"

    def name(self) -> str:
        """The tensor's name in the model configuration."""
        return self._name

    def datatype(self) -> str:
        """The tensor's type by its name on the wire ("FP32")."""
        return self._datatype

    def triton_dtype(self) -> int:
        """The tensor's type by Triton's number (see `triton_to_numpy_type`)."""
        return NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        """The tensor's dimensions, the batch dimension included."""
        return list(self._shape)

    def size_bytes(self) -> int:
        """Bytes of the content, as far as that is known without looking at strings."""
        return len(self._content) if self._array is None else self._array.nbytes

    def is_cpu(self) -> bool:
        """Whether the content lies in host memory: always."""
        return True

    def as_numpy(self) -> np.ndarray:
        """The content as an array, the same one at every call.

        Raises ValueError for a received tensor whose content does not fill its shape, TritonModelException for BF16.
        """
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to numpy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._elements()

    def _elements(self) -> np.ndarray:
        """As `as_numpy`; the elements of BF16 are their 16 bits."""
        if self._array is None:
            self._array = self._decode()
            self._content = b""
        return self._array

    def _decode(self) -> np.ndarray:
        content = self._content
        if self._datatype == "BYTES":
            return deserialize_bytes_tensor(content).reshape(self._shape)
        dtype = DTYPES[self._datatype]
        if isinstance(content, bytes):
            return np.frombuffer(content, dtype).reshape(self._shape).copy()
        return content.view(dtype).reshape(self._shape)

    def content(self, limit: int) -> bytes | np.ndarray:
        """The content as it travels: bytes, or (where it has more than `limit` bytes) perhaps a C-contiguous uint8 array.

        What was received and never looked at is passed on as it came. Raises ValueError as `as_numpy` does.
        """
        if self._array is None and self._datatype == "BYTES":
            return self._content
        array = self._elements()
        if self._datatype == "BYTES":
            return serialize_byte_tensor(array)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if array.nbytes <= limit:
            return array.tobytes()
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the content, to be consumed once by another framework."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return export_array(self._elements(), self._datatype, self)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """As `to_dlpack`; `stream` is of no meaning for host memory."""
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @classmethod
    def from_dlpack(cls, name: str, source: Any) -> Tensor:
        """A tensor over the host memory of a DLPack capsule, or of an object that can make one; memory of a GPU is copied.

        Raises TritonModelException for content that is not C-contiguous, or a type Triton has not.
        """
        array, datatype = import_array(source)
        tensor = cls.__new__(cls)
        tensor._set(name, datatype, array)
        return tensor


def serialize_byte_tensor(array: np.ndarray) -> bytes:
    """BYTES content of an array of objects or strings: for each element its length (uint32) and its bytes.

    `bytes` stay as they are, anything else is its text in UTF-8.
    """
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        raw = element if isinstance(element, bytes) else str(element).encode()
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def deserialize_bytes_tensor(content: bytes | np.ndarray) -> np.ndarray:
    """The elements of BYTES content as a flat object array of `bytes`. Raises ValueError where a length is wrong."""
    view = memoryview(content)
    elements: list[bytes] = []
    position, end = 0, len(view)
    while position < end:
        if position + _LENGTH.size > end:
            raise ValueError("incomplete string length indicator")
        (length,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size + length
        if position > end:
            raise ValueError("incomplete string data")
        elements.append(bytes(view[position - length : position]))
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
