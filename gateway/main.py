"""`weir gateway`: starts the frontends of a gateway and runs them until the process is to stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from weir.access.gate import Gate
from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.model_files import ModelFiles
from weir.bus.kv.presence import Presence
from weir.bus.kv.registry import RegistryView
from weir.bus.kv.settings import SharedSettings
from weir.bus.links.tcp import TcpListener
from weir.bus.naming.identity import own_id
from weir.bus.nats.connection import Bus
from weir.bus.nats.remote_links import listen_for_links
from weir.bus.payloads.arena import PayloadArena, limit_payloads, process_budget, remove_dead_segments
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.reach import process_reach
from weir.bus.payloads.server import PayloadServer
from weir.bus.streams.durability import Durability
from weir.bus.streams.history import ModelHistory
from weir.calls.catalog import Catalog
from weir.calls.dispatch import DispatchOptions, RequestDispatcher
from weir.calls.model_control import ModelControl
from weir.calls.payload_store import PayloadStore
from weir.calls.readiness import Readiness
from weir.calls.tracing import Tracing
from weir.cluster.access.exposure import check_exposure, frontend_addresses
from weir.cluster.access.rate_limits import RateLimits
from weir.cluster.access.service import AccessService
from weir.cluster.audit import AuditOptions, AuditRecorder
from weir.cluster.counters.collection import Statistics
from weir.durable.api.acceptance import QueueProvisioner
from weir.durable.api.async_requests import AsyncRequests
from weir.durable.api.reporting import CounterReporter
from weir.durable.api.store import DurableStore
from weir.durable.background import BackgroundWork, ConsumerServices
from weir.gateway.addresses import urls_of
from weir.gateway.admin.history import HistoryControl, LoadRecorder, Loads
from weir.gateway.admin.live_settings import LiveSettings
from weir.gateway.admin.load_report import LoadReports
from weir.gateway.admin.peers import GatewayPeers
from weir.gateway.admin.repository import RepositoryControl, RepositoryIndex
from weir.gateway.admin.shared_memory import RegionPermission, SharedMemoryRegions
from weir.gateway.context import GatewayContext
from weir.gateway.features.access_log import RequestLog
from weir.gateway.features.observation import Observation
from weir.gateway.features.platforms import PlatformPorts, Platforms
from weir.gateway.features.response_cache import CachedResponses
from weir.gateway.features.traffic import Traffic
from weir.gateway.grpc.handlers import Methods
from weir.gateway.grpc.server import LEAVE_TIMEOUT_S, GrpcServer
from weir.gateway.http.app import make_app
from weir.gateway.http.protocol import LINGER_S, HttpProtocol
from weir.gateway.metrics.endpoint import MetricsEndpoint, PayloadTransfers
from weir.gateway.metrics.text import Labels, MetricFamily
from weir.gateway.nats.api_bridge import ApiBridge
from weir.gateway.nats.frontend import NatsFrontend
from weir.gateway.parsed_settings import ParsedSettings, arriving_slots_ledger, parse_settings, request_ledger
from weir.gateway.settings import GatewaySettings
from weir.http_server.listeners import HttpListeners
from weir.http_server.stall_detection import MonitoredConnection, end_stalled_connections
from weir.http_server.tls import follow_files
from weir.jobs.api.service import JobService
from weir.jobs.records.folders import BatchRoots
from weir.jobs.records.store import JobStore
from weir.runtime.limits.process_limits import find_limits, log_limits, show_bytes
from weir.runtime.readiness import announce_failure, announce_ready, watch_parent
from weir.runtime.role_life import run_role
from weir.runtime.ticks import next_tick
from weir.schemas.core.errors import WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import RoleLog, configure_logging

logger = logging.getLogger("weir.gateway")

_EXPIRY_INTERVAL_S = 1.0

FEATURES = frozenset(["traffic", "response cache", "observation", "platforms"])
"""What a gateway has that it could do without (`weir.gateway.features`)."""


def run(settings: GatewaySettings, features: Collection[str] = FEATURES) -> int:
    """Runs a gateway with some of `FEATURES` until it is stopped; returns the exit status."""
    log = configure_logging("gateway", LogSettings.of(settings))
    watch_parent()
    return run_role(functools.partial(_serve, settings, features, log))


async def _serve(
    settings: GatewaySettings,
    features: Collection[str],
    log: RoleLog,
    stop: asyncio.Event,
    background: asyncio.TaskGroup,
) -> int:
    deadline = _ExitDeadline(settings.exit_timeout_secs)
    async with contextlib.AsyncExitStack() as stops:
        try:
            with _start_errors():
                parsed = parse_settings(settings)
                check_exposure(frontend_addresses(settings), settings, logger)
                listeners = _bind(settings, features)
            stops.push_async_callback(listeners.wait_closed)
            connected = await _connect(settings, background, stops)
            gateway = _Gateway(settings, parsed, features, connected, listeners, deadline, log)
            await gateway.start_services(background, stops)
            await gateway.start_frontends(background, stops)
        except _StartError as error:
            logger.error("%s", error)
            announce_failure(str(error))
            return 1
        gateway.announce()
        await stop.wait()
        deadline.begin()
    return 0


class _StartError(Exception):
    """The gateway can't start, for a reason outside of it."""


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Turns the errors of a step that depends on options, files, ports or the broker into `_StartError`."""
    try:
        yield
    except WeirError as error:
        raise _StartError(error.message) from error
    except (OSError, ValueError) as error:
        raise _StartError(str(error)) from error


class _ExitDeadline:
    """The time for open requests after the process was told to stop; none while it starts."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = 0.0

    def begin(self) -> None:
        """Starts the time: the process is to stop."""
        self._end_s = time.monotonic() + self._timeout_s

    def left_s(self) -> float:
        """How much of the time is left, in seconds."""
        return max(0.0, self._end_s - time.monotonic())


class _Connected(NamedTuple):
    """What a gateway needs before it is put together."""

    id: str
    bus: Bus
    peers: TcpListener | None


def _bind(settings: GatewaySettings, features: Collection[str]) -> HttpListeners:
    """Binds the HTTP ports of a gateway. Raises OSError."""
    listeners = HttpListeners()
    if settings.allow_http:
        listeners.bind("HTTP", settings.http_address, settings.http_port, settings.reuse_http_port)
    if settings.gateway_number:
        return listeners
    if settings.allow_metrics:
        listeners.bind("metrics", settings.metrics_address, settings.metrics_port)
    if settings.allow_sagemaker and "platforms" in features:
        listeners.bind("SageMaker", settings.sagemaker_address, settings.sagemaker_port)
    if settings.allow_vertex_ai and "platforms" in features:
        listeners.bind("Vertex AI", settings.vertex_ai_address, settings.vertex_ai_port)
    return listeners


async def _connect(
    settings: GatewaySettings, background: asyncio.TaskGroup, stops: contextlib.AsyncExitStack
) -> _Connected:
    """Connects to the broker, and listens for readers of payloads. Raises _StartError."""
    remove_dead_segments()
    limit_payloads(settings.payload_memory_byte_size)
    id = own_id("gateway", settings.gateway_id)
    with _start_errors():
        bus = await Bus.connect(settings.nats_url, id, background, access=settings.nats_access, role="gateway")
        stops.push_async_callback(bus.close)
        bus.live_layout.wanted = settings.live_streams
        peers = await listen_for_links(bus, settings.payload_listen)
        process_reach().set(bus, peers is not None)
    return _Connected(id, bus, peers)


class _Gateway:
    """The parts of one gateway. Each is started with its stop pushed beside it: they stop in reverse order."""

    def __init__(  # noqa: PLR0913 - made once, by `_serve`
        self,
        settings: GatewaySettings,
        parsed: ParsedSettings,
        features: Collection[str],
        connected: _Connected,
        listeners: HttpListeners,
        deadline: _ExitDeadline,
        log: RoleLog,
    ) -> None:
        id, bus, peers = connected
        self._settings, self._id, self._bus = settings, id, bus
        self._listeners, self._deadline, self._tls = listeners, deadline, parsed.tls
        self._ports: dict[str, int] = {}
        # Several processes can't write one file.
        self._tracing = Tracing(parsed.trace, f".gateway-{settings.gateway_number}" if settings.gateway_number else "")
        self._registry = RegistryView(bus)
        self._catalog = Catalog(self._registry, settings.strict_readiness, tells_reasons=parsed.tells_reasons)
        self._payloads = PayloadStore(PayloadArena(id), self._registry.model_shares_memory)
        self._payload_server, self._fetcher = PayloadServer(bus, id, peers), PayloadFetcher(bus, id)
        self._peers = GatewayPeers(bus, id)
        self._regions = SharedMemoryRegions(
            bus,
            id,
            self._registry,
            RegionPermission(settings.allow_client_shm, settings.client_shm_prefix),
            self._peers.synchronise,
        )
        cached: CachedResponses | None = None
        if parsed.cache is not None and "response cache" in features:
            summaries, reports = parsed.metrics.summary_latencies, not settings.gateway_number
            cached = CachedResponses(bus, id, self._catalog, self._registry, parsed.cache, summaries, reports)
        self._cache = None if cached is None else cached.cache
        self._inference = RequestDispatcher(
            bus,
            id,
            self._catalog,
            self._payloads,
            DispatchOptions(self._regions, self._tracing, self._cache, self._fetcher),
        )
        self._statistics = Statistics(bus, id, self._registry, self._catalog)
        desired = DesiredModels(bus)
        control = ModelControl(self._registry, desired, ModelFiles(bus))
        self._known = self._follow_known(control, desired)
        synchronise, history, loads = self._peers.synchronise, ModelHistory(bus), Loads(self._catalog, desired)
        index, recorder = RepositoryIndex(bus, id, self._registry), LoadRecorder(history, loads)
        self._repository = RepositoryControl(index, control, desired, synchronise, recorder)
        self._durable = DurableStore(bus, id, settings, self._catalog.knows)
        self._traffic: Traffic | None = None
        if "traffic" in features:
            self._traffic = Traffic(bus, id, self._catalog, self._inference, self._durable, history, self._peers)
        self._history = HistoryControl(
            history, control, None if self._traffic is None else self._traffic.control, loads, synchronise
        )
        self._live_settings = LiveSettings(SharedSettings(bus), self._tracing, log, self._peers.synchronise)
        self._readiness = Readiness(bus, id, self._catalog)
        requests = RequestLog(settings.access_log) if settings.access_log else None
        observation = Observation(bus, id, self._tracing) if "observation" in features else None
        self._features = [feature for feature in (cached, self._traffic, observation, requests) if feature is not None]
        self._async_requests = AsyncRequests(self._durable, settings)
        self._job_store = JobStore(bus, self._durable.publisher)
        self._access = AccessService(bus, Gate(time.time, self._catalog.latest_version), settings)
        self._context = GatewayContext(
            ledger=request_ledger(settings),
            arriving_slots=arriving_slots_ledger(process_budget().total_bytes),
            catalog=self._catalog,
            readiness=self._readiness,
            inference=self._inference,
            payloads=self._payloads,
            limits=RequestLimits(input_size=settings.http_max_input_size),
            server_id=settings.server_id,
            statistics=self._statistics,
            regions=self._regions,
            repository=self._repository,
            settings=self._live_settings,
            durable=self._durable,
            load_reports=LoadReports(self._statistics),
            history=self._history,
            access=parsed.access,
            gate=self._access.gate,
            access_log=None if requests is None else requests.log,
            cross_site=parsed.cross_site,
            describes_api=settings.allow_openapi,
            async_requests=self._async_requests,
            batch_jobs=JobService(self._job_store, BatchRoots(settings.batch_roots), self._catalog),
        )
        self._group = own_id("durable", settings.durable_id) if settings.durable_id else ""
        transfers = PayloadTransfers(self._fetcher, self._payload_server)
        self._metrics = MetricsEndpoint(
            id, self._context, parsed.metrics, transfers, self._feature_families, self._group
        )
        self._nats = NatsFrontend(bus, id, self._context)
        routes = [route for feature in self._features for route in feature.http_routes()]
        self._app = make_app(self._context, routes)
        self._api_bridge = ApiBridge(bus, self._app, self._context.ledger)
        at = PlatformPorts(settings, listeners, self._stop_http)
        make_platforms = functools.partial(Platforms, at, parsed, self._context, routes, self._metrics.app)
        self._platforms = make_platforms() if "platforms" in features else None
        with _start_errors():
            self._grpc = GrpcServer(self._context, parsed.grpc, self._feature_methods())

    def _feature_families(self, served: Mapping[str, Labels]) -> Iterator[MetricFamily]:
        for feature in self._features:
            yield from feature.metrics(served)

    def _feature_methods(self) -> Methods:
        methods: Methods = {}
        for feature in self._features:
            methods |= feature.grpc_methods()
        return methods

    def _follow_known(self, control: ModelControl, desired: DesiredModels) -> KnownModels:
        """Tells the catalog which models are known though no worker serves them, and which are not to be served."""
        self._catalog.set_unwanted_check(lambda name: control.is_explicit and desired.is_unwanted(name))
        known = KnownModels(self._bus)
        known.follow(desired, lambda: control.is_explicit)
        self._catalog.accept_known(known)
        return known

    async def start_services(self, background: asyncio.TaskGroup, stops: contextlib.AsyncExitStack) -> None:
        """Starts what frontends need, and the metrics port. Raises _StartError."""
        log_limits(
            logger,
            find_limits(),
            requests=show_bytes(self._context.ledger.limit_bytes),
            payloads=show_bytes(process_budget().total_bytes),
        )
        stops.callback(self._payloads.close)
        await self._payload_server.start()
        stops.callback(self._payload_server.close)
        await self._fetcher.start(background)
        stops.callback(self._fetcher.close)
        stops.callback(self._context.offload.close)
        with _start_errors():
            await self._access.start(background)
            stops.callback(self._access.stop)
            if self._cache is not None:
                self._cache.is_per_owner = lambda: self._access.gate.isolates_cache
            await self._durable.start(background)
        stops.callback(self._durable.stop)
        with _start_errors():
            audit = AuditRecorder(
                self._bus, self._durable.publisher, self._context.gate, AuditOptions.of(self._settings)
            )
        audit.start(background)
        stops.push_async_callback(audit.stop)
        await self._live_settings.start()
        await self._history.start()
        for feature in self._features:
            with _start_errors():
                await feature.start()
            stops.push_async_callback(feature.stop)
        stops.push_async_callback(self._tracing.stop)
        await self._inference.start(background)  # stopped with the frontends
        await self._readiness.start()
        await self._registry.start(background)
        await self._known.start(is_maker=False)
        self._catalog.start_warmup()
        await self._regions.start(background)
        await self._statistics.start()
        await self._repository.start()
        await self._peers.start()
        rates = RateLimits(self._bus, self._id, self._context.gate, self._durable.leases, self._peers.count)
        stops.callback(await rates.start(background))
        await self._report_counters(stops)
        expiry = background.create_task(_expire(self._registry, self._peers, self._bus))
        stops.callback(expiry.cancel)
        stalls = background.create_task(end_stalled_connections(self._connections, self._context.ledger))
        stops.callback(stalls.cancel)
        self._listeners.encrypt(self._tls, self._context.connection_cap)
        if self._listeners.has("metrics"):
            self._ports["metrics_port"] = self._listeners.port("metrics")
            await self._listeners.serve("metrics", self._metrics.connection())
            stops.callback(self._listeners.stop, "metrics")

    async def _report_counters(self, stops: contextlib.AsyncExitStack) -> None:
        """Reports all counters of a gateway without a metrics port of its own to the other gateways."""
        if not self._settings.gateway_number:
            return
        # The same name in each life, so that the counters of former lives stay in the sums.
        name = own_id("gateway", f"{self._settings.durable_id}-{self._settings.gateway_number}")
        read_cache = list if self._cache is None else self._cache.counters.snapshot
        reporter = CounterReporter(self._bus, name, self._metrics.own_counters, read_cache, self._group)
        await reporter.start()
        stops.callback(reporter.stop)

    def _background_work(self) -> BackgroundWork:
        services = ConsumerServices(
            catalog=self._catalog,
            inference=self._inference,
            limits=self._context.limits,
            ledger=self._context.ledger,
            find_region=self._regions.find,
            has_workers=lambda: bool(self._registry.workers),
            offload=self._context.offload,
            gate=self._context.gate,
        )
        ramps = None if self._traffic is None else self._traffic.ramps
        return BackgroundWork(self._durable, self._job_store, services, self._id, self._settings, ramps)

    async def start_frontends(self, background: asyncio.TaskGroup, stops: contextlib.AsyncExitStack) -> None:
        """Starts the frontends, and the work in the background. Raises _StartError.

        They stop in this order: HTTP, waits for asynchronous requests, NATS; then gRPC clients are asked to leave; then
        gRPC, the requests in flight and the background work together; then the NATS calls that wait for acknowledgements.
        """
        deadline = self._deadline
        drains: list[Callable[[float], Awaitable[None]]] = [self._grpc.stop, self._inference.stop]

        async def drain() -> None:
            await self._grpc.leave(min(LEAVE_TIMEOUT_S, deadline.left_s()))
            await asyncio.gather(*(stop(deadline.left_s()) for stop in drains))

        async def close_nats() -> None:
            await self._nats.close(deadline.left_s())

        stops.push_async_callback(close_nats)
        stops.push_async_callback(drain)
        self._job_store.start(background)
        stops.callback(self._job_store.stop)
        await self._nats.start()
        stops.push_async_callback(self._nats.stop)

        async def stop_api_bridge() -> None:
            await self._api_bridge.stop(deadline.left_s())

        await self._api_bridge.start()
        stops.push_async_callback(stop_api_bridge)
        stops.callback(self._async_requests.stop)
        settings = self._settings
        if settings.allow_grpc:
            with _start_errors():
                self._ports["grpc_port"] = await self._grpc.start(settings.grpc_address, settings.grpc_port)
        if self._listeners.has("HTTP"):
            self._ports["http_port"] = self._listeners.port("HTTP")
            make_connection = functools.partial(HttpProtocol, self._context, {}, self._app)
            await self._listeners.serve("HTTP", make_connection)
            stops.push_async_callback(self._stop_http, "HTTP")
        if self._platforms is not None:
            await self._platforms.start()
            stops.push_async_callback(self._platforms.stop)
            self._ports |= self._platforms.ports
        if settings.durable_consumer:
            work = self._background_work()
            await work.start(background)
            drains.append(work.stop)
            self._async_requests.acceptance.prepare = work.consumer.ensure
        else:
            self._async_requests.acceptance.prepare = QueueProvisioner(self._bus).ensure
        urls = urls_of(settings, self._ports)
        followed = [tls for tls in (self._tls, self._grpc.tls) if tls is not None]
        if followed:
            stops.callback(background.create_task(follow_files(followed)).cancel)
        presence = Presence(self._bus, "gateway", self._id, lambda: {"urls": urls, **self._durable.description})
        announcements = await presence.start(background)
        stops.callback(presence.publish, leaving=True)
        stops.callback(announcements.cancel)

    async def _stop_http(self, name: str) -> None:
        """Refuses new connections. Open ones are served meanwhile, and end with their next response: a client that sends
        a request just now gets its response, not a reset.
        """
        self._listeners.stop(name)
        await self._listeners.wait_disconnected(name, min(LINGER_S, self._deadline.left_s()))

    @property
    def _durability(self) -> Durability:
        return self._durable.durability.result

    def _connections(self) -> list[MonitoredConnection]:
        return [*self._listeners.all_connections(), *self._grpc.connections]

    def announce(self) -> None:
        """Reports on stdout and in the log that the gateway is ready."""
        names = {
            "http": "HTTPService",
            "grpc": "GRPCInferenceService",
            "metrics": "Metrics Service",
            "sagemaker": "Sagemaker HTTPService",
            "vertex_ai": "Vertex AI HTTPService",
        }
        for name, service in names.items():
            if f"{name}_port" in self._ports:
                address, port = getattr(self._settings, f"{name}_address"), self._ports[f"{name}_port"]
                logger.info("Started %s at %s:%d", service, address, port)
        announce_ready(
            **self._ports,
            models=self._catalog.index(),
            durability=self._durability._asdict(),
            client_memory=self._regions.permission.describe(),
        )


async def _expire(registry: RegistryView, peers: GatewayPeers, bus: Bus) -> None:
    while True:
        await next_tick(_EXPIRY_INTERVAL_S)
        if bus.is_connected:
            registry.expire()
            peers.expire()
