"""`SharedMemoryIO`: reads inputs from memory that clients share, and writes outputs into it, for one instance.

Inputs are copied once, before the batch is joined: later changes by the client have no effect, and a region that can't be
read fails only its own request. The tensors of one input are placed next to each other, so that joining the batch needs no
second copy.

Regions on the GPU of an instance that moves tensors there itself (`Instance.region_gpu`) are only mapped: the instance
copies them within the GPU. Regions of other GPUs are copied through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from weir.bus.naming.identity import shares_memory
from weir.bus.payloads.client_regions import RegionError, read_region, write_region
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import (
    MAX_WALKED_BYTES,
    ClientRef,
    CudaRegionRef,
    RegionRef,
    Tensor,
    check_strings,
    element_count,
)
from weir.worker.backend_api.interface import Result
from weir.worker.devices.cuda_shared_memory import CudaRegions, MappedRegion

MAX_REGION_TENSOR_BYTES = 2**31 - 1
"""The size limit of an input in a client's memory: the same as that of a gRPC message."""

_MAX_REUSED_BYTES = 64 << 20

_NONE_MAPPED: Mapping[tuple[int, str], MappedRegion] = {}


class SharedMemoryAccess(NamedTuple):
    """Whether a worker may use clients' memory; `cuda` is None without a GPU."""

    allowed: bool = False
    cuda: CudaRegions | None = None


def _ordinary_memory(size_bytes: int) -> np.ndarray:
    return np.empty(size_bytes, np.uint8)


class InputBuffers:
    """The content of clients' memory that one batch has read, in one buffer for each input, and the regions it uses."""

    def __init__(self) -> None:
        self.regions: list[MappedRegion] = []
        self._buffers: dict[str, np.ndarray] = {}
        self._ends: dict[str, int] = {}  # the bytes in use of each buffer

    def target(self, name: str, size: int, allocate: Callable[[int], np.ndarray] = _ordinary_memory) -> memoryview:
        """Memory for `size` bytes of input `name`, behind what is in use; `allocate` makes new one. Raises MemoryError."""
        start = self._ends.get(name, 0)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < start + size:
            # The old buffer keeps what was read into it; the new one is large enough for the next batch of this size.
            buffer = self._buffers[name] = allocate(2 * start + size)
            start = 0
        self._ends[name] = start + size
        return buffer.data[start : start + size]

    def clear(self) -> None:
        """Marks all memory as free, keeps it for the next batch unless it is very large, and releases the regions.

        A client may free its memory as soon as its requests have ended and it has unregistered the region.
        """
        for region in self.regions:
            region.release()
        self.regions.clear()
        self._ends.clear()
        self._buffers = {name: one for name, one in self._buffers.items() if len(one) <= _MAX_REUSED_BYTES}


class SharedMemoryIO:
    """Belongs to the instance's thread. A batch's content is valid until `release`: several batches may be running."""

    def __init__(self, access: SharedMemoryAccess) -> None:
        self._access = access
        self._free: list[InputBuffers] = []
        self.content: InputBuffers | None = None
        """What the batch that began last has read; None if it has read nothing, as at the begin of a batch."""
        self.gpu = -1
        """The GPU on which the instance copies regions itself; -1 for none."""

    def release(self, content: InputBuffers) -> None:
        """Lets other batches reuse the memory, once no request of the batch can run (again)."""
        content.clear()
        self._free.append(content)

    def fetch(self, request: InferRequest, gateway: str) -> None:
        """Replaces references to a client's memory by their content. Raises WeirError for content that can't be read.

        The request's `gateway` must be on this host, like the memory.
        """
        for tensor in request.inputs:
            if isinstance(tensor.data, (RegionRef, CudaRegionRef)):
                self._check_access(gateway)
                self._fetch(request, tensor, tensor.data)
        if request.outputs:
            self.check_outputs(request, gateway)

    def map_outputs(
        self, requests: Sequence[InferRequest], is_delivered: Sequence[bool]
    ) -> Mapping[tuple[int, str], MappedRegion]:
        """The regions on the instance's GPU that get outputs of these requests, by request and output.

        Requests that are not delivered (padding, repeated ones) have none. What can't be mapped is left out: `deliver`
        then reports why.
        """
        if self.gpu < 0 or self._access.cuda is None:
            return _NONE_MAPPED
        mapped: dict[tuple[int, str], MappedRegion] = {}
        for position, (request, delivers) in enumerate(zip(requests, is_delivered, strict=True)):
            for output in request.outputs if delivers else ():
                region = output.region
                if isinstance(region, CudaRegionRef) and region.device == self.gpu and not output.class_count:
                    with suppress(RegionError):
                        mapped[position, output.name] = self._map(region)
        return mapped

    def check_outputs(self, request: InferRequest, gateway: str) -> None:
        """Raises WeirError for outputs that this worker must not write to a client's memory; `gateway` as in `fetch`."""
        for output in request.outputs:
            if output.region is not None:
                self._check_access(gateway)

    def deliver(self, request: InferRequest, result: Result) -> None:
        """Writes outputs to the requested regions, which leaves them without content; sets `result.error` if that fails.

        Called in any thread.
        """
        regions = {output.name: output.region for output in request.outputs if output.region is not None}
        if regions and result.error is None:
            outputs = [(tensor, regions[tensor.name]) for tensor in result.outputs if tensor.name in regions]
            result.error = self._write_outputs(outputs)

    def _write_outputs(self, outputs: Sequence[tuple[Tensor, ClientRef]]) -> WeirError | None:
        for tensor, region in outputs:
            if tensor.size_bytes > region.size:
                return internal(
                    f"shared memory size specified with the request for output '{tensor.name}' ({region.size} bytes) "
                    f"should be at least {tensor.size_bytes} bytes to hold the results"
                )
        for tensor, region in outputs:
            if isinstance(tensor.data, MappedRegion):  # the GPU has copied it there
                tensor.data = b""
                continue
            try:
                self._write(region, tensor.data)  # type: ignore[arg-type]  # a model's output is never a reference
            except RegionError as error:
                return internal(f"failed to write output '{tensor.name}': {error}")
            tensor.data = b""
        return None

    def _fetch(self, request: InferRequest, tensor: Tensor, ref: ClientRef) -> None:
        name, size = tensor.name, ref.size
        if size > MAX_REGION_TENSOR_BYTES:
            raise invalid(f"input '{name}' of {size} bytes is larger than the {MAX_REGION_TENSOR_BYTES} that are read")
        if isinstance(ref, CudaRegionRef) and ref.device == self.gpu and tensor.datatype != "BYTES":
            try:
                tensor.data = self._map(ref)  # type: ignore[assignment]  # for the instance, which copies it
            except RegionError as error:
                raise invalid(f"failed to read input '{name}': {error}") from error
            return
        buffers = self._buffers()
        try:
            if isinstance(ref, CudaRegionRef):
                target = buffers.target(name, size, partial(self._allocate_for_copies, ref.device))
            else:
                target = buffers.target(name, size)
        except MemoryError as error:
            raise unavailable(f"can't allocate the {size} bytes of input '{name}'") from error
        try:
            self._read(ref, target)
        except RegionError as error:
            raise invalid(f"failed to read input '{name}': {error}") from error
        if tensor.datatype == "BYTES" and size <= MAX_WALKED_BYTES:  # longer content is checked later
            check_strings(target, element_count(tensor.shape), request.id, name, request.model_name)
        tensor.data = target

    def _check_access(self, gateway: str) -> None:
        if not self._access.allowed:
            raise WeirError(ErrorCode.UNSUPPORTED, "Client shared memory is disabled on the model's worker.")
        if not shares_memory(gateway):
            raise WeirError(ErrorCode.UNSUPPORTED, "the model's worker is not on the host of the shared memory region")

    def _read(self, ref: ClientRef, target: memoryview) -> None:
        if isinstance(ref, RegionRef):
            read_region(ref, target)
        else:
            self._cuda.read(ref, target)

    def _write(self, ref: ClientRef, content: bytes | memoryview) -> None:
        if isinstance(ref, RegionRef):
            write_region(ref, content)
        else:
            self._cuda.write(ref, content)

    def _buffers(self) -> InputBuffers:
        if self.content is None:
            self.content = self._free.pop() if self._free else InputBuffers()
        return self.content

    def _map(self, ref: CudaRegionRef) -> MappedRegion:
        region = self._cuda.map(ref)
        self._buffers().regions.append(region)
        return region

    def _allocate_for_copies(self, gpu: int, size_bytes: int) -> np.ndarray:
        cuda = self._access.cuda
        # Without a GPU the read fails, as it has to.
        return _ordinary_memory(size_bytes) if cuda is None else cuda.allocate_host(size_bytes, gpu)

    @property
    def _cuda(self) -> CudaRegions:
        if self._access.cuda is None:
            raise RegionError("the worker has no GPU")
        return self._access.cuda


def contiguous_view(contents: Sequence[bytes | memoryview]) -> memoryview | None:
    """A view of all `contents` without a copy, if `SharedMemoryIO` has placed them one after the other; otherwise None."""
    first = contents[0]
    if type(first) is not memoryview or not isinstance(buffer := first.obj, np.ndarray):
        return None
    base = _address(buffer)
    start = end = _address(first) - base
    for content in contents:
        if type(content) is not memoryview or content.obj is not buffer or _address(content) - base != end:
            return None
        end += len(content)
    return buffer.data[start:end]


def _address(data: np.ndarray | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
