"""`CachedResponses`: responses of models with `response_cache` are kept, and equal requests get them without a run."""

from __future__ import annotations

from weir.bus.kv.registry import RegistryView
from weir.bus.nats.connection import Bus
from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import ResponseCache
from weir.calls.catalog import Catalog
from weir.durable.api.reporting import CounterReporter
from weir.gateway.features.feature import Feature


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
        self._reporter = (
            CounterReporter(bus, gateway_id, None, self.cache.counters.snapshot) if reports_counters else None
        )

    async def start(self) -> None:
        """Connects to the store, where it is shared. Raises WeirError or OSError."""
        await self.cache.start()
        if self._reporter is not None:
            await self._reporter.start()

    async def stop(self) -> None:
        """Publishes the final counters."""
        if self._reporter is not None:
            self._reporter.stop()
