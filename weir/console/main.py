"""`weir console`: collects the state and the load of a cluster, and serves them to a browser."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py

from nats.errors import Error as NatsError
from starlette.types import ASGIApp

from weir.access.gate import Gate
from weir.bus.kv.presence import Presence, own_release
from weir.bus.naming.identity import own_id
from weir.bus.nats.access import without_secrets
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import URL_FILE_VARIABLE
from weir.bus.nats.replies import ReplyInbox
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.dead_letters import DeadLetters
from weir.calls.gateway_api import GatewayApi
from weir.cluster.access.exposure import check_exposure
from weir.cluster.access.service import AccessService
from weir.cluster.audit import AuditOptions, AuditRecorder
from weir.cluster.observation.observer import Observation
from weir.console import DEFAULT_PORT
from weir.console.api.acting import MAX_BODY_BYTES
from weir.console.api.app import make_app
from weir.console.api.context import ConsoleContext
from weir.console.collection.view import ClusterView
from weir.console.settings import ConsoleSettings
from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_cap import ConnectionCap
from weir.http_server.listeners import HttpListeners
from weir.http_server.stall_detection import end_stalled_connections
from weir.http_server.tls import ServerTls, follow_files
from weir.runtime.limits.process_limits import find_limits, log_limits
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.readiness import announce_failure, announce_ready, watch_parent
from weir.runtime.role_life import run_role
from weir.schemas.core.errors import WeirError
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import configure_logging

logger = logging.getLogger("weir.console")

MAX_MEMORY_BYTES = 64 << 20
"""What clients have sent to the console, or have not read yet."""

_DOOR = "console"
_STOP_S = 1.0


def run(settings: ConsoleSettings) -> int:
    """Runs a console until it is stopped; returns the exit status."""
    configure_logging("console", LogSettings.of(settings))
    watch_parent()
    log_limits(logger, find_limits())
    return run_role(functools.partial(_serve, settings))


async def _serve(settings: ConsoleSettings, stop: asyncio.Event, background: asyncio.TaskGroup) -> int:
    async with contextlib.AsyncExitStack() as stops:
        try:
            check_exposure({"the console": settings.console_address}, settings, logger)
            files = settings.tls_files()
            tls = None if files is None else ServerTls(files)
            listeners = HttpListeners()
            port = DEFAULT_PORT if settings.console_port is None else settings.console_port
            listeners.bind(_DOOR, settings.console_address, port)
            context, presence = await _connect(settings, background, stops)
        except (OSError, ValueError, TimeoutError, NatsError, WeirError) as error:
            message = error.message if isinstance(error, WeirError) else str(error) or type(error).__name__
            logger.error("the console can't start: %s", message)
            announce_failure(message)
            return 1
        app = make_app(context, settings.console_address, settings.allowed_hosts)
        await _serve_page(app, listeners, tls, background, stops, min(_STOP_S, settings.exit_timeout_secs))
        announcing = await presence.start(background)
        stops.callback(presence.publish, leaving=True)
        stops.callback(announcing.cancel)
        port = listeners.port(_DOOR)
        logger.info("the console is at http%s://%s:%d", "s" if tls is not None else "", settings.console_address, port)
        announce_ready(console_port=port)
        await stop.wait()
    return 0


async def _serve_page(  # noqa: PLR0913 - of one call
    app: ASGIApp,
    listeners: HttpListeners,
    tls: ServerTls | None,
    background: asyncio.TaskGroup,
    stops: contextlib.AsyncExitStack,
    stop_timeout_s: float,
) -> None:
    """Serves `app` with a gateway's bounds for clients. At the stop requests have `stop_timeout_s` to end."""
    ledger = MemoryLedger(MAX_MEMORY_BYTES)
    cap = ConnectionCap.of_process()
    limits = ConnectionLimits(
        ledger=ledger,
        arriving_slots=MemoryLedger(),
        cap=cap,
        max_body_bytes=2 * MAX_BODY_BYTES,  # beyond MAX_BODY_BYTES the application explains where to send it
    )
    listeners.encrypt(tls, cap)
    if tls is not None:
        stops.callback(background.create_task(follow_files([tls])).cancel)
    await listeners.serve(_DOOR, functools.partial(HttpConnection, app, limits))
    stops.push_async_callback(listeners.wait_disconnected, _DOOR, stop_timeout_s)
    stops.callback(listeners.stop, _DOOR)
    stalls = background.create_task(end_stalled_connections(listeners.all_connections, ledger))
    stops.callback(stalls.cancel)


async def _connect(
    settings: ConsoleSettings, background: asyncio.TaskGroup, stops: contextlib.AsyncExitStack
) -> tuple[ConsoleContext, Presence]:
    id = own_id("console", settings.console_id)
    bus = await Bus.connect(settings.nats_url, id, background, access=settings.nats_access, role="console")
    stops.push_async_callback(bus.close)
    bus.live_layout.wanted = settings.live_streams
    access = AccessService(bus, Gate(time.time), settings)
    await access.start(background)
    stops.callback(access.stop)
    view = ClusterView(bus, id, settings.nats_url)
    await view.start(background)
    gateway = GatewayApi(bus, id)
    await gateway.start()
    # Gateways respond only on such subjects, as to any NATS client.
    replies = ReplyInbox(bus, f"answers.console.{id}")
    await replies.start()
    bus.on_loss(replies.fail_all)
    publisher = AckedPublisher(bus, id)
    await publisher.start(background)
    stops.callback(publisher.stop)
    audit = AuditRecorder(bus, publisher, access.gate, AuditOptions.of(settings))
    audit.start(background)
    stops.push_async_callback(audit.stop)
    observation = Observation(bus, id)
    await observation.start()
    stops.callback(observation.close)
    context = ConsoleContext(
        bus=bus,
        view=view,
        replies=replies,
        dead_letters=DeadLetters(bus, publisher),
        observation=observation,
        gateway=gateway,
        release=own_release(),
        broker_url=without_secrets(settings.nats_url),
        access_file=os.environ.get(URL_FILE_VARIABLE, ""),
        allows_changes=settings.console_allow_changes,
        gate=access.gate,
    )
    return context, Presence(bus, "console", id)
