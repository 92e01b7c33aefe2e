"""`Listeners`: the HTTP servers of a gateway, and the ports they have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

logger = logging.getLogger("weir.gateway")

_KEEP_ALIVE_S = 75
_POLL_S = 0.01
_LAST_WORDS_S = 5.0


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own, and without a clock: the gateway stops all its doors in order."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told_to_exit = asyncio.Event()

    def exit(self, at_once: bool) -> None:
        """Accepts no more connections, and ends when those that are there have ended; or `at_once`."""
        self.should_exit, self.force_exit = True, at_once
        self._told_to_exit.set()

    async def main_loop(self) -> None:
        """Returns when the server is to stop. (uvicorn's looks ten times a second.)"""
        await self._told_to_exit.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and returns when those that are open have ended; with `force_exit` ends them."""
        if self.force_exit:
            for connection in list(self.server_state.connections):
                connection.transport.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listeners:
    """Ports are taken at once, so that one that is not to be had ends the start; what they serve comes later."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._servers: dict[str, _Server] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def take(self, name: str, address: str, port: int, reuse: bool = False) -> None:
        """Takes a port (0: a free one) for `name`; `reuse` shares it with others that do so too. Raises OSError."""
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            listener.close()
            raise OSError(f"{name} can't listen on {address}:{port}: {error.strerror}") from error
        listener.setblocking(False)
        self._sockets[name] = listener

    def has(self, name: str) -> bool:
        """Whether a port was taken for `name`."""
        return name in self._sockets

    def port(self, name: str) -> int:
        """The port of `name`."""
        return int(self._sockets[name].getsockname()[1])

    def serve(self, name: str, app: Starlette, protocol: Any, background: asyncio.TaskGroup) -> None:
        """Serves `app` by uvicorn's `protocol` on the port of `name`, in a task of `background`."""
        server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
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
        )
        self._servers[name] = server
        self._tasks.append(background.create_task(server.serve([self._sockets[name]])))

    async def started(self) -> None:
        """Returns when all servers accept connections."""
        while not all(server.started for server in self._servers.values()):
            await asyncio.sleep(_POLL_S)

    def connections(self, name: str) -> list[Any]:
        """The protocols of the connections to the port of `name` that are open now."""
        server = self._servers.get(name)
        return [] if server is None else list(server.server_state.connections)

    def stop(self, name: str, at_once: bool = False) -> None:
        """Accepts no more connections for `name`, if it is served. Its open ones end with their next response, after a
        while without a request (`gateway.http.protocol.LINGER_S`), or `at_once`.
        """
        if name in self._servers:
            self._servers[name].exit(at_once)

    async def wait_disconnected(self, name: str, timeout_s: float) -> None:
        """Returns when `name`, which was stopped, has no open connection any more, or after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while name in self._servers and self._servers[name].server_state.connections and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)

    async def wait_closed(self) -> None:
        """Returns when all connections have ended, or could have."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
