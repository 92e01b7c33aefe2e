"""How a connection to nats-server comes to be: greeting, encryption, introduction; for the event loop and for threads."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import Any

from bus.broker_access import BrokerAccess, BrokerRefused, BrokerServer, is_refusal, refused_by_tls, tls_name
from bus.nats_protocol import Callback, NatsProtocol, connect_options
from bus.tls_socket import TlsSocket

_MAX_INFO_BYTES = 1 << 20


async def dial(
    server: BrokerServer,
    first: BrokerServer,
    access: BrokerAccess,
    name: str,
    callbacks: dict[bytes, Callback],
    on_lost: Callable[[], None],
    on_info: Callable[[Mapping[str, Any]], None],
) -> NatsProtocol:
    """A connection that the server has taken. Raises OSError; BrokerRefused where to try again does not help.

    `first` is the server that we were told of first, whose name stands in certificates of those that have none.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(
        lambda: NatsProtocol(callbacks, on_lost, on_info), server.host, server.port
    )
    try:
        await protocol.greeted
        if access.wants_tls(server, protocol.info):
            try:
                secured = await loop.start_tls(
                    transport, protocol, access.tls_context(), server_hostname=tls_name(server, first)
                )
            except ssl.SSLError as error:
                raise refused_by_tls(server.place, error) from error
            assert secured is not None  # noqa: S101 - None is for a transport that is closing, which raises
            protocol.secure(secured)
        protocol.introduce(connect_options(name, access.identity(server, protocol.info)))
        try:
            await protocol.established
        except ssl.SSLError as error:
            raise refused_by_tls(server.place, error) from error
    except BaseException:
        protocol.abort()
        raise
    return protocol


def dial_from_thread(
    server: BrokerServer, first: BrokerServer, access: BrokerAccess, name: str, timeout_s: float
) -> socket.socket | TlsSocket:
    """The same for a thread that may block: a socket that the server has taken. Raises OSError.

    `timeout_s` bounds each step, and later how long a write waits for a server that takes nothing.
    """
    connection = socket.create_connection((server.host, server.port), timeout_s)
    spoken: socket.socket | TlsSocket = connection
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            info = json.loads(_read_line(connection).partition(b" ")[2] or b"{}")
        except (ValueError, RecursionError) as error:
            raise OSError("what answers there is no nats-server") from error
        if not isinstance(info, dict):
            raise OSError("what answers there is no nats-server")
        if access.wants_tls(server, info):
            spoken = TlsSocket(connection, access.tls_context(), tls_name(server, first))
        options = connect_options(name, access.identity(server, info))
        spoken.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
        answer = _read_line(spoken)
        if not answer.startswith(b"PONG"):
            text = answer.decode(errors="replace").strip()
            kind = BrokerRefused if is_refusal(text) else OSError
            raise kind(f"nats-server refused the connection: {text}")
        # From now on left to the kernel: with a timeout of Python's own, each write would be preceded by a poll. What is
        # taken in part is waited for once more.
        seconds, us = divmod(int(timeout_s / 2 * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, us))
        connection.settimeout(None)
    except ssl.SSLError as error:
        connection.close()
        raise refused_by_tls(server.place, error) from error
    except OSError:
        connection.close()
        raise
    return spoken


def _read_line(connection: socket.socket | TlsSocket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        more = connection.recv(1)
        if not more or len(line) > _MAX_INFO_BYTES:
            raise OSError("the connection to nats-server was lost")
        line += more
    return line
