"""`weir durable`: runs the durable consumer and the jobs in a process of their own, beside gateways that answer clients."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import replace

from weir.access.gate import Gate
from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.model_files import ModelFiles
from weir.bus.kv.presence import Presence
from weir.bus.kv.registry import RegistryView
from weir.bus.kv.settings import LOGGING, TRACE, SharedSettings
from weir.bus.kv.traffic import TrafficRecords
from weir.bus.links.tcp import TcpListener
from weir.bus.naming.identity import own_id
from weir.bus.nats.connection import Bus
from weir.bus.nats.remote_links import listen_for_links
from weir.bus.payloads.arena import PayloadArena, limit_payloads, process_budget, remove_dead_segments
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.reach import process_reach
from weir.bus.payloads.server import PayloadServer
from weir.bus.streams.history import ModelHistory
from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import ResponseCache
from weir.calls.catalog import Catalog
from weir.calls.dispatch import DispatchOptions, RequestDispatcher
from weir.calls.model_control import ModelControl
from weir.calls.payload_store import PayloadStore
from weir.calls.regions import RegionDirectory
from weir.calls.trace_feed import TraceFeed
from weir.calls.tracing import Tracing
from weir.calls.traffic.counters import TrafficCounters, TrafficTotals
from weir.cluster.access.service import AccessService
from weir.cluster.audit import AuditOptions, AuditRecorder
from weir.durable.api.reporting import CounterReporter, read_counters
from weir.durable.api.store import DurableStore
from weir.durable.background import BackgroundWork
from weir.durable.consumer.context import ConsumerServices
from weir.durable.ramps import RampHost
from weir.durable.settings import DurableSettings
from weir.jobs.records.store import JobStore
from weir.runtime.limits.budgets import memory_for_requests_bytes
from weir.runtime.limits.process_limits import find_limits, log_limits, show_bytes
from weir.runtime.memory_ledger import DEFAULT_LIMIT_BYTES, MemoryLedger
from weir.runtime.readiness import announce_failure, announce_ready, watch_parent
from weir.runtime.role_life import run_role
from weir.runtime.ticks import next_tick
from weir.schemas.core.errors import WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.wire.statistics import ConsumerCounters
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import RoleLog, configure_logging
from weir.telemetry.metrics_config import parse_metrics_config
from weir.telemetry.tracing.settings import TraceConfig, unpack_overrides

logger = logging.getLogger("weir.durable")

MIN_LEDGER_BYTES = 16 << 20
"""The smallest default limit of the memory ledger, in however small a container."""

_EXPIRY_INTERVAL_S = 1.0


def run(settings: DurableSettings) -> int:
    """Runs the process until it is stopped; returns the exit status."""
    log = configure_logging("durable", LogSettings.of(settings))
    watch_parent()
    return run_role(functools.partial(_serve, settings, log))


async def _serve(settings: DurableSettings, log: RoleLog, stop: asyncio.Event, background: asyncio.TaskGroup) -> int:
    async with AsyncExitStack() as stack:
        try:
            await _start(settings, log, background, stack)
        except (OSError, ValueError, WeirError) as error:
            message = error.message if isinstance(error, WeirError) else str(error)
            logger.error("%s", message)
            announce_failure(message)
            return 1
        await stop.wait()
    return 0


async def _start(settings: DurableSettings, log: RoleLog, background: asyncio.TaskGroup, stops: AsyncExitStack) -> None:
    """Starts everything, and pushes the stop of each thing onto `stops`, which run in the reverse order."""
    remove_dead_segments()
    limit_payloads(settings.payload_memory_byte_size)
    # A fresh id for each life: responses to an earlier process of the same name must not arrive here.
    id = own_id("durable", None)
    # Its broker user is the gateway's: it does what a gateway does that runs this work itself.
    bus = await Bus.connect(settings.nats_url, id, background, access=settings.nats_access, role="gateway")
    stops.push_async_callback(bus.close)
    bus.live_layout.wanted = settings.live_streams
    peers = await listen_for_links(bus, settings.payload_listen)
    process_reach().set(bus, peers is not None)
    process = _Process(settings, id, bus, peers)
    await process.start_inference(log, background, stops)
    await process.start_work(background, stops)
    announce_ready()


class _Process:
    """The parts of one process."""

    def __init__(self, settings: DurableSettings, id: str, bus: Bus, peers: TcpListener | None) -> None:
        self._settings = settings
        self._id = id
        self._bus = bus
        self._tracing = Tracing(_trace_config(settings))
        self._trace_feed = TraceFeed(bus, id, self._tracing, "durable")
        self._registry = RegistryView(bus)
        self._catalog = Catalog(self._registry, strict_readiness=True)
        self._payloads = PayloadStore(PayloadArena(id), self._registry.model_shares_memory)
        self._payload_server = PayloadServer(bus, id, peers)
        self._fetcher = PayloadFetcher(bus, id)
        self._regions = RegionDirectory(bus, self._registry, settings.allow_client_shm)
        self._cache: ResponseCache | None = None
        cache_config = CacheConfig.parse(settings.cache_config)
        if cache_config is not None:
            summaries = parse_metrics_config(settings.metrics_config).summary_latencies
            self._cache = ResponseCache(bus, id, self._catalog, self._registry, cache_config, summaries)
        options = DispatchOptions(self._regions, self._tracing, self._cache, self._fetcher)
        self._inference = RequestDispatcher(bus, id, self._catalog, self._payloads, options)
        self._known = KnownModels(bus)
        self._desired = DesiredModels(bus)
        control = ModelControl(self._registry, self._desired, ModelFiles(bus))
        self._catalog.set_unwanted_check(lambda name: control.is_explicit and self._desired.is_unwanted(name))
        self._known.follow(self._desired, lambda: control.is_explicit)
        self._catalog.accept_known(self._known)
        self._traffic = TrafficRecords(bus)
        counters = TrafficCounters()
        self._traffic_totals = TrafficTotals(bus, id, counters)
        self._catalog.follow_traffic(self._traffic, counters)
        self._durable = DurableStore(bus, id, settings, self._catalog.knows)
        self._ramps = RampHost(self._durable.leases, self._traffic, self._traffic_totals, ModelHistory(bus))
        self._jobs = JobStore(bus, self._durable.publisher)
        self._access = AccessService(bus, Gate(time.time, self._catalog.latest_version), settings)
        self._services = ConsumerServices(
            catalog=self._catalog,
            inference=self._inference,
            limits=RequestLimits(input_size=settings.http_max_input_size),
            ledger=_ledger(settings),
            find_region=self._regions.find,
            has_workers=lambda: bool(self._registry.workers),
            gate=self._access.gate,
        )

    async def start_inference(self, log: RoleLog, background: asyncio.TaskGroup, stops: AsyncExitStack) -> None:
        """Starts what submits requests to models."""
        log_limits(
            logger,
            find_limits(),
            requests=show_bytes(self._services.ledger.limit_bytes),
            payloads=show_bytes(process_budget().total_bytes),
        )
        await self._access.start(background)
        stops.callback(self._access.stop)
        stops.callback(self._payloads.close)
        await self._payload_server.start()
        stops.callback(self._payload_server.close)
        await self._fetcher.start(background)
        stops.callback(self._fetcher.close)
        stops.callback(self._services.offload.close)
        if self._cache is not None:
            await self._cache.start()
        await self._durable.start(background)
        stops.callback(self._durable.stop)
        audits = AuditOptions.of(self._settings)
        audit = AuditRecorder(self._bus, self._durable.publisher, self._access.gate, audits)
        audit.start(background)
        stops.push_async_callback(audit.stop)
        stops.push_async_callback(self._tracing.stop)
        await self._inference.start(background)  # stopped together with the work
        await self._trace_feed.start()
        await _follow_settings(self._bus, log, self._tracing)
        await self._traffic.start()
        await self._traffic_totals.start()
        stops.callback(self._traffic_totals.stop)
        await self._registry.start(background)
        await self._known.start(is_maker=False)
        await self._desired.start()
        self._catalog.start_warmup()
        await self._regions.start()
        expiry = background.create_task(_expire(self._registry, self._bus))
        stops.callback(expiry.cancel)

    async def start_work(self, background: asyncio.TaskGroup, stops: AsyncExitStack) -> None:
        """Starts the durable consumer and the jobs, and announces the process."""
        name = own_id("durable", self._settings.durable_id)
        read_cache = list if self._cache is None else self._cache.counters.snapshot
        reporter = CounterReporter(self._bus, name, self._read_counters, read_cache)
        await reporter.start()
        stops.callback(reporter.stop)  # after the drain, in which requests still end
        self._jobs.start(background)
        work = BackgroundWork(self._durable, self._jobs, self._services, self._id, self._settings, self._ramps)
        stops.push_async_callback(_drain, work, self._jobs, self._inference, self._settings.exit_timeout_secs)
        await work.start(background)
        presence = Presence(self._bus, "durable", self._id, lambda: self._durable.description)
        announcing = await presence.start(background)
        stops.callback(presence.publish, leaving=True)
        stops.callback(announcing.cancel)

    def _read_counters(self) -> ConsumerCounters:
        return read_counters(
            self._durable,
            self._inference,
            self._payloads,
            self._services.ledger,
            self._fetcher,
            self._payload_server,
        )


async def _drain(work: BackgroundWork, jobs: JobStore, inference: RequestDispatcher, timeout_s: float) -> None:
    """Ends the work: what runs is recorded within `timeout_s`; the next process continues the rest."""
    jobs.stop()
    deadline_s = time.monotonic() + timeout_s
    await work.stop(timeout_s)
    await inference.stop(max(0.0, deadline_s - time.monotonic()))


async def _follow_settings(bus: Bus, log: RoleLog, tracing: Tracing) -> None:
    """Applies changes of the log and trace settings that clients make at a gateway."""

    def set_trace(model: str, data: bytes) -> None:
        tracing.replace(model, unpack_overrides(data) if data else {})

    shared = SharedSettings(bus)
    shared.follow(LOGGING, log.take)
    shared.follow(TRACE, set_trace)
    await shared.start()


async def _expire(registry: RegistryView, bus: Bus) -> None:
    while True:
        await next_tick(_EXPIRY_INTERVAL_S)
        if bus.is_connected:
            registry.expire()


def _ledger(settings: DurableSettings) -> MemoryLedger:
    """The ledger of messages and objects. By default half of what a gateway takes: bodies wait in the stream, not here."""
    default_bytes = max(MIN_LEDGER_BYTES, min(DEFAULT_LIMIT_BYTES, memory_for_requests_bytes() // 4) // 2)
    return MemoryLedger(settings.gateway_memory_byte_size or default_bytes, settings.http_max_input_size)


def _trace_config(settings: DurableSettings) -> TraceConfig:
    """The configured tracing. Trace files get the suffix `.durable`: the gateway writes those of the name itself."""
    config = TraceConfig.parse(settings.trace_config)
    return replace(config, file=f"{config.file}.durable") if config.file else config
