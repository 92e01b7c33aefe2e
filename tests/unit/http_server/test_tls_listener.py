"""Connections on which TLS is not agreed on yet count, end, and pass on what came early."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from weir.http_server.connection_cap import DISPLACED, SILENT, CappedConnection, ConnectionCap
from weir.http_server.tls_listener import TlsListener

LIMIT = 4
SHARE = 3


class Echo(asyncio.Protocol):
    """Sends back what it gets; does not count itself."""

    transport: Any

    def __init__(self, cap: ConnectionCap, handshake: CappedConnection) -> None:
        self.cap, self.handshake = cap, handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.cap.remove(self.handshake)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and its certificate."""
    folder = tmp_path_factory.mktemp("certificate")
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", *made, "-keyout", "key", "-out", "pem"], cwd=folder, check=True, capture_output=True)
    both = folder / "both"
    both.write_bytes((folder / "key").read_bytes() + (folder / "pem").read_bytes())
    return both


@asynccontextmanager
async def listening(certificate: Path, timeout_s: float = 60.0) -> AsyncIterator[tuple[int, ConnectionCap]]:
    """The port of an echo server, and the cap of its connections."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    cap, socket_ = ConnectionCap(LIMIT), socket.create_server(("127.0.0.1", 0))
    port = socket_.getsockname()[1]
    listener = TlsListener(socket_, lambda handshake: Echo(cap, handshake), lambda: context, cap, timeout_s)
    try:
        yield port, cap
    finally:
        listener.close()
        await until(lambda: cap.open == 0)


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def ended(reader: asyncio.StreamReader) -> None:
    """Returns once the server has ended the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(100):
            pass


async def test_silent_connections_count_and_give_room_to_one_that_speaks(certificate: Path) -> None:
    async with listening(certificate) as (port, cap):
        silent = []
        for number in range(SHARE):
            silent.append(await asyncio.open_connection("127.0.0.1", port))
            await until(lambda: cap.open == number + 1)  # noqa: B023 - awaited here
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        assert cap.ended[DISPLACED] == 1
        assert cap.open == SHARE - 1
        await ended(silent[0][0])  # the one that was silent longest
        for _, one in [(reader, writer), *silent]:
            one.close()


async def test_what_comes_with_the_end_of_the_handshake_arrives(certificate: Path) -> None:
    async with listening(certificate) as (port, cap):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting().wrap_bio(incoming, outgoing)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        client.write(b"early")
        writer.write(outgoing.read())  # the client's last message of the handshake, and its first of the application
        while True:
            try:
                assert client.read(5) == b"early"
                break
            except ssl.SSLWantReadError:
                incoming.write(await reader.read(65536))
        assert cap.open == 0
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05"])
async def test_a_client_that_leaves_or_speaks_no_tls_does_not_count_any_more(certificate: Path, sent: bytes) -> None:
    async with listening(certificate) as (port, cap):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: cap.open == 1)
        writer.write(sent)
        writer.write_eof()
        await ended(reader)
        await until(lambda: cap.open == 0)
        assert cap.ended[SILENT] == 0
        writer.close()


async def test_a_handshake_that_takes_too_long_ends(certificate: Path) -> None:
    async with listening(certificate, timeout_s=0.05) as (port, cap):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await ended(reader)
        await until(lambda: cap.open == 0)
        assert cap.ended[SILENT] == 1
        writer.close()


async def test_a_stop_leaves_alone_what_counts_itself_by_now(certificate: Path) -> None:
    """The task of a handshake that is just over, cancelled, would close the transport behind its protocol's back."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    cap, socket_ = ConnectionCap(LIMIT), socket.create_server(("127.0.0.1", 0))
    port = socket_.getsockname()[1]

    made: list[Echo] = []

    class StopsAtOnce(Echo):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            made.append(self)
            listener.close()

    listener = TlsListener(socket_, lambda handshake: StopsAtOnce(cap, handshake), lambda: context, cap, 60.0)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    await until(lambda: bool(made) and not listener._handshakes)
    assert not made[0].transport.is_closing()
    writer.close()
