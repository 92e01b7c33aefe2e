"""`Tensor` of `triton_python_backend_utils`: a named array that a model receives or returns, its datatype, and DLPack.

Datatypes are identified by number, by configuration name and by numpy type. The numbers are those of `DataType` in
Triton's `model_config.proto`. The server's own table (`schemas.core.tensors`) can't be imported in a model's process, where
`schemas` may be a package of the user's; a test compares the two.

Numpy speaks DLPack but has no BF16. BF16 elements are carried in uint16 arrays, and the type in the capsule is rewritten on
import and export, as described by DLPack's C header (`DLTensor`, `DLDataType`).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from _weir_errors import TritonModelException

NAMES = [
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
]
"""Wire names; the index of each is its number."""

NUMBERS = {name: number for number, name in enumerate(NAMES)}

_SCALARS: list[type[np.generic]] = [
    *(np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64, np.object_),
]
SCALARS: dict[str, type[np.generic]] = dict(zip(NAMES[1:], _SCALARS, strict=False))
"""Numpy scalar types by wire name; BF16 has none."""

DTYPES = {name: np.dtype(scalar) for name, scalar in SCALARS.items()} | {"BF16": np.dtype(np.uint16)}
"""Numpy types of tensors' content by wire name; BF16 elements are carried as uint16."""

# By kind and size rather than dtype: byte order and the underlying C type don't matter.
_BY_LAYOUT = {(dtype.kind, dtype.itemsize): name for name, dtype in DTYPES.items() if name not in ("BYTES", "BF16")}


def name_of_numpy(dtype: np.dtype) -> str | None:
    """The wire name of a numpy type: BYTES for objects and strings; None where Triton has no such type."""
    name = _BY_LAYOUT.get((dtype.kind, dtype.itemsize))
    if name is not None:
        return name
    if dtype.kind in "OSU":
        return "BYTES"
    return "BF16" if dtype.name == "bfloat16" else None


_UINT, _BFLOAT = 1, 4
_HOST_DEVICES = (1, 3)  # plain and CUDA-pinned


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Capsule:
    """Gives a bare capsule the methods that `numpy.from_dlpack` calls."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class _Writable:
    """A writable view of an array's memory.

    Numpy treats the content of a bare capsule as read-only: a model could neither change it nor export it again.
    """

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._array.__array_interface__
        return interface | {"data": (interface["data"][0], False)}


class _Owned:
    """The memory of an array that belongs to `owner`: an array created from this keeps a reference to the owner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owner = owner


def export_array(array: np.ndarray, datatype: str, owner: object) -> Any:
    """A capsule over `array`, whose elements are of the wire type `datatype`; it keeps a reference to `owner`."""
    capsule = np.asarray(_Owned(array, owner)).__dlpack__()
    if datatype == "BF16":
        _dl_tensor(capsule).code = _BFLOAT
    return capsule


def import_array(source: Any) -> tuple[np.ndarray, str]:
    """(array over the capsule's memory, wire type). Raises TritonModelException as `Tensor.from_dlpack` does."""
    if hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] not in _HOST_DEVICES:
        source = _copied_to_host(source)
    capsule = source.__dlpack__() if hasattr(source, "__dlpack__") else source
    try:
        dl_tensor = _dl_tensor(capsule)
    except (ValueError, ctypes.ArgumentError) as error:
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
            "`__dlpack_device__` attributes"
        ) from error
    if dl_tensor.device_type not in _HOST_DEVICES:
        return import_array(_copied_to_host(capsule))
    is_bfloat = dl_tensor.code == _BFLOAT
    if is_bfloat:
        dl_tensor.code = _UINT
    array = np.asarray(_Writable(np.from_dlpack(_Capsule(capsule))))
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    datatype = "BF16" if is_bfloat else name_of_numpy(array.dtype)
    if datatype is None:
        raise TritonModelException(f"Unsupported data type '{array.dtype}' in a DLPack tensor.")
    return array, datatype


def _copied_to_host(source: Any) -> Any:
    """A copy in host memory, made by the framework that the tensor comes from, or by torch or cupy for a bare capsule.

    The copy waits for the framework's current stream, so that its content is complete.
    """
    for name in ("cpu", "get"):  # torch's and others', cupy's
        copy = getattr(source, name, None)
        if callable(copy):
            return copy()
    reason = ""
    for name in ("torch", "cupy"):
        framework = sys.modules.get(name)  # the creator of the capsule has imported one of them
        if framework is not None:
            try:
                return _copied_to_host(framework.from_dlpack(source))
            except Exception as error:  # noqa: BLE001 - a build without that kind of device may raise any exception
                reason = f": {name}: {error}"
    raise TritonModelException(
        f"a DLPack tensor in the memory of a device can be copied to the host only if torch or cupy is imported{reason}"
    )


def _dl_tensor(capsule: Any) -> _DLTensor:
    return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))


_LENGTH = struct.Struct("<I")


class Tensor:
    """A tensor that a model creates from a numpy array, or receives as an input.

    Arrays of received tensors belong to the model: they are writable, and valid as long as the model keeps them. BYTES
    tensors are object arrays of `bytes`. Numpy has no BF16: `to_dlpack` and `from_dlpack` exchange such tensors with
    frameworks that have it.

    Raises TritonModelException for an empty name or a type that Triton does not have, TypeError for a name that is no
    text and for a value that is not an array.
    """

    __slots__ = ("_array", "_content", "_datatype", "_name", "_shape")

    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
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
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = name
        self._datatype = datatype
        self._shape: Sequence[int] = array.shape
        self._array: np.ndarray | None = array
        self._content: bytes | np.ndarray = b""

    @classmethod
    def received(cls, name: str, datatype: str, shape: Sequence[int], content: bytes | np.ndarray) -> Tensor:
        """A received tensor over its `content`: bytes, or a uint8 array that belongs to the model."""
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
        """The name of the tensor's type on the wire ("FP32")."""
        return self._datatype

    def triton_dtype(self) -> int:
        """Triton's number of the tensor's type (see `triton_to_numpy_type`)."""
        return NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        """The tensor's dimensions, the batch dimension included."""
        return list(self._shape)

    def header(self) -> tuple[str, str, Sequence[int]]:
        """Name, datatype and shape."""
        return self._name, self._datatype, self._shape

    def size_bytes(self) -> int:
        """Bytes of the content; for an object array those of its references, without the strings."""
        return len(self._content) if self._array is None else self._array.nbytes

    def is_cpu(self) -> bool:
        """Whether the content lies in host memory: always True."""
        return True

    def as_numpy(self) -> np.ndarray:
        """The content as an array, the same one for every call.

        Raises ValueError for a received tensor whose content does not fill its shape, TritonModelException for BF16.
        """
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to numpy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._elements()

    def _elements(self) -> np.ndarray:
        """As `as_numpy`, with BF16 elements as uint16."""
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
            return np.frombuffer(bytearray(content), dtype).reshape(self._shape)  # writable, as the model's own
        return content.view(dtype).reshape(self._shape)

    def content(self, limit: int) -> bytes | np.ndarray:
        """The content as it is sent: bytes, or for more than `limit` bytes possibly a C-contiguous uint8 array.

        A received tensor that was never read is passed on unchanged. Raises ValueError as `as_numpy` does.
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
        """As `to_dlpack`; `stream` has no meaning for host memory."""
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @classmethod
    def from_dlpack(cls, name: str, source: Any) -> Tensor:
        """A tensor over the memory of a DLPack capsule, or of an object that exports one. Memory of a GPU is copied.

        Raises TritonModelException for content that is not C-contiguous, or of a type that Triton does not have.
        """
        array, datatype = import_array(source)
        tensor = cls.__new__(cls)
        tensor._set(name, datatype, array)
        return tensor


def serialize_byte_tensor(array: np.ndarray) -> bytes:
    """BYTES content of an array of objects or strings: for each element its length (uint32) and its bytes.

    `bytes` are used as they are, anything else as its `str()` in UTF-8.
    """
    parts: list[bytes] = []
    for element in array.ravel().tolist():
        raw = element if isinstance(element, bytes) else str(element).encode()
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def deserialize_bytes_tensor(content: bytes | np.ndarray) -> np.ndarray:
    """The elements of BYTES content as a flat object array of `bytes`. Raises ValueError for a wrong length."""
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
