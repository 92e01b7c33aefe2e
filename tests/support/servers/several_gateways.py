"""Processes of a server that runs several of a role, and connections to one of its gateways."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.support.clients.stock import RawConnection
from tests.support.servers.forked_commands import COMMAND
from tests.support.servers.weir_server import Server

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_MOST_CONNECTIONS = 200
_LISTENS = "0A"  # a state in /proc/net/tcp


def processes_of(server: Server, role: str) -> list[int]:
    """The processes of a role, the oldest first."""
    found: list[tuple[float, int]] = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(child.cmdline()).split()  # a forked role has one word there
            if child.status() != psutil.STATUS_ZOMBIE and command[len(COMMAND) : len(COMMAND) + 1] == [role]:
                found.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(found)]


def connect(server: Server, gateway: int) -> RawConnection:
    """An HTTP connection that the gateway with this process id has accepted: the kernel chooses, so it takes several."""
    with contextlib.ExitStack() as others:
        for _ in range(_MOST_CONNECTIONS):
            connection = RawConnection(server.port)
            answer = connection.ask(LIVE)
            assert answer is not None
            assert answer.status == 200
            if gateway_of(connection, [gateway]):
                return connection
            others.enter_context(connection)
    raise AssertionError(f"no connection to process {gateway} in {_MOST_CONNECTIONS}")


def gateway_of(connection: RawConnection, gateways: list[int]) -> int | None:
    """Which of these processes has accepted the connection."""
    place = connection.socket.getsockname()[:2]
    for pid in gateways:
        if any(tuple(one.raddr or ()) == place for one in psutil.Process(pid).net_connections("tcp")):
            return pid
    return None


def listeners(port: int) -> int:
    """How many sockets of this host accept connections on a port of loopback."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1] == f"0100007F:{port:04X}" and row[3] == _LISTENS for row in rows)
