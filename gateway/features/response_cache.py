"""`CachedResponses`: responses of models with `response_cache` are kept, and equal requests get them without a run."""

from __future__ import annotations

import time

from weir.bus.kv.registry import RegistryView
from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import CacheCounters, ResponseCache
from weir.calls.catalog import Catalog
from weir.gateway.features.feature import Feature
from weir.schemas.wire.statistics import pack_counters


class CachedResponses(Feature):
    """The response cache of one gateway, which its dispatcher asks (`cache`).

    With `reports_counters` it reports the hits to other gateways itself; else the gateway does, with all its counters. The
    families `nv_cache_…` are made of the counters of all gateways, by each. A gateway without this feature runs every
    request.
    """

    def __init__(  # noqa: PLR0913 - what a cache depends on
        self,
        bus: Bus,
        gateway_id: str,
        catalog: Catalog,
        registry: RegistryView,
        config: CacheConfig,
        summary_latencies: bool,
        reports_counters: bool,
    ) -> None:
        self.cache = ResponseCache(bus, gateway_id, catalog, registry, config, summary_latencies)
        self._reporter = CacheCounterReporter(bus, gateway_id, self.cache.counters) if reports_counters else None

    async def start(self) -> None:
        """Connects to the store, where it is shared. Raises WeirError or OSError."""
        await self.cache.start()
        if self._reporter is not None:
            await self._reporter.start()

    async def stop(self) -> None:
        """Publishes the final counters."""
        if self._reporter is not None:
            self._reporter.stop()


class CacheCounterReporter:
    """Answers `statistics.query` with `counters`. A gateway without a cache does not answer, and is not waited for."""

    def __init__(self, bus: Bus, gateway_id: str, counters: CacheCounters) -> None:
        self._bus = bus
        self._id = gateway_id
        self._counters = counters
        self._born_ns = time.time_ns()

    async def start(self) -> None:
        """Subscribes to queries, and announces this gateway as a source of counters."""
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_query)
        self._bus.publish(subjects.LAST_COUNTERS, self._packed())

    def stop(self) -> None:
        """Publishes the final counters, which stay in the sums of the other gateways."""
        self._bus.publish(subjects.LAST_COUNTERS, self._packed(leaving=True))

    def _on_query(self, message: Message) -> None:
        if may_reply_to(message, subjects.counters("")):
            self._bus.publish(message.reply, self._packed())

    def _packed(self, leaving: bool = False) -> bytes:
        return pack_counters(
            {"gateway": self._id, "born_ns": self._born_ns, "models": self._counters.snapshot(), "leaving": leaving}
        )
