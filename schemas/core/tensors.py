"""Datatypes by their names in each format, and `Tensor`: a name, a datatype, a shape and content.

The content of a tensor is a view over what was received (a request body, a bus message, shared memory), or a reference to
shared memory that holds it. Nothing here copies content without need.

Source: the KServe v2 protocol's tensor data types, Triton's `DataType` enum (`model_config.proto`), and for the checks of
strings the texts and their order in Triton's core, compared with a running Triton 2.51.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import Meta

from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import invalid_request

MAX_ELEMENT_COUNT = 2**31 - 1

MAX_WALKED_BYTES = 256 * 1024
"""Content whose strings an event loop may walk: about 65 000 strings, or 6 ms, at most.

To walk 200 MiB of empty strings takes many seconds. For larger content the event loop checks only whether it can hold the
expected number of strings (`check_string_count`). The worker that reads the content walks it, in the thread of the model's
instance, before the request joins a batch.
"""

_LENGTH_BYTES = 4
_length_at = struct.Struct("<I").unpack_from


@dataclass(frozen=True, slots=True)
class Datatype:
    """One element type of tensors.

    `size_bytes` is the size of an element, 0 for BYTES, whose elements each follow a 4-byte little-endian length. BF16 has
    no numpy type: its elements are uint16 bit patterns.
    """

    name: str
    config_name: str
    numpy: np.dtype
    size_bytes: int


DatatypeName = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
"""The name of a datatype on the wire."""

_NUMPY = {"BOOL": np.bool_, "BF16": np.uint16, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def _datatype(name: str) -> Datatype:
    if name == "BYTES":
        return Datatype(name, "TYPE_STRING", np.dtype(np.object_), 0)
    dtype = np.dtype(_NUMPY.get(name, name.lower()))
    return Datatype(name, f"TYPE_{name}", dtype, dtype.itemsize)


DATATYPES: dict[str, Datatype] = {name: _datatype(name) for name in get_args(DatatypeName)}
"""Every datatype by its name on the wire ("FP32")."""

BY_CONFIG_NAME: dict[str, Datatype] = {datatype.config_name: datatype for datatype in DATATYPES.values()}
"""Every datatype by its name in `config.pbtxt` ("TYPE_FP32")."""

_BY_NUMPY = {datatype.numpy: datatype.name for datatype in DATATYPES.values() if datatype.name != "BF16"}


def name_of_numpy(dtype: np.dtype) -> str | None:
    """The wire name of a numpy type; BYTES for objects and fixed-width strings; None for types the protocol lacks."""
    if dtype.kind in "SUO":
        return "BYTES"
    return _BY_NUMPY.get(dtype)


_NonNegative = Annotated[int, Meta(ge=0)]


class PayloadRef(NamedTuple):
    """Where a large payload lies: a slot of a shared-memory segment on one host.

    `generation` is the slot's use count when the reference was made: a reader that finds another number there reads a slot
    that was allocated again since. `offset` and `size` are in bytes, `offset` from the segment's start; `slot` is the byte
    offset of the slot's own header.
    """

    segment: str
    slot: int
    generation: int
    offset: int
    size: int


class RegionRef(NamedTuple):
    """Bytes in a POSIX shared-memory object of a client, on the gateway's host.

    `name` is the object's file name. `inode` distinguishes it from a later object of the same name. `offset` (from the
    object's start) and `size` are in bytes.
    """

    name: str
    inode: _NonNegative
    offset: _NonNegative
    size: _NonNegative


class CudaRegionRef(NamedTuple):
    """Bytes in GPU memory of a client: `handle` is the cudaIpcMemHandle_t of an allocation on GPU `device`.

    `offset` (from the allocation's start) and `size` are in bytes.
    """

    handle: bytes
    device: _NonNegative
    offset: _NonNegative
    size: _NonNegative


ClientRef = RegionRef | CudaRegionRef
"""The place in a client's own memory that holds a tensor, or receives one."""

Reference = PayloadRef | RegionRef | CudaRegionRef
"""Content in shared memory. References are tuples and have a `size`; content is never a tuple and has no `size`."""


class Tensor(msgspec.Struct, array_like=True, eq=False):
    """One named tensor, which travels as an array of its fields.

    `datatype` is a wire name ("FP32"), `shape` includes the batch dimension where the model has one. `data` is the
    row-major little-endian content (BYTES: each element a uint32 length and that many bytes) as bytes or a view, or a
    reference to it.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | Reference

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype}, {list(self.shape)})"

    @property
    def size_bytes(self) -> int:
        """Bytes of content, in the tensor or in shared memory."""
        data = self.data
        return data.size if isinstance(data, tuple) else len(data)

    @classmethod
    def from_numpy(cls, name: str, array: np.ndarray, datatype: str) -> Tensor:
        """A tensor over `array`'s memory (copied only when it is not contiguous, or holds BYTES objects)."""
        if datatype == "BYTES":
            return cls(name, datatype, array.shape, pack_bytes(array.ravel()))
        contiguous = np.ascontiguousarray(array)
        return cls(name, datatype, array.shape, contiguous.reshape(-1).view(np.uint8).data)

    def to_numpy(self) -> np.ndarray:
        """An array over the content, read-only where the content is; BYTES as an object array of `bytes`.

        Raises ValueError when the content does not fill the shape, TypeError for a reference.
        """
        return as_array(self.data, self.datatype, self.shape)


def as_array(data: bytes | memoryview | Reference, datatype: str, shape: Sequence[int]) -> np.ndarray:
    """The array of `shape` over `data`; errors as in `Tensor.to_numpy`."""
    if isinstance(data, tuple):
        raise TypeError("the tensor's content lies in shared memory: resolve the reference first")
    if datatype == "BYTES":
        array = np.empty(element_count(shape), dtype=np.object_)
        elements = unpack_bytes(data)
        if len(elements) != len(array):
            raise ValueError(f"{len(elements)} elements do not fill a tensor of shape {list(shape)}")
        array[:] = elements
        return array.reshape(shape)
    return np.frombuffer(data, DATATYPES[datatype].numpy).reshape(shape)


def element_count(shape: Iterable[int]) -> int:
    """Elements of a tensor of `shape`, which has no variable dimension; 1 for a scalar."""
    return math.prod(shape)


_pack_length = struct.Struct("<I").pack


def pack_bytes(elements: Iterable[object]) -> bytes:
    """BYTES content of `elements`: bytes as they are, anything else as its text in UTF-8."""
    parts: list[bytes] = []
    for element in elements:
        raw = bytes(element) if isinstance(element, (bytes, bytearray, memoryview)) else str(element).encode()
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def pack_strings(strings: Sequence[str]) -> bytes:
    """BYTES content of `strings` in UTF-8: as `pack_bytes`, in half the time."""
    encoded = list(map(str.encode, strings))
    parts = [b""] * (2 * len(encoded))
    parts[::2] = map(_pack_length, map(len, encoded))
    parts[1::2] = encoded
    return b"".join(parts)


def unpack_bytes(data: bytes | memoryview) -> list[bytes]:
    """The elements of BYTES content. Raises ValueError where a length runs past the end."""
    view = memoryview(data)
    elements: list[bytes] = []
    position, end = 0, len(view)
    while position < end:
        if position + _LENGTH_BYTES > end:
            raise ValueError("incomplete string length indicator")
        (length,) = _length_at(view, position)
        position += _LENGTH_BYTES
        if position + length > end:
            raise ValueError("incomplete string data")
        elements.append(bytes(view[position : position + length]))
        position += length
    return elements


def check_strings(data: bytes | memoryview, expected: int, request_id: str, name: str, model: str) -> None:
    """Walks the length prefixes of `data`, the content of input `name`. Raises WeirError (INVALID_ARG).

    It must hold `expected` whole elements and nothing else.
    """
    where = f"inference input '{name}'"
    count = position = 0
    end = len(data)
    last = end - _LENGTH_BYTES
    length = 0
    while position <= last:
        count += 1
        if count > expected:
            raise _too_many(request_id, count, expected, where, model)
        (length,) = _length_at(data, position)
        position += _LENGTH_BYTES + length
    if position < end:
        raise invalid_request(
            request_id,
            f"incomplete string length indicator for {where} for model '{model}', expecting {_LENGTH_BYTES} bytes "
            f"but only {end - position} bytes available. Please make sure the string length indicator is in one "
            "buffer.",
        )
    if count != expected:
        text = f"expected {expected} string elements for {where} for model '{model}', got {count}"
        raise invalid_request(request_id, text)
    if position > end:
        raise invalid(
            f"incomplete string data for {where}, expecting string of length {length} "
            f"but only {end - position + length} bytes available"
        )


def check_string_count(size: int, expected: int, request_id: str, name: str, model: str) -> None:
    """Raises WeirError (INVALID_ARG) where `size` bytes of content cannot hold `expected` strings of any length."""
    where = f"inference input '{name}'"
    most = size // _LENGTH_BYTES
    if expected > most:
        text = f"expected {expected} string elements for {where} for model '{model}', got at most {most}"
        raise invalid_request(request_id, text)
    if size and not expected:
        raise _too_many(request_id, 1, 0, where, model)


def _too_many(request_id: str, count: int, expected: int, where: str, model: str) -> WeirError:
    return invalid_request(
        request_id,
        f"unexpected number of string elements {count} for {where} for model '{model}', expecting {expected}",
    )
