"""`MetricsEndpoint`: the metrics page, built for each scrape from the counters of all processes."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.server import PayloadServer
from weir.durable.api.reporting import read_counters, sum_counters
from weir.gateway.context import GatewayContext
from weir.gateway.metrics.custom import custom_families, merge_families
from weir.gateway.metrics.durable import durable_families
from weir.gateway.metrics.openmetrics import Renderer, negotiate
from weir.gateway.metrics.shared_page import SharedPage
from weir.gateway.metrics.text import Labels, MetricFamily, render
from weir.gateway.metrics.triton import ServedVersion, device_families, model_families, model_labels
from weir.gateway.metrics.weir import (
    cluster_families,
    connection_families,
    gateway_families,
    health_families,
    load_families,
    memory_families,
    payload_families,
    process_families,
    refusal_family,
)
from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection
from weir.http_server.door import HttpDoor
from weir.http_server.responses import weir_error_response
from weir.http_server.routing import Route
from weir.runtime.loop_lag import process_health
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.processes.usage import process_usage
from weir.schemas.wire.statistics import ConnectionCounters, ConsumerCounters, HealthCounters, ProcessReading
from weir.telemetry.metrics_config import MetricsConfig

MAX_REQUEST_BYTES = 64 * 1024
"""The largest body of a request for metrics. A scraper sends none."""


MoreFamilies = Callable[[Mapping[str, Labels]], Iterable[MetricFamily]]
"""Makes further families from the labels of models by identity."""


class PayloadTransfers(NamedTuple):
    """What fetches payloads from other hosts, and what serves them to other hosts."""

    fetcher: PayloadFetcher
    server: PayloadServer


class MetricsEndpoint:
    """Serves Triton's metrics and Weir's own over HTTP; `config` is the value of `--metrics-config`.

    `more_families` makes those of the gateway's features. With `durable_id`, the counters of that `weir durable` process
    and of the gateways in its group are added to this gateway's own.
    """

    def __init__(  # noqa: PLR0913 - what it shows
        self,
        gateway_id: str,
        context: GatewayContext,
        config: MetricsConfig,
        transfers: PayloadTransfers,
        more_families: MoreFamilies,
        durable_id: str = "",
    ) -> None:
        self._gateway_id = gateway_id
        self._gate = context.gate
        self._statistics = context.statistics
        self._catalog = context.catalog
        self._inference = context.inference
        self._ledger = context.ledger
        self._connection_cap = context.connection_cap
        self._payloads = context.payloads
        self._durable = context.durable
        self._more_families = more_families
        self._config = config
        self._transfers = transfers
        self._durable_id = durable_id

    def app(self) -> Starlette:
        """The ASGI application: `/metrics`, and an empty page for any other path, as in Triton."""
        pages: dict[Renderer, SharedPage] = {}

        async def scrape(request: Request) -> Response:
            renderer, content_type = negotiate(request.headers.get("accept", ""))
            if renderer not in pages:
                pages[renderer] = SharedPage(functools.partial(self._page, renderer), time.monotonic)
            return Response(await pages[renderer].get(), headers={"Content-Type": content_type})

        async def nothing(_request: Request) -> Response:
            return Response()

        routes = [Route("/metrics", scrape, Action.METRICS), Route("/{path:path}", nothing, Action.METRICS)]
        app = Starlette(routes=routes)
        app.state.door = HttpDoor(self._gate, weir_error_response, "metrics")
        return app

    async def _page(self, renderer: Renderer) -> bytes:
        families = list(await self.families())
        return render(families) if renderer is render else await asyncio.to_thread(renderer, families)

    def connection(self) -> Callable[..., HttpConnection]:
        """The connections of the metrics port; they have memory ledgers of their own, and count with all others."""
        limits = ConnectionLimits(
            ledger=MemoryLedger(),
            arriving_slots=MemoryLedger(),
            cap=self._connection_cap,
            max_body_bytes=MAX_REQUEST_BYTES,
        )
        return functools.partial(HttpConnection, self.app(), limits)

    async def families(self) -> Iterator[MetricFamily]:
        """The families of the page, with fresh counters."""
        await asyncio.gather(self._statistics.refresh(), self._durable.backlog.refresh())
        return merge_families(self._families(), custom_families(self._statistics.custom_metrics().to_counters()))

    def _families(self) -> Iterator[MetricFamily]:
        totals = self._statistics.versions()
        counters = self._counters()
        dispatched = counters.dispatch
        versions, names, on_gpus = [], {}, set()
        for served in self._catalog.served():
            names[served.name] = model_labels(served.name, served.namespace)
            groups = served.config.instance_group
            if groups and all(group.kind == "KIND_GPU" for group in groups):
                on_gpus.add(served.name)
            tags, has_cache = served.config.metric_tags, self._inference.caches(served)
            for version in served.versions:
                duration_s = self._catalog.load_duration_s(served.name, version)
                versions.append(
                    ServedVersion(totals[served.name, version], tags, duration_s, has_cache, served.namespace)
                )
        yield from model_families(versions, self._config)
        yield from device_families(self._statistics.live_workers())
        yield from cluster_families(self._statistics, totals.values(), dispatched, names)
        yield from load_families(
            (queue for scheduler in self._statistics.schedulers() for queue in scheduler.models),
            names,
            {name: len(self._catalog.workers_of(name)) for name in names},
            on_gpus,
        )
        yield from self._more_families(names)
        yield from gateway_families(dispatched)
        yield from payload_families(self._statistics, dispatched)
        yield refusal_family(dispatched, counters.ledger)
        yield from memory_families(counters.ledger)
        yield from connection_families(counters.connections)
        yield from durable_families(self._durable, counters)
        yield from process_families(self._processes())
        own = HealthCounters(**process_health())
        yield from health_families([("gateway", self._gateway_id, own), *self._statistics.health()])

    def own_counters(self) -> ConsumerCounters:
        """What this gateway counts."""
        counters = read_counters(self._durable, self._inference, self._payloads, self._ledger, *self._transfers)
        counters.dispatch.rejected |= {f"limit_{kind}": number for kind, number in self._gate.refused.items()}
        cap = self._connection_cap
        counters.connections = ConnectionCounters(open=cap.open, limit=cap.limit, ended=dict(cap.ended))
        return counters

    def _counters(self) -> ConsumerCounters:
        """What this gateway counts, `weir durable` in its place, and further gateways on the same ports."""
        live, departed = self._statistics.consumers(self._durable_id)
        return sum_counters([self.own_counters(), *live], departed)

    def _processes(self) -> Iterator[tuple[str, str, ProcessReading]]:
        own = process_usage()
        if own is not None:
            yield (
                "gateway",
                self._gateway_id,
                ProcessReading(cpu_s=own["cpu_s"], resident_bytes=int(own["resident_bytes"])),
            )
        yield from self._statistics.processes()
