"""`Tensor`: a name, a datatype, a shape, and its bytes as they travel.

A tensor's bytes are a view over what was received (a request body, a bus message, shared memory) or a reference to
where they lie: in shared memory of ours, or in memory that a client shares. Nothing here copies more than the caller asks
for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from schemas.datatypes import DATATYPES

MAX_ELEMENT_COUNT = 2**31 - 1


class PayloadRef(NamedTuple):
    """Where a large payload lies: a slot of a shared-memory segment on one host.

    `generation` is the slot's use count when the reference was made: a reader that finds another number there reads
    a slot that was given to somebody else since. `offset` and `size` are in bytes, `offset` from the segment's start;
    `slot` is the byte offset of the slot's own header.
    """

    segment: str
    slot: int
    generation: int
    offset: int
    size: int


class RegionRef(NamedTuple):
    """Bytes in a POSIX shared-memory object of a client, on the gateway's host.

    `name` is the object's file name; `inode` tells it from another object that was given the same name since. `offset`
    (from the object's start) and `size` are in bytes.
    """

    name: str
    inode: int
    offset: int
    size: int


class CudaRegionRef(NamedTuple):
    """Bytes in GPU memory of a client: `handle` is the cudaIpcMemHandle_t of an allocation on GPU `device`.

    `offset` (from the allocation's start) and `size` are in bytes.
    """

    handle: bytes
    device: int
    offset: int
    size: int


ClientRef = RegionRef | CudaRegionRef
"""Where a client's own memory holds a tensor, or is to hold it."""

Reference = PayloadRef | RegionRef | CudaRegionRef
"""Content that lies elsewhere: all of them are tuples and have a `size`, and no other content is or has."""


class Tensor:
    """One named tensor.

    `datatype` is a wire name ("FP32"), `shape` includes the batch dimension where the model has one. `data` is the
    row-major little-endian content (BYTES: each element a uint32 length and that many bytes) as bytes or a view, or a
    reference to it.
    """

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview | Reference) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype}, {list(self.shape)})"

    @property
    def size_bytes(self) -> int:
        """Bytes of content, wherever it lies."""
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

        Raises ValueError when the content does not fill the shape, TypeError for content that lies elsewhere.
        """
        return as_array(self.data, self.datatype, self.shape)


def as_array(data: bytes | memoryview | Reference, datatype: str, shape: Sequence[int]) -> np.ndarray:
    """The array of `shape` over `data`; see `Tensor.to_numpy`."""
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
    """Elements of a tensor of `shape`, all of whose dimensions are known; 1 for a scalar."""
    return math.prod(shape)


def pack_bytes(elements: Iterable[object]) -> bytes:
    """BYTES content of `elements`: bytes as they are, anything else as its text in UTF-8."""
    parts: list[bytes] = []
    for element in elements:
        raw = bytes(element) if isinstance(element, (bytes, bytearray, memoryview)) else str(element).encode()
        parts.append(struct.pack("<I", len(raw)))
        parts.append(raw)
    return b"".join(parts)


def unpack_bytes(data: bytes | memoryview) -> list[bytes]:
    """The elements of BYTES content. Raises ValueError where a length runs past the end."""
    view = memoryview(data)
    elements: list[bytes] = []
    position, end = 0, len(view)
    while position < end:
        if position + 4 > end:
            raise ValueError("incomplete string length indicator")
        (length,) = struct.unpack_from("<I", view, position)
        position += 4
        if position + length > end:
            raise ValueError("incomplete string data")
        elements.append(bytes(view[position : position + length]))
        position += length
    return elements
