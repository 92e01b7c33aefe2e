"""`DurableStore`: a gateway's hold on the durable streams: what it stores there, and the leases it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.acked_publisher import AckedPublisher
from bus.cluster_secret import ClusterSecret
from bus.connection import Bus
from bus.durability import DurabilityCheck
from bus.durable_streams import QueueLimits
from bus.leases import Leases
from bus.stored_messages import StoredMessages
from bus.stream_guard import StreamGuard
from gateway.durable.backlog import Backlog
from gateway.durable.counters import DurableCounters
from gateway.settings import GatewaySettings


class DurableStore:
    """See the module. One of a gateway; everything runs in one event loop. `is_known`: whether there is such a model."""

    def __init__(
        self, bus: Bus, gateway_id: str, settings: GatewaySettings, is_known: Callable[[str], bool] | None = None
    ) -> None:
        self.bus = bus
        limits = QueueLimits(
            max_messages=settings.queue_max_messages,
            max_bytes=settings.queue_max_bytes,
            result_ttl_s=settings.result_ttl_secs,
            result_max_bytes=settings.result_max_bytes,
            queue_max_age_s=settings.queue_max_age_secs,
        )
        self.streams = StreamGuard(bus, limits)
        self.durability = DurabilityCheck(bus, settings.nats_monitor)
        self.counters = DurableCounters(is_known)
        self.backlog = Backlog(bus, self.counters)
        self.publisher = AckedPublisher(bus, gateway_id)
        self.messages = StoredMessages(bus, gateway_id)
        self.secret = ClusterSecret(bus, self.publisher)
        self.leases = Leases(bus, self.publisher, gateway_id)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Makes the streams unless they exist, and holds leases from now on.

        Raises WeirError (UNAVAILABLE) where a stream is there that is not what we rely on.
        """
        await self.streams.start(background)
        await self.durability.start()
        await self.leases.start(background)
        await self.publisher.start(background)
        await self.messages.start()
        await self.secret.start()

    def stop(self) -> None:
        """Gives up all leases."""
        self.streams.stop()
        self.leases.stop()
        self.publisher.stop()
