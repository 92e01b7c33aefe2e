"""`weir console`: collects the state and the load of a cluster, and serves them to a browser."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
from collections.abc import Iterator

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py

import uvicorn
from nats.errors import Error as NatsError

from weir.bus.kv.presence import Presence, own_release
from weir.bus.naming.identity import own_id
from weir.bus.nats.access import without_secrets
from weir.bus.nats.connection import Bus
from weir.bus.nats.replies import ReplyInbox
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.dead_letters import DeadLetters
from weir.calls.gateway_api import GatewayApi
from weir.cluster.observation.observer import Observation
from weir.console import DEFAULT_PORT
from weir.console.api.app import make_app
from weir.console.api.context import ConsoleContext
from weir.console.collection.view import ClusterView
from weir.console.settings import ConsoleSettings
from weir.runtime.limits.process_limits import find_limits, log_limits
from weir.runtime.readiness import announce_failure, announce_ready, watch_parent
from weir.runtime.role_life import run_role
from weir.schemas.core.errors import WeirError
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import configure_logging

logger = logging.getLogger("weir.console")

_BACKLOG = 128
_STOP_S = 1
_IDLE_CONNECTION_S = 75
_MAX_CONNECTIONS = 200


def run(settings: ConsoleSettings) -> int:
    """Runs a console until it is stopped; returns the exit status."""
    configure_logging("console", LogSettings.of(settings))
    watch_parent()
    log_limits(logger, find_limits())
    return run_role(functools.partial(_serve, settings))


async def _serve(settings: ConsoleSettings, stop: asyncio.Event, background: asyncio.TaskGroup) -> int:
    async with contextlib.AsyncExitStack() as stops:
        try:
            listener = _bind(settings)
            stops.callback(listener.close)
            context, presence = await _connect(settings, background, stops)
        except (OSError, ValueError, TimeoutError, NatsError, WeirError) as error:
            message = error.message if isinstance(error, WeirError) else str(error) or type(error).__name__
            logger.error("the console can't start: %s", message)
            announce_failure(message)
            return 1
        app = make_app(context, settings.console_address, settings.allowed_hosts)
        server = _Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                lifespan="off",
                server_header=False,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=min(_STOP_S, math.ceil(settings.exit_timeout_secs)),
            )
        )
        serving = background.create_task(server.serve([listener]))
        announcing = await presence.start(background)
        stops.callback(presence.publish, leaving=True)
        stops.callback(announcing.cancel)
        port = listener.getsockname()[1]
        logger.info("the console is at http://%s:%d", settings.console_address, port)
        announce_ready(console_port=port)
        await stop.wait()
        server.should_exit = True
        await serving
    return 0


async def _connect(
    settings: ConsoleSettings, background: asyncio.TaskGroup, stops: contextlib.AsyncExitStack
) -> tuple[ConsoleContext, Presence]:
    id = own_id("console", settings.console_id)
    bus = await Bus.connect(settings.nats_url, id, background, access=settings.nats_access, role="console")
    stops.push_async_callback(bus.close)
    bus.live_layout.wanted = settings.live_streams
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
        allows_changes=settings.console_allow_changes,
    )
    return context, Presence(bus, "console", id)


class _Server(uvicorn.Server):
    """A server that leaves the signals of the process to `run_role`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the role's stop event ends the server."""
        yield


def _bind(settings: ConsoleSettings) -> socket.socket:
    """A listening socket. Raises OSError, with the address, if it can't be had."""
    address = settings.console_address
    port = DEFAULT_PORT if settings.console_port is None else settings.console_port
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"--console-port={port}: {error.strerror} ({address})") from error
    return listener
