"""`Caller`: a `RequestDispatcher` inside the test, beside the gateway of a running server; it records every response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from weir.bus.kv.registry import RegistryView
from weir.bus.naming.identity import new_id
from weir.bus.nats.connection import Bus
from weir.bus.payloads.arena import PayloadArena
from weir.calls.catalog import Catalog
from weir.calls.dispatch import DispatchOptions, RequestDispatcher
from weir.calls.in_flight import PendingRequest
from weir.calls.payload_store import PayloadStore
from weir.gateway.admin.shared_memory import RegionPermission, SharedMemoryRegions
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor

Outcome = InferResponse | WeirError | None


class Heard:
    """What came for one request: outcomes in order, and whether the last was the end."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.is_over = False
        self.pending: PendingRequest | None = None
        self._changed = asyncio.Event()

    def on_response(self, outcome: Outcome, is_final: bool) -> None:
        assert not self.is_over, "an answer after the last"
        self.outcomes.append(outcome)
        self.is_over = is_final
        self._changed.set()

    async def wait(self, outcomes: int = 0, timeout_s: float = 20.0) -> list[Outcome]:
        """The outcomes, once there are so many, or the last for 0."""
        async with asyncio.timeout(timeout_s):
            while not (len(self.outcomes) >= outcomes if outcomes else self.is_over):
                self._changed.clear()
                await self._changed.wait()
        return self.outcomes

    def numbers(self) -> list[int]:
        """`NUMBER` of each response."""
        return [
            int(array_of(outcome, "NUMBER")[0, 0]) for outcome in self.outcomes if isinstance(outcome, InferResponse)
        ]


class Caller:
    """Asks models by plans, see `tests/models/streamer.py`."""

    def __init__(self, bus: Bus, inference: RequestDispatcher, catalog: Catalog) -> None:
        self.inference = inference
        self._bus = bus
        self._catalog = catalog

    async def ask(self, model: str, **plan: Any) -> Heard:
        """A request that was submitted; its model is waited for."""
        async with asyncio.timeout(20):
            while not self._catalog.is_ready(model, ""):
                await asyncio.sleep(0.01)
        received = Heard()
        content = np.array([[json.dumps(plan).encode()]], dtype=np.object_)
        request = InferRequest(model, inputs=[Tensor.from_numpy("PLAN", content, "BYTES")])
        received.pending = self.inference.submit(request, received.on_response)
        return received

    async def flush(self) -> None:
        """What was submitted or given up before is on its way to the broker, which has it before anything later."""
        await asyncio.sleep(0)
        await self._bus.flush()


@asynccontextmanager
async def caller(nats_url: str) -> AsyncIterator[Caller]:
    """A caller connected to this broker; nothing may be in flight when it goes."""
    gateway_id = new_id("gateway")
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats_url, gateway_id, background)
        registry = RegistryView(bus)
        catalog = Catalog(registry, True)
        payloads = PayloadStore(PayloadArena(gateway_id), registry.model_shares_memory)
        regions = SharedMemoryRegions(bus, gateway_id, registry, RegionPermission())
        inference = RequestDispatcher(bus, gateway_id, catalog, payloads, DispatchOptions(regions))
        await inference.start(background)
        await registry.start(background)
        try:
            yield Caller(bus, inference, catalog)
            assert inference.in_flight == 0
        finally:
            await inference.stop(0)
            payloads.close()
            await bus.close()


def run_with_caller(nats_url: str, test: Callable[[Caller], Coroutine[Any, Any, Any]]) -> Any:
    """What a coroutine function returns that is given a caller."""

    async def with_caller() -> Any:
        async with caller(nats_url) as connected:
            return await test(connected)

    return asyncio.run(with_caller())


def array_of(outcome: Outcome, name: str) -> np.ndarray:
    """The output of this name of a response."""
    assert isinstance(outcome, InferResponse), outcome
    return next(tensor for tensor in outcome.outputs if tensor.name == name).to_numpy()
