"""Shared-memory regions that clients registered, and the parameters by which a tensor names a place in one.

Source: Triton's system and CUDA shared-memory extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from weir.schemas.core.errors import WeirError, invalid, not_found
from weir.schemas.core.requests import InferRequest, Parameters
from weir.schemas.core.tensors import ClientRef, CudaRegionRef, RegionRef
from weir.schemas.kserve.json_documents import string, unsigned
from weir.schemas.wire.codec import Message, NonNegative

SYSTEM: Literal["system"] = "system"
CUDA: Literal["cuda"] = "cuda"
"""The two kinds of regions. They share one namespace: a name is never both."""

CUDA_HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t."""

_SIZE_MAX = 2**64 - 1

FindRegion = Callable[[str, int, int], ClientRef]
"""Returns the place that a client named by `(region, offset, byte_size)`. Raises WeirError with Triton's texts."""


class Region(Message, frozen=True):
    """One registered region, as the value of its key in the bucket of regions.

    System: `key` as the client gave it, `offset` from the start of the object, `file_name` and `inode` of the object.
    CUDA: `handle` is the cudaIpcMemHandle_t of the allocation on GPU `device_id`. `byte_size` is the region's.
    `owner` is whose it is by the access policy, "" without one: regions of other owners may have the same name.
    """

    kind: Literal["system", "cuda"]
    name: str
    byte_size: NonNegative
    key: str = ""
    offset: NonNegative = 0
    file_name: str = ""
    inode: NonNegative = 0
    device_id: NonNegative = 0
    handle: bytes = b""
    owner: str = ""

    @property
    def id(self) -> str:
        """What distinguishes it from all other regions of a host."""
        return region_id(self.owner, self.name)

    def place(self, offset: int, size: int) -> ClientRef:
        """Where `size` bytes at `offset` of this region lie. Raises WeirError (INVALID_ARG) unless they are all in it."""
        if not 0 <= offset < self.byte_size:
            raise invalid(f"Invalid offset for shared memory region: '{self.name}'")
        if size > _SIZE_MAX - offset:
            raise invalid(
                f"Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds maximum value "
                f"({_SIZE_MAX}) for region '{self.name}'"
            )
        # A size of 0 at offset 0 is invalid too, as in Triton, which checks the position of the last byte.
        if not 0 < offset + size <= self.byte_size or size < 0:
            raise invalid(f"Invalid offset + byte size for shared memory region: '{self.name}'")
        if self.kind == CUDA:
            return CudaRegionRef(self.handle, self.device_id, offset, size)
        return RegionRef(self.file_name, self.inode, self.offset + offset, size)


def region_id(owner: str, name: str) -> str:
    """The id of the region that `owner` calls `name`: the name itself for the owner ""."""
    return f"{owner.encode().hex()}\0{name}" if owner else name


class CudaOpening(Message, frozen=True):
    """A gateway's request that workers map GPU memory: `size` bytes from the start of the allocation behind the handle.

    Sent on `weir.bus.naming.subjects.cuda_open` and `cuda_close`.
    """

    handle: bytes
    device_id: int
    size: int


class CudaOpened(Message, frozen=True):
    """A worker's reply to a `CudaOpening`: `reason` is "" if it has mapped the memory, else why not."""

    worker: str
    reason: str


def no_regions(name: str, _offset: int, _byte_size: int) -> ClientRef:
    """A `FindRegion` for frontends without shared memory: every region is unknown."""
    raise unknown_region(name)


def unknown_region(name: str) -> WeirError:
    """The error for a tensor in a region that is not registered."""
    return not_found(f"Unable to find shared memory region: '{name}'")


def read_region_parameters(request: InferRequest, parameters: Mapping[str, Any], find_region: FindRegion) -> ClientRef:
    """The place that the JSON parameters of one of the request's tensors name; the request remembers the region.

    Raises WeirError: INTERNAL for wrong JSON types, else as `find_region`.
    """
    name = string(parameters["shared_memory_region"], "shared_memory_region")
    offset = unsigned(parameters.get("shared_memory_offset", 0), "shared_memory_offset")
    size = unsigned(parameters.get("shared_memory_byte_size", 0), "shared_memory_byte_size")
    place = find_region(name, offset, size)
    request.regions += (name,)
    return place


def region_parameters(name: str, offset: int, size: int) -> Parameters:
    """The parameters by which a tensor names a place, as responses repeat them."""
    parameters: Parameters = {"shared_memory_region": name, "shared_memory_byte_size": size}
    if offset:
        parameters["shared_memory_offset"] = offset
    return parameters
