"""`system_region`: the inputs of all samples in one region of system shared memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from weir.perf.clients.administration import Administration
from weir.perf.clients.session import RegionPlace, SampleRequest, Unreachable
from weir.schemas.core.requests import InferRequest

_ALIGNMENT = 64


@asynccontextmanager
async def system_region(
    requests: Sequence[InferRequest], administration: Administration
) -> AsyncIterator[list[SampleRequest]]:
    """Samples whose inputs lie in a region that is registered until the end of the context.

    The server must run on this machine. Raises Unreachable if it does not register the region.
    """
    size = sum(_aligned(tensor.size_bytes) for request in requests for tensor in request.inputs)
    name = f"perf_{secrets.token_hex(6)}"
    memory = SharedMemory(name, create=True, size=max(1, size))
    try:
        samples = _fill(memory.buf, name, requests)
        await administration.register(name, f"/{name}", memory.size)
        try:
            yield samples
        finally:
            with contextlib.suppress(Unreachable):
                await administration.unregister(name)
    finally:
        memory.close()
        memory.unlink()


def _fill(memory: Any, region: str, requests: Sequence[InferRequest]) -> list[SampleRequest]:
    samples: list[SampleRequest] = []
    offset = 0
    for request in requests:
        places: dict[str, RegionPlace] = {}
        for tensor in request.inputs:
            # A place of no bytes would not be valid.
            if tensor.size_bytes and not isinstance(tensor.data, tuple):
                memory[offset : offset + tensor.size_bytes] = bytes(tensor.data)
                places[tensor.name] = RegionPlace(region, offset, tensor.size_bytes)
                offset += _aligned(tensor.size_bytes)
        samples.append(SampleRequest(request, places))
    return samples


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
