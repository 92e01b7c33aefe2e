"""`ClientMemory`: inputs out of memory that clients share, and outputs into it, for one instance of a model.

Inputs are copied once, before the batch is put together: what a client does to its memory from then on changes nothing,
and a place that can't be read fails the one request that names it. Those of a batch that belong to the same input are
laid side by side, so that putting the batch together costs no second copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bus.client_regions import RegionUnusable, read_region, write_region
from bus.identity import shares_memory
from schemas.errors import ErrorCode, WeirError, internal, invalid, unavailable
from schemas.requests import InferRequest
from schemas.string_content import MAX_WALKED_BYTES, check_strings
from schemas.tensors import ClientRef, CudaRegionRef, RegionRef, Tensor, element_count
from worker.backend import Result
from worker.cuda_regions import CudaRegions

MAX_REGION_TENSOR_BYTES = 2**31 - 1
"""An input out of a client's memory: as much as gRPC could carry in a message."""

_KEPT_BYTES = 64 << 20


class ClientMemoryAccess(NamedTuple):
    """What a worker may do with clients' memory: nothing unless `allowed`; `cuda` is None where there is no GPU."""

    allowed: bool = False
    cuda: CudaRegions | None = None


class ClientMemory:
    """See the module. Belongs to the instance's thread; content it fetched lasts until the next batch begins."""

    def __init__(self, access: ClientMemoryAccess) -> None:
        self._access = access
        self._buffers: dict[str, np.ndarray] = {}
        self._ends: dict[str, int] = {}  # how far each buffer is filled for this batch

    def begin(self) -> None:
        """A new batch: buffers are filled from their start again."""
        if self._ends:
            self._ends.clear()
            self._buffers = {name: kept for name, kept in self._buffers.items() if len(kept) <= _KEPT_BYTES}

    def fetch(self, request: InferRequest, gateway: str) -> None:
        """Replaces references to a client's memory by the bytes that lie there. Raises WeirError for what can't be read.

        `gateway` is the one that sent the request: it must be on this host, as the memory is.
        """
        for tensor in request.inputs:
            if isinstance(tensor.data, (RegionRef, CudaRegionRef)):
                self._check_access(gateway)
                self._fetch(request, tensor, tensor.data)
        if request.outputs:
            self.check_outputs(request, gateway)

    def check_outputs(self, request: InferRequest, gateway: str) -> None:
        """Raises WeirError for outputs that are to go where nothing may be written from here; `gateway` as in `fetch`."""
        for output in request.outputs:
            if output.region is not None:
                self._check_access(gateway)

    def deliver(self, request: InferRequest, result: Result) -> None:
        """Puts outputs where the request wants them, which leaves their content empty; an error where that can't be.

        For any thread.
        """
        places = {output.name: output.region for output in request.outputs if output.region is not None}
        if places and result.error is None:
            placed = [(tensor, places[tensor.name]) for tensor in result.outputs if tensor.name in places]
            result.error = self._place(placed)

    def _place(self, placed: Sequence[tuple[Tensor, ClientRef]]) -> WeirError | None:
        for tensor, region in placed:
            if tensor.size_bytes > region.size:
                return internal(
                    f"shared memory size specified with the request for output '{tensor.name}' ({region.size} bytes) "
                    f"should be at least {tensor.size_bytes} bytes to hold the results"
                )
        for tensor, region in placed:
            try:
                self._write(region, tensor.data)  # type: ignore[arg-type]  # a model's output is never a reference
            except RegionUnusable as error:
                return internal(f"failed to write output '{tensor.name}': {error}")
            tensor.data = b""
        return None

    def _fetch(self, request: InferRequest, tensor: Tensor, ref: ClientRef) -> None:
        name, size = tensor.name, ref.size
        if size > MAX_REGION_TENSOR_BYTES:
            raise invalid(f"input '{name}' of {size} bytes is larger than the {MAX_REGION_TENSOR_BYTES} that are read")
        start = self._ends.get(name, 0)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < start + size:
            # What was fetched into the old one stays there; the next batch like this one finds room for all of it.
            try:
                buffer = np.empty(2 * start + size, np.uint8)
            except MemoryError as error:
                raise unavailable(f"there is no memory for the {size} bytes of input '{name}'") from error
            self._buffers[name] = buffer
            start = 0
        target = buffer.data[start : start + size]
        try:
            self._read(ref, target)
        except RegionUnusable as error:
            raise invalid(f"failed to read input '{name}': {error}") from error
        if tensor.datatype == "BYTES" and size <= MAX_WALKED_BYTES:  # what is longer is checked with all other content
            check_strings(target, element_count(tensor.shape), request.id, name, request.model_name)
        tensor.data = target
        self._ends[name] = start + size

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

    @property
    def _cuda(self) -> CudaRegions:
        if self._access.cuda is None:
            raise RegionUnusable("there is no GPU here")
        return self._access.cuda


def side_by_side(contents: Sequence[bytes | memoryview]) -> memoryview | None:
    """All of `contents` in one, without a copy, if `ClientMemory` fetched them to one place one after another."""
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
