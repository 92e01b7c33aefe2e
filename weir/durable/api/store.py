"""`DurableStore`: the durable streams, as one process uses them: publishing, lookups, leases and counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from weir.bus.kv.cluster_secret import ClusterSecret
from weir.bus.kv.leases import Leases
from weir.bus.nats.connection import Bus
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.durability import DurabilityCheck
from weir.bus.streams.guard import StreamGuard
from weir.durable.api.metrics import Backlog, DurableCounters
from weir.durable.settings import QueueSettings


class DurableStore:
    """One of a process; everything runs in one event loop. `is_known`: whether a model exists."""

    def __init__(
        self, bus: Bus, process_id: str, settings: QueueSettings, is_known: Callable[[str], bool] | None = None
    ) -> None:
        self.bus = bus
        self.streams = StreamGuard(bus, settings.queue_limits)
        self.durability = DurabilityCheck(bus, settings.nats_monitor)
        self.counters = DurableCounters(is_known)
        self.backlog = Backlog(bus, self.counters)
        self.publisher = AckedPublisher(bus, process_id)
        self.messages = bus.jetstream
        self.secret = ClusterSecret(bus)
        self.leases = Leases(bus, self.publisher, process_id)

    @property
    def description(self) -> dict[str, Any]:
        """What the process says of the broker's storage in its presence."""
        return {"durability": self.durability.result.word, "stalled": sorted(self.publisher.stalled)}

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Creates the streams unless they exist, and acquires leases from now on.

        Raises WeirError (UNAVAILABLE) if a stream exists with another configuration than Weir's.
        """
        await self.streams.start(background)
        await self.durability.start()
        await self.leases.start(background)
        await self.publisher.start(background)
        await self.secret.start()

    def stop(self) -> None:
        """Releases all leases."""
        self.streams.stop()
        self.leases.stop()
        self.publisher.stop()
