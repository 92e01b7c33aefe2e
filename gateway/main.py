"""`weir gateway`: starts the front doors and runs them until they are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop
from starlette.applications import Starlette

from bus.connection import Bus
from bus.identity import new_id
from bus.payloads import PayloadArena, remove_dead_segments
from bus.registry import RegistryView
from gateway.catalog import Catalog
from gateway.doors import Doors
from gateway.grpc.options import GrpcOptions
from gateway.grpc.server import GrpcServer
from gateway.http.app import make_app
from gateway.http.protocol import HttpProtocol
from gateway.inference import Inference
from gateway.metrics.endpoint import MetricsEndpoint
from gateway.payload_store import PayloadStore
from gateway.settings import GatewaySettings
from gateway.statistics import Statistics
from schemas.request_limits import RequestLimits
from telemetry.logs import configure_logging
from telemetry.metrics_config import parse_metrics_config
from telemetry.readiness import announce_failure, announce_ready, watch_parent

logger = logging.getLogger("weir.gateway")

_KEEP_ALIVE_S = 75
_EXPIRY_INTERVAL_S = 1.0


class _Listener(uvicorn.Server):
    """uvicorn without signal handlers of its own: the gateway stops all its doors in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: GatewaySettings) -> int:
    """Runs a gateway; returns the exit status when it has stopped."""
    configure_logging("gateway", settings.log_format, settings.log_verbose)
    watch_parent()
    return uvloop.run(_serve(settings))


async def _serve(settings: GatewaySettings) -> int:
    # A task of the group that fails takes the role down with it: better a restart than half a gateway.
    async with asyncio.TaskGroup() as background:
        return await _open_doors(settings, background)


async def _open_doors(settings: GatewaySettings, background: asyncio.TaskGroup) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    remove_dead_segments()
    gateway_id = settings.gateway_id or new_id("gateway")
    try:
        http_socket = _listen("HTTP", settings.http_address, settings.http_port)
        metrics_config = parse_metrics_config(settings.metrics_config)
        metrics_socket = None
        if settings.allow_metrics:
            metrics_socket = _listen("metrics", settings.metrics_address, settings.metrics_port)
        bus = await Bus.connect(settings.nats_url, gateway_id, background)
    except (OSError, ValueError) as error:
        announce_failure(str(error))
        return 1
    registry = RegistryView(bus)
    catalog = Catalog(registry, settings.strict_readiness)
    payloads = PayloadStore(PayloadArena(gateway_id), registry.all_share_memory)
    inference = Inference(bus, gateway_id, catalog, payloads)
    statistics = Statistics(bus, gateway_id, registry, catalog)
    limits = RequestLimits(input_size=settings.http_max_input_size)
    doors = Doors(
        catalog=catalog,
        inference=inference,
        payloads=payloads,
        limits=limits,
        server_id=settings.server_id,
        statistics=statistics,
    )
    await inference.start(background)
    await registry.start(background)
    await statistics.start()
    grpc_server: GrpcServer | None = None
    grpc_facts: dict[str, int] = {}
    try:
        if settings.allow_grpc:
            grpc_server = GrpcServer(doors, GrpcOptions.of(settings))
            grpc_facts["grpc_port"] = await grpc_server.start(settings.grpc_address, settings.grpc_port)
    except (OSError, ValueError) as error:
        announce_failure(str(error))
        await inference.stop(0)
        await bus.close()
        return 1
    http = _server(make_app(doors), functools.partial(HttpProtocol, doors, {}))
    listeners, servers = [http], [background.create_task(http.serve([http_socket]))]
    if metrics_socket is not None:
        endpoint = MetricsEndpoint(statistics, catalog, inference, payloads, metrics_config)
        listeners.append(_server(endpoint.app(), "httptools"))
        servers.append(background.create_task(listeners[-1].serve([metrics_socket])))
    expiry = background.create_task(_expire(registry, bus))
    while not all(listener.started for listener in listeners):
        await asyncio.sleep(0.01)
    http_port = http_socket.getsockname()[1]
    metrics_port = 0 if metrics_socket is None else metrics_socket.getsockname()[1]
    logger.info("Started HTTPService at %s:%d", settings.http_address, http_port)
    if grpc_server is not None:
        logger.info("Started GRPCInferenceService at %s:%d", settings.grpc_address, grpc_facts["grpc_port"])
    if metrics_socket is not None:
        logger.info("Started Metrics Service at %s:%d", settings.metrics_address, metrics_port)
    announce_ready(http_port=http_port, **grpc_facts, metrics_port=metrics_port, models=catalog.index())

    await stop.wait()
    # Connections stay open until what was asked on them is answered; then the doors close.
    http.should_exit = True
    ends = [inference.stop(settings.exit_timeout_secs)]
    if grpc_server is not None:
        ends.append(grpc_server.stop(settings.exit_timeout_secs))
    await asyncio.gather(*ends)
    for listener in listeners:
        listener.should_exit = True
    expiry.cancel()
    await asyncio.wait(servers, timeout=5)
    payloads.close()
    await bus.close()
    return 0


def _server(app: Starlette, protocol: object) -> _Listener:
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=30,
        backlog=2048,
    )
    return _Listener(config)


def _listen(what: str, address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{what} can't listen on {address}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def _expire(registry: RegistryView, bus: Bus) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_INTERVAL_S)
        if bus.is_connected:
            registry.expire()
