"""`MetricsEndpoint`: the page that is scraped, made anew for each scrape after everybody was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bus.payload_fetcher import PayloadFetcher
from bus.payload_server import PayloadServer
from calls.catalog import Catalog
from calls.inference import Inference
from calls.payload_store import PayloadStore
from gateway.custom_metrics import with_families
from gateway.durable.store import DurableStore
from gateway.metrics.device_families import device_families
from gateway.metrics.durable_families import durable_families
from gateway.metrics.load_families import load_families, memory_families, refusal_family
from gateway.metrics.model_families import ServedVersion, model_families, model_labels
from gateway.metrics.payload_families import payload_families
from gateway.metrics.text import CONTENT_TYPE, Family, render
from gateway.metrics.weir_families import cluster_families, gateway_families, health_families, process_families
from gateway.statistics import Statistics
from runtime.health import process_health
from runtime.memory_ledger import MemoryLedger
from schemas.statistics import HealthCounters, ProcessReading
from telemetry.metrics_config import MetricsConfig
from telemetry.process_usage import process_usage


class MetricsEndpoint:
    """Triton's metrics and Weir's own, over HTTP on a port of their own; `config` is `--metrics-config`'s."""

    def __init__(
        self,
        gateway_id: str,
        statistics: Statistics,
        catalog: Catalog,
        inference: Inference,
        ledger: MemoryLedger,
        payloads: PayloadStore,
        durable: DurableStore,
        config: MetricsConfig,
        fetcher: PayloadFetcher,
        payload_server: PayloadServer,
    ) -> None:
        self._gateway_id = gateway_id
        self._statistics = statistics
        self._catalog = catalog
        self._inference = inference
        self._ledger = ledger
        self._payloads = payloads
        self._durable = durable
        self._config = config
        self._fetcher = fetcher
        self._payload_server = payload_server

    def app(self) -> Starlette:
        """The application: `/metrics`, and an empty page for any other path, as in Triton."""

        async def scrape(_request: Request) -> Response:
            return Response(await self.page(), headers={"Content-Type": CONTENT_TYPE})

        async def nothing(_request: Request) -> Response:
            return Response()

        return Starlette(routes=[Route("/metrics", scrape), Route("/{path:path}", nothing)])

    async def page(self) -> bytes:
        """The page in Prometheus's text format."""
        await asyncio.gather(self._statistics.refresh(), self._durable.backlog.refresh())
        return render(with_families(self._families(), self._statistics.custom_metrics().families()))

    def _families(self) -> Iterator[Family]:
        totals = self._statistics.versions()
        versions, names = [], {}
        for served in self._catalog.served():
            names[served.name] = model_labels(served.name, served.namespace)
            tags, has_cache = served.config.metric_tags, self._inference.caches(served)
            for version in served.versions:
                duration_s = self._catalog.load_duration_s(served.name, version)
                versions.append(
                    ServedVersion(totals[served.name, version], tags, duration_s, has_cache, served.namespace)
                )
        yield from model_families(versions, self._config)
        yield from device_families(self._statistics.live_workers())
        yield from cluster_families(self._statistics, totals.values(), self._inference, names)
        yield from load_families(
            (queue for scheduler in self._statistics.schedulers() for queue in scheduler.models),
            names,
            {name: len(self._catalog.workers_of(name)) for name in names},
        )
        yield from gateway_families(self._inference, self._payloads)
        yield from payload_families(self._statistics, self._fetcher, self._payload_server)
        yield refusal_family(self._inference, self._ledger)
        yield from memory_families(self._ledger)
        yield from durable_families(self._durable)
        yield from process_families(self._processes())
        own = HealthCounters.model_validate(process_health())
        yield from health_families([("gateway", self._gateway_id, own), *self._statistics.health()])

    def _processes(self) -> Iterator[tuple[str, str, ProcessReading]]:
        own = process_usage()
        if own is not None:
            yield "gateway", self._gateway_id, ProcessReading.model_validate(own)
        yield from self._statistics.processes()
