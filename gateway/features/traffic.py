"""`Traffic`: requests are split among the versions of a model by rules; rules change in ramps; copies run on a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weir.bus.kv.traffic import TrafficRecords
from weir.bus.nats.connection import Bus
from weir.bus.streams.history import ModelHistory
from weir.bus.streams.shadow_samples import ShadowSamples
from weir.calls.catalog import Catalog
from weir.calls.dispatch import RequestDispatcher
from weir.calls.traffic.counters import TrafficCounters, TrafficTotals
from weir.calls.traffic.shadow import ShadowCopies
from weir.durable.api.store import DurableStore
from weir.durable.ramps import RampHost
from weir.gateway.admin.peers import GatewayPeers
from weir.gateway.admin.traffic import TrafficControl
from weir.gateway.features.feature import Feature
from weir.gateway.grpc.handlers import Methods
from weir.gateway.grpc.weir_service import traffic_methods
from weir.gateway.http.traffic import traffic_routes
from weir.gateway.metrics.text import Labels, MetricFamily
from weir.gateway.metrics.traffic import traffic_families
from weir.http_server.routing import Route


class Traffic(Feature):
    """The traffic rules of one gateway.

    `control` changes the rules for clients, and restores them for a rollback. `ramps` runs ramps, where the gateway does
    the work of `weir durable`. A gateway without this feature sends requests that name no version to the version that the
    model's policy chooses, as Triton does, and can't roll back changes of rules.
    """

    def __init__(  # noqa: PLR0913 - what rules depend on
        self,
        bus: Bus,
        gateway_id: str,
        catalog: Catalog,
        inference: RequestDispatcher,
        durable: DurableStore,
        history: ModelHistory,
        peers: GatewayPeers,
    ) -> None:
        counters = TrafficCounters()
        counters.copies = ShadowCopies(counters, inference.submit_copy)
        totals, records = TrafficTotals(bus, gateway_id, counters), TrafficRecords(bus)
        samples = ShadowSamples(bus, gateway_id)
        self.control = TrafficControl(catalog, records, counters, totals, history, samples, peers.synchronise)
        self.ramps = RampHost(durable.leases, records, totals, history)

    def http_routes(self) -> Sequence[Route]:
        """`/v2/models/{model}/traffic` and below."""
        return traffic_routes(self.control)

    def grpc_methods(self) -> Methods:
        """The service `weir.v1.Traffic`."""
        return traffic_methods(self.control)

    def metrics(self, served: Mapping[str, Labels]) -> Iterable[MetricFamily]:
        """The families `weir_version_…`."""
        control, totals = self.control, self.control.totals
        return traffic_families(totals.of(), totals.comparisons(), control.shares(), control.ramps(), served)

    async def start(self) -> None:
        """Follows the rules, and the counters of all callers."""
        await self.control.start()

    async def stop(self) -> None:
        """Publishes this gateway's counters for the last time."""
        await self.control.stop()
