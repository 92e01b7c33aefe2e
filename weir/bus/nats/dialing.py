"""Opens connections to nats-server (INFO, TLS, CONNECT), in the event loop and in threads.

`TlsSocket` is an encrypted connection that threads write to while the event loop reads it. Python's `SSLSocket` must not be
read and written at the same time, and does not prevent it. Here encryption and sending are separate steps under the
owner's lock.
Source: the NATS client protocol, `ssl.MemoryBIO`, `ssl.SSLContext.wrap_bio`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Callable

from weir.bus.nats.access import BrokerAccess, BrokerRefused, BrokerServer, is_refusal, refused_by_tls, tls_name
from weir.bus.nats.protocol import NatsProtocol, connect_options

_MAX_INFO_BYTES = 1 << 20


async def dial(
    server: BrokerServer,
    first: BrokerServer,
    access: BrokerAccess,
    name: str,
    make_protocol: Callable[[], NatsProtocol],
) -> NatsProtocol:
    """A connection that the server has accepted. Raises OSError; BrokerRefused where a retry does not help.

    `first` is the server configured first, whose name must be in the certificates of servers that are known by address.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(make_protocol, server.host, server.port)
    try:
        await protocol.greeted
        if access.wants_tls(server, protocol.info):
            try:
                secured = await loop.start_tls(
                    transport, protocol, access.tls_context(), server_hostname=tls_name(server, first)
                )
            except ssl.SSLError as error:
                raise refused_by_tls(server.place, error) from error
            assert secured is not None  # noqa: S101 - a transport that is closing raises instead
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
    """The same for a thread that may block: a socket that the server has accepted. Raises OSError.

    `timeout_s` bounds each step, and later each write to a server that reads nothing.
    """
    connection = socket.create_connection((server.host, server.port), timeout_s)
    secured: socket.socket | TlsSocket = connection
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            info = json.loads(_read_line(connection).partition(b" ")[2] or b"{}")
        except (ValueError, RecursionError) as error:
            raise OSError("the peer is not a nats-server") from error
        if not isinstance(info, dict):
            raise OSError("the peer is not a nats-server")
        if access.wants_tls(server, info):
            secured = TlsSocket(connection, access.tls_context(), tls_name(server, first))
        options = connect_options(name, access.identity(server, info))
        secured.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
        answer = _read_line(secured)
        if not answer.startswith(b"PONG"):
            text = answer.decode(errors="replace").strip()
            kind = BrokerRefused if is_refusal(text) else OSError
            raise kind(f"nats-server refused the connection: {text}")
        # From now on the kernel bounds writes: with a timeout of Python's, a poll would precede each. A partial write waits
        # once more.
        seconds, us = divmod(int(timeout_s / 2 * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, us))
        connection.settimeout(None)
    except ssl.SSLError as error:
        connection.close()
        raise refused_by_tls(server.place, error) from error
    except OSError:
        connection.close()
        raise
    return secured


def _read_line(connection: socket.socket | TlsSocket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        more = connection.recv(1)
        if not more or len(line) > _MAX_INFO_BYTES:
            raise OSError("the connection to nats-server was lost")
        line += more
    return line


_READ_BYTES = 16384


class TlsSocket:
    """The methods of a socket that a `ThreadPublisher` needs. Its owner serialises access.

    Raises ssl.SSLError or OSError where the handshake fails.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, hostname: str) -> None:
        self._socket = connection
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=hostname)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill(0)
        self._flush()

    def sendall(self, data: bytes) -> None:
        """As of a socket."""
        self._tls.write(data)
        self._flush()

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As of a socket: with MSG_DONTWAIT raises BlockingIOError where no data can be decrypted yet."""
        has_read = False
        while True:
            try:
                data = self._tls.read(size)
                self._flush()
                return data
            except ssl.SSLWantReadError as error:
                # A TLS record may have arrived in part; and a socket with a timeout waits in spite of the flag.
                if has_read and flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError from error
                self._fill(flags)
                has_read = True
            except ssl.SSLZeroReturnError:
                return b""

    def fileno(self) -> int:
        """As of a socket."""
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        """As of a socket."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """As of a socket."""
        self._socket.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())

    def _fill(self, flags: int) -> None:
        data = self._socket.recv(_READ_BYTES, flags)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
