"""`Observation`: the traces of single requests are reported to the console and other processes that ask for them."""

from __future__ import annotations

from weir.bus.nats.connection import Bus
from weir.calls.trace_feed import TraceFeed
from weir.calls.tracing import Tracing
from weir.gateway.features.feature import Feature


class Observation(Feature):
    """The reports of one gateway (`gateway_id`). Without this feature the console sees batches, but no requests."""

    def __init__(self, bus: Bus, gateway_id: str, tracing: Tracing) -> None:
        self._feed = TraceFeed(bus, gateway_id, tracing, "nats")

    async def start(self) -> None:
        """Subscribes to the requests of observers."""
        await self._feed.start()
