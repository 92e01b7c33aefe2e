"""`DurableStore`: a gateway's hold on the durable streams: what it stores there, and the leases it has."""

from __future__ import annotations

import asyncio

from bus.acked_publisher import AckedPublisher
from bus.connection import Bus
from bus.durable_streams import QueueLimits, ensure_durable_streams
from bus.leases import Leases
from gateway.durable.counters import DurableCounters
from gateway.settings import GatewaySettings


class DurableStore:
    """See the module. One of a gateway; everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str, settings: GatewaySettings) -> None:
        self.bus = bus
        self._limits = QueueLimits(
            max_messages=settings.queue_max_messages,
            max_bytes=settings.queue_max_bytes,
            result_ttl_s=settings.result_ttl_secs,
            result_max_bytes=settings.result_max_bytes,
        )
        self.counters = DurableCounters()
        self.publisher = AckedPublisher(bus, gateway_id)
        self.leases = Leases(bus, self.publisher, gateway_id)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Makes the streams unless they exist, and holds leases from now on."""
        await self._ensure_streams()
        self.bus.on_reconnect(self._ensure_streams)
        await self.leases.start(background)
        await self.publisher.start(background)

    def stop(self) -> None:
        """Gives up all leases."""
        self.leases.stop()
        self.publisher.stop()

    async def _ensure_streams(self) -> None:
        await ensure_durable_streams(self.bus, self._limits)
