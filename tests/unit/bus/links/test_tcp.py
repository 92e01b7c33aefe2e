"""A listener accepts links of other hosts whose ends know its secret, and disconnects others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tests.support.raw_links import RawEnd, dial, proven
from tests.support.waiting import eventually
from weir.bus.links import handshake, tcp
from weir.bus.links.framing import HEADER
from weir.bus.links.handshake import Handshake, HandshakeError
from weir.bus.links.link import Frames, LinkEnd
from weir.bus.links.tcp import TcpListener, open_link
from weir.bus.links.tcp_link import TcpLink
from weir.schemas.core.names import ListenAddress
from weir.schemas.wire.transfers import OwnerAddress


class Server:
    """A listener that keeps what it receives."""

    def __init__(self) -> None:
        self.listener = TcpListener(ListenAddress("127.0.0.1"))
        self.links: dict[TcpLink, list[tuple[bytes, bytes]]] = {}
        self.ends: list[LinkEnd] = []
        self.listener.on_frames = lambda link, frames: self.links.setdefault(link, []).extend(frames)
        self.listener.on_end = lambda _link, end: self.ends.append(end)

    @property
    def address(self) -> OwnerAddress:
        return self.listener.address("")


class Opener:
    """The end that has opened a link."""

    def __init__(self) -> None:
        self.received: list[tuple[bytes, bytes]] = []
        self.placed: list[bytearray] = []
        self.ends: list[LinkEnd] = []

    async def open(self, address: OwnerAddress) -> TcpLink:
        return await open_link("owner", address, None, self._on_frames, self._on_end, self._place, 1 << 20)

    def _on_frames(self, _link: TcpLink, frames: Frames) -> None:
        self.received += frames

    def _on_end(self, _link: TcpLink, end: LinkEnd) -> None:
        self.ends.append(end)

    def _place(self, subject: bytes, size: int) -> memoryview | None:
        if subject != b"placed":
            return None
        self.placed.append(bytearray(size))
        return memoryview(self.placed[-1])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.listener.start()
    yield made
    made.listener.close()


async def accepted(server: Server) -> TcpLink:
    await eventually(lambda: bool(server.links))
    return next(iter(server.links))


async def test_frames_are_exchanged_after_the_handshake(server: Server) -> None:
    opener = Opener()
    link = await opener.open(server.address)
    link.send([("request", b"1")])
    back = await accepted(server)
    assert server.links[back] == [(b"request", b"1")]
    back.send([("response", bytes(500_000))])
    await eventually(lambda: opener.received == [(b"response", bytes(500_000))])
    link.close()
    await eventually(lambda: server.ends == [LinkEnd.ORDERLY])
    assert not server.listener.refused


async def test_content_is_received_in_its_place_and_messages_do_not_wait_for_all_of_it(server: Server) -> None:
    opener = Opener()
    link = await opener.open(server.address)
    link.send([("request", b"")])
    back = await accepted(server)
    pieces = [bytearray(bytes((number,)) * 1_000_000) for number in range(16)]

    def send(number: int) -> tuple[str, bytes]:
        if number == 2:
            back.send([("small", b"message")])
        if number < len(pieces):
            view = memoryview(pieces[number])
            asyncio.get_running_loop().call_soon(lambda: back.send_content(b"placed", view, lambda: send(number + 1)))
        return "sent", b"%d" % number

    send(0)
    await eventually(lambda: (b"sent", b"16") in opener.received)
    assert opener.received.index((b"small", b"message")) < len(opener.received) - 1
    assert opener.placed == pieces


async def test_a_reader_that_stalls_is_disconnected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "TCP_STALL_LIMIT_S", 0.1)
    monkeypatch.setattr(tcp, "_CHECK_EVERY_S", 0.02)
    server.listener._disconnect_idle()
    end = await proven(server.address)
    end.send("request", b"")
    back = await accepted(server)
    end.writer.transport.pause_reading()  # type: ignore[attr-defined]
    content = memoryview(bytearray(24 << 20))
    sent: list[bool] = []

    def then() -> tuple[str, bytes]:
        sent.append(True)
        return "sent", b""

    back.send_content(b"content", content, then)
    await eventually(lambda: server.ends == [LinkEnd.BROKEN_OFF])
    assert not sent
    end.writer.close()


async def test_an_end_without_the_secret_is_disconnected(server: Server) -> None:
    end = await dial(server.listener.port)
    with pytest.raises(HandshakeError):
        await end.prove(bytes(32), is_opening=True)
    false = await dial(server.listener.port)
    false.send("", Handshake(bytes(32), is_opening=True).begin())
    await false.frame()
    false.send("", bytes(32))
    false.send("request", b"1")
    assert await false.is_closed()
    assert server.listener.refused == 1
    assert not server.links
    end.writer.close()


async def test_an_end_that_sends_requests_before_its_proof_is_disconnected(server: Server) -> None:
    end = await dial(server.listener.port)
    end.send("request", b"1")
    assert await end.is_closed()
    assert not server.links


async def test_an_end_that_takes_its_time_for_the_handshake_is_disconnected(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tcp, "_CHECK_EVERY_S", 0.02)
    server.listener._disconnect_idle()
    end = await dial(server.listener.port)
    end.writer.write(b"\x10")
    assert await end.is_closed()
    assert server.listener.refused == 1


async def test_links_that_are_not_proven_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_UNPROVEN", 2)
    kept = [await dial(server.listener.port) for _ in range(2)]
    assert await (await dial(server.listener.port)).is_closed()
    assert server.listener.refused == 1
    for end in kept:
        end.writer.close()


async def test_proven_links_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_TCP_LINKS", 1)
    kept = await proven(server.address)
    assert await (await dial(server.listener.port)).is_closed()
    kept.writer.close()


async def test_an_idle_link_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "IDLE_LIMIT_S", 0.05)
    monkeypatch.setattr(tcp, "_CHECK_EVERY_S", 0.02)
    server.listener._disconnect_idle()
    assert await (await proven(server.address)).is_closed()
    assert not server.listener.refused


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(tcp.MAX_REQUEST_FRAME_BYTES + 1, 1),
        HEADER.pack(2**32 - 1, 1),
        HEADER.pack(0, 0) + b"x",
        HEADER.pack(3, 9) + b"x",
    ],
)
@pytest.mark.parametrize("is_proven", [False, True])
async def test_malformed_frames_end_the_link(server: Server, data: bytes, is_proven: bool) -> None:
    end = await proven(server.address) if is_proven else await dial(server.listener.port)
    end.writer.write(data)
    assert await end.is_closed()


async def test_half_a_frame_counts_for_nothing(server: Server) -> None:
    end = await proven(server.address)
    end.send("request", b"whole")
    end.writer.write(HEADER.pack(100, 7) + b"request half")
    end.writer.close()
    await eventually(lambda: server.ends == [LinkEnd.LOST])
    assert list(server.links.values()) == [[(b"request", b"whole")]]


async def test_a_version_that_is_too_old_is_not_linked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    end = await dial(server.listener.port)
    with monkeypatch.context() as other:
        other.setattr(handshake, "VERSION", handshake.OLDEST_VERSION - 1)
        begin = Handshake(server.address.secret, is_opening=True).begin()
    end.send("", begin)
    assert await end.is_closed()


@pytest.mark.parametrize("response", [b"", b"\xff" * 5000, HEADER.pack(20, 0) + bytes(19)])
async def test_no_link_is_opened_to_what_is_no_listener(response: bytes) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0)
    opener = Opener()
    with pytest.raises(OSError, match="closed the link"):
        await opener.open(OwnerAddress("127.0.0.1", served.sockets[0].getsockname()[1], bytes(32)))
    assert not opener.ends, "it was never opened"
    served.close()


async def test_a_listener_that_does_not_know_the_secret_gets_no_request() -> None:
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = RawEnd(reader, writer)
        _, hello = await end.frame()
        end.send("", Handshake(bytes(32), is_opening=False).receive(hello))
        received.append(await reader.read())
        writer.close()

    served = await asyncio.start_server(serve, "127.0.0.1", 0)
    with pytest.raises(HandshakeError, match="does not prove"):
        await Opener().open(OwnerAddress("127.0.0.1", served.sockets[0].getsockname()[1], b"s" * 32))
    await eventually(lambda: received == [b""])
    served.close()


async def test_opening_a_link_to_a_silent_process_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TimeoutError):
            await Opener().open(OwnerAddress("127.0.0.1", silent.getsockname()[1], bytes(32)))


async def test_a_listener_on_all_addresses_announces_that_of_the_broker_connection() -> None:
    listener = TcpListener(ListenAddress("0.0.0.0"))
    await listener.start()
    assert listener.address("10.0.0.7").host == "10.0.0.7"
    assert not listener.address("").port, "while the broker is away nobody asks"
    listener.close()
    assert not listener.address("10.0.0.7").port
