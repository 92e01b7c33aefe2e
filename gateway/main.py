"""`weir gateway`: starts the front doors and runs them until they are told to stop."""

from __future__ import annotations

import asyncio
import functools
import logging
import time

from bus.connection import Bus
from bus.desired_models import DesiredModels
from bus.direct_listener import DirectListener
from bus.identity import own_id
from bus.known_models import KnownModels
from bus.model_files import ModelFiles
from bus.payload_budget import limit_payloads, process_budget
from bus.payload_fetcher import PayloadFetcher
from bus.payload_server import PayloadServer
from bus.payloads import PayloadArena, remove_dead_segments
from bus.presence import Presence
from bus.registry import RegistryView
from bus.settings import SharedSettings
from calls.catalog import Catalog
from calls.inference import Inference
from calls.model_operations import ModelOperations
from calls.payload_store import PayloadStore
from calls.readiness import Readiness
from calls.response_cache import ResponseCache
from calls.tracing import Tracing
from gateway.async_requests.async_requests import AsyncRequests
from gateway.doors import Doors
from gateway.durable.intake import DurableIntake
from gateway.durable.store import DurableStore
from gateway.grpc.server import GrpcServer
from gateway.http.app import make_app
from gateway.http.protocol import LINGER_S, HttpProtocol
from gateway.jobs.job_service import JobService
from gateway.listeners import Listeners
from gateway.live_settings import LiveSettings
from gateway.memory_limits import arriving_slots_ledger, request_ledger
from gateway.metrics.endpoint import MetricsEndpoint
from gateway.metrics.protocol import MetricsProtocol
from gateway.nats_door.door import NatsDoor
from gateway.own_counters import OwnCounters
from gateway.parsed_settings import parse_settings
from gateway.progress import end_stalled_connections
from gateway.repository_control import RepositoryControl
from gateway.repository_index import RepositoryIndex
from gateway.settings import GatewaySettings
from gateway.shared_memory import SharedMemoryRegions
from gateway.statistics import Statistics
from schemas.errors import WeirError
from schemas.request_limits import RequestLimits
from telemetry.log_settings import LogSettings
from telemetry.logs import RoleLog, configure_logging
from telemetry.readiness import announce_failure, announce_ready, watch_parent
from telemetry.role_life import run_role

logger = logging.getLogger("weir.gateway")

_EXPIRY_INTERVAL_S = 1.0


def run(settings: GatewaySettings) -> int:
    """Runs a gateway; returns the exit status when it has stopped."""
    log = configure_logging("gateway", LogSettings.of(settings))
    watch_parent()
    return run_role(functools.partial(_open_doors, settings, log))


async def _open_doors(
    settings: GatewaySettings, log: RoleLog, stop: asyncio.Event, background: asyncio.TaskGroup
) -> int:
    remove_dead_segments()
    limit_payloads(settings.payload_memory_byte_size)
    gateway_id = own_id("gateway", settings.gateway_id)
    listeners = Listeners()
    try:
        access, cross_site, trace_config, metrics_config, cache_config, grpc_options = parse_settings(settings)
        tracing = Tracing(trace_config)
        if settings.allow_http:
            listeners.take("HTTP", settings.http_address, settings.http_port, settings.reuse_http_port)
        if settings.allow_metrics:
            listeners.take("metrics", settings.metrics_address, settings.metrics_port)
        bus = await Bus.connect(settings.nats_url, gateway_id, background, access=settings.nats_access, role="gateway")
        bus.live_layout.wanted = settings.live_streams
    except (OSError, ValueError, WeirError) as error:
        logger.error("%s", error)
        announce_failure(str(error))
        return 1
    try:
        listener = await DirectListener.opened(bus, gateway_id, settings.payload_listen)
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        announce_failure(str(error))
        await bus.close()
        return 1
    registry = RegistryView(bus)
    catalog = Catalog(registry, settings.strict_readiness)
    payloads = PayloadStore(PayloadArena(gateway_id), registry.model_shares_memory)
    regions = SharedMemoryRegions(bus, gateway_id, registry, settings.allow_client_shm)
    cache, own_counters = None, None
    if cache_config is not None:
        cache = ResponseCache(bus, gateway_id, catalog, registry, cache_config, metrics_config.summary_latencies)
        own_counters = OwnCounters(bus, gateway_id, cache.counters)
    fetcher, payload_server = PayloadFetcher(bus, gateway_id), PayloadServer(bus, gateway_id, listener)
    inference = Inference(bus, gateway_id, catalog, payloads, regions, tracing, cache=cache, fetcher=fetcher)
    statistics = Statistics(bus, gateway_id, registry, catalog)
    desired = DesiredModels(bus)
    operations = ModelOperations(registry, desired, ModelFiles(bus))
    catalog.ask_whether_unwanted(lambda name: operations.is_explicit and desired.is_unwanted(name))
    known = KnownModels(bus)
    known.follow(desired, lambda: operations.is_explicit)
    catalog.keep(known)
    repository = RepositoryControl(RepositoryIndex(bus, gateway_id, registry), operations, desired)
    live_settings = LiveSettings(SharedSettings(bus), tracing, log)
    readiness = Readiness(bus, gateway_id, catalog)
    durable = DurableStore(bus, gateway_id, settings, catalog.knows)
    later = AsyncRequests(durable, settings)
    jobs = JobService(bus, gateway_id, inference, catalog, durable, settings)
    doors = Doors(
        ledger=request_ledger(settings),
        arriving_slots=arriving_slots_ledger(process_budget().total_bytes),
        catalog=catalog,
        readiness=readiness,
        inference=inference,
        payloads=payloads,
        limits=RequestLimits(input_size=settings.http_max_input_size),
        server_id=settings.server_id,
        statistics=statistics,
        regions=regions,
        repository=repository,
        settings=live_settings,
        durable=durable,
        access=access,
        cross_site=cross_site,
        later=later,
        batch_jobs=jobs,
    )
    try:
        if cache is not None:
            await cache.start()
        await durable.start(background)
    except WeirError as error:
        logger.error("%s", error.message)
        announce_failure(error.message)
        await bus.close()
        return 1
    await fetcher.start(background)
    await payload_server.start()
    await inference.start(background)
    await live_settings.start()
    await readiness.start()
    await later.start(background)
    await registry.start(background)
    await known.start(background)
    catalog.get_acquainted()
    await regions.start(background)
    await statistics.start()
    if own_counters is not None:
        await own_counters.start()
    await repository.start()
    nats_door = NatsDoor(bus, gateway_id, doors)
    await nats_door.start()
    ports: dict[str, int] = {}
    try:
        grpc_server = GrpcServer(doors, grpc_options)
        if settings.allow_grpc:
            ports["grpc_port"] = await grpc_server.start(settings.grpc_address, settings.grpc_port)
    except (OSError, ValueError) as error:
        announce_failure(str(error))
        later.stop()
        durable.stop()
        await inference.stop(0)
        await bus.close()
        return 1
    jobs.start(background)
    if listeners.has("HTTP"):
        ports["http_port"] = listeners.port("HTTP")
        listeners.serve("HTTP", make_app(doors), functools.partial(HttpProtocol, doors, {}), background)
    if listeners.has("metrics"):
        ports["metrics_port"] = listeners.port("metrics")
        endpoint = MetricsEndpoint(
            gateway_id,
            statistics,
            catalog,
            inference,
            doors.ledger,
            payloads,
            durable,
            metrics_config,
            fetcher,
            payload_server,
        )
        listeners.serve("metrics", endpoint.app(), MetricsProtocol, background)
    intake = DurableIntake(durable, doors, gateway_id, settings, lambda: bool(registry.workers))
    await intake.start(background)
    await inference.on_lost_attempts(intake.lost)
    later.acceptance.prepare = intake.ensure
    expiry = background.create_task(_expire(registry, bus))
    stalls = background.create_task(
        end_stalled_connections(lambda: [*listeners.connections("HTTP"), *grpc_server.connections], doors.ledger)
    )
    await listeners.started()
    urls = _urls(settings, ports)
    presence = Presence(bus, "gateway", gateway_id, lambda: {"urls": urls, "durability": durable.durability.told.word})
    presence_task = await presence.start(background)
    for name, service in (("http", "HTTPService"), ("grpc", "GRPCInferenceService"), ("metrics", "Metrics Service")):
        if f"{name}_port" in ports:
            logger.info("Started %s at %s:%d", service, getattr(settings, f"{name}_address"), ports[f"{name}_port"])
    announce_ready(**ports, models=catalog.index(), durability=durable.durability.told._asdict())

    await stop.wait()
    presence_task.cancel()
    presence.tell(leaving=True)
    # New connections are refused. Those that are open are served meanwhile, and end with their next response: a client
    # that sends a request just now gets its response, not a reset.
    deadline_s = time.monotonic() + settings.exit_timeout_secs
    listeners.stop("HTTP")
    await listeners.wait_disconnected("HTTP", min(LINGER_S, settings.exit_timeout_secs))
    later.stop()
    await nats_door.stop()
    await jobs.stop()
    await asyncio.gather(
        grpc_server.stop(max(0.0, deadline_s - time.monotonic())),
        inference.stop(max(0.0, deadline_s - time.monotonic())),
        intake.stop(max(0.0, deadline_s - time.monotonic())),
    )
    await nats_door.close(max(0.0, deadline_s - time.monotonic()))
    await tracing.stop()
    durable.stop()
    doors.offload.close()
    listeners.stop("metrics")
    expiry.cancel()
    stalls.cancel()
    if own_counters is not None:
        own_counters.stop()
    await listeners.wait_closed()
    fetcher.close()
    payload_server.close()
    payloads.close()
    await bus.close()
    return 0


def _urls(settings: GatewaySettings, ports: dict[str, int]) -> list[str]:
    """Where this gateway is asked, for people: an address that stands for all of a host's is told as it is."""
    forms = {"http": "http://{}:{}", "grpc": "grpc://{}:{}", "metrics": "http://{}:{}/metrics"}
    return [
        form.format(getattr(settings, f"{name}_address"), ports[f"{name}_port"])
        for name, form in forms.items()
        if f"{name}_port" in ports
    ]


async def _expire(registry: RegistryView, bus: Bus) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_INTERVAL_S)
        if bus.is_connected:
            registry.expire()
