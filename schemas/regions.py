"""Shared-memory regions that clients registered: what is known of one, and how a tensor names a place in one.

Source: Triton's system and CUDA shared-memory extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import msgpack

from schemas.errors import WeirError, invalid, not_found
from schemas.json_fields import string, unsigned
from schemas.requests import InferRequest, Parameters
from schemas.tensors import ClientRef, CudaRegionRef, RegionRef
from schemas.wire import WIRE_VERSION, MalformedMessage

SYSTEM = "system"
CUDA = "cuda"
"""The two kinds of regions, which share their names: one name is never both."""

CUDA_HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t."""

_SIZE_MAX = 2**64 - 1

FindRegion = Callable[[str, int, int], ClientRef]
"""The place that `(region, offset, byte_size)` names, as a client gave them. Raises WeirError with Triton's texts."""


@dataclass(frozen=True, slots=True)
class Region:
    """One registered region.

    System: `key` as the client gave it, `offset` from the start of the object, `file_name` and `inode` of the object.
    CUDA: `handle` is the cudaIpcMemHandle_t of the allocation on GPU `device_id`. `byte_size` is the region's.
    """

    kind: str
    name: str
    byte_size: int
    key: str = ""
    offset: int = 0
    file_name: str = ""
    inode: int = 0
    device_id: int = 0
    handle: bytes = b""

    def place(self, offset: int, size: int) -> ClientRef:
        """Where `size` bytes at `offset` of this region lie. Raises WeirError (INVALID_ARG) unless they are all in it."""
        if not 0 <= offset < self.byte_size:
            raise invalid(f"Invalid offset for shared memory region: '{self.name}'")
        if size > _SIZE_MAX - offset:
            raise invalid(
                f"Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds maximum value "
                f"({_SIZE_MAX}) for region '{self.name}'"
            )
        # Nothing at the very start is refused too: Triton looks for the last byte, and finds none.
        if not 0 < offset + size <= self.byte_size or size < 0:
            raise invalid(f"Invalid offset + byte size for shared memory region: '{self.name}'")
        if self.kind == CUDA:
            return CudaRegionRef(self.handle, self.device_id, offset, size)
        return RegionRef(self.file_name, self.inode, self.offset + offset, size)


def pack_region(region: Region) -> bytes:
    """The region as the value of its key in the bucket of regions."""
    return bytes(msgpack.packb([WIRE_VERSION, *astuple(region)]))


def unpack_region(data: bytes) -> Region:
    """The region in a value. Raises MalformedMessage."""
    try:
        version, *fields = msgpack.unpackb(data)
        region = Region(*fields)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a region: {error}") from error
    texts = (region.kind, region.name, region.key, region.file_name)
    numbers = (region.byte_size, region.offset, region.inode, region.device_id)
    if (
        version != WIRE_VERSION
        or not all(type(text) is str for text in texts)
        or not all(type(number) is int and 0 <= number <= _SIZE_MAX for number in numbers)
        or type(region.handle) is not bytes
        or region.kind not in (SYSTEM, CUDA)
    ):
        raise MalformedMessage("not a region: wrong types")
    return region


class CudaOpening(NamedTuple):
    """GPU memory as a gateway asks workers for it: `size` bytes from the start of the allocation behind the handle."""

    handle: bytes
    device_id: int
    size: int


def pack_cuda_opening(opening: CudaOpening) -> bytes:
    """The message on `bus.subjects.cuda_open` and `cuda_close`."""
    return bytes(msgpack.packb([WIRE_VERSION, *opening]))


def unpack_cuda_opening(data: bytes) -> CudaOpening:
    """The question in a message. Raises MalformedMessage."""
    try:
        version, handle, device_id, size = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a question for GPU memory: {error}") from error
    if version != WIRE_VERSION or type(handle) is not bytes or not type(device_id) is type(size) is int:
        raise MalformedMessage("not a question for GPU memory: wrong types")
    return CudaOpening(handle, device_id, size)


def pack_cuda_opened(worker: str, reason: str) -> bytes:
    """A worker's answer to the question: "" when it can use the memory, else why not."""
    return bytes(msgpack.packb([WIRE_VERSION, worker, reason]))


def unpack_cuda_opened(data: bytes) -> tuple[str, str]:
    """(worker, why it can't use the memory or ""). Raises MalformedMessage."""
    try:
        version, worker, reason = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not an answer about GPU memory: {error}") from error
    if version != WIRE_VERSION or type(worker) is not str or type(reason) is not str:
        raise MalformedMessage("not an answer about GPU memory: wrong types")
    return worker, reason


def no_regions(name: str, _offset: int, _byte_size: int) -> ClientRef:
    """A `FindRegion` where there are none."""
    raise unknown_region(name)


def unknown_region(name: str) -> WeirError:
    """The refusal of a tensor in a region that is not registered."""
    return not_found(f"Unable to find shared memory region: '{name}'")


def read_place(request: InferRequest, parameters: Mapping[str, Any], find_region: FindRegion) -> ClientRef:
    """The place that the JSON parameters of one of the request's tensors name; the request remembers the region.

    Raises WeirError: INTERNAL for wrong JSON types, else as `find_region`.
    """
    name = string(parameters["shared_memory_region"], "shared_memory_region")
    offset = unsigned(parameters.get("shared_memory_offset", 0), "shared_memory_offset")
    size = unsigned(parameters.get("shared_memory_byte_size", 0), "shared_memory_byte_size")
    place = find_region(name, offset, size)
    request.regions += (name,)
    return place


def place_parameters(name: str, offset: int, size: int) -> Parameters:
    """The parameters by which a tensor names a place, as responses repeat them."""
    parameters: Parameters = {"shared_memory_region": name, "shared_memory_byte_size": size}
    if offset:
        parameters["shared_memory_offset"] = offset
    return parameters
