"""The wire protocol of nats-server, fed byte by byte, and spoken with a real server."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weir.bus.message import Message
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.protocol import NatsProtocol, connect_options
from weir.bus.turn import Turn


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.written += b"".join(pieces)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


class Peer:
    """A protocol on a wire, and the messages it has dispatched to subscription 1."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.lost = 0
        self.wire = Wire()
        self.callbacks = {b"1": self.messages.append}
        self.turn = Turn()
        self.protocol = NatsProtocol(self.callbacks, self.turn, self._on_lost)
        self.protocol.connection_made(self.wire)

    def _on_lost(self) -> None:
        self.lost += 1

    def feed(self, data: bytes) -> None:
        self.protocol.data_received(data)


STREAM = (
    b'INFO {"max_payload":1048576}\r\n'
    b"PONG\r\n"
    b"MSG a.b 1 5\r\nhello\r\n"
    b"MSG a 1 reply.to 0\r\n\r\n"
    b"PING\r\n"
    b"MSG a 2 3\r\nnot\r\n"
    b"HMSG a 1 reply 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"HMSG a 1 22 25\r\nNATS/1.0\r\nKey: xyz\r\n\r\nabc\r\n"
    b"MSG a 1 6\r\n\r\nMSG \r\n"
)
MESSAGES = [
    Message("a.b", "", b"hello", ""),
    Message("a", "reply.to", b"", ""),
    Message("a", "reply", b"", "503", b"NATS/1.0 503\r\n\r\n"),
    Message("a", "", b"abc", "", b"NATS/1.0\r\nKey: xyz\r\n\r\n"),
    Message("a", "", b"\r\nMSG ", ""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 10_000])
async def test_messages_are_whole_however_they_arrive(size: int) -> None:
    peer = Peer()
    for start in range(0, len(STREAM), size):
        peer.feed(STREAM[start : start + size])
    assert peer.messages == MESSAGES
    assert peer.protocol.info["max_payload"] == 1 << 20
    assert peer.protocol.established.done()
    await asyncio.sleep(0)
    assert peer.protocol.greeted.done()
    assert peer.wire.written.endswith(b"PONG\r\n")


async def test_messages_are_whole_at_any_cut() -> None:
    draw = random.Random(4)
    for _ in range(200):
        peer = Peer()
        cuts = sorted(draw.sample(range(len(STREAM)), 5))
        for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
            peer.feed(STREAM[start:end])
        assert peer.messages == MESSAGES


async def test_what_is_published_in_one_turn_leaves_in_one_write() -> None:
    peer = Peer()
    peer.protocol.publish("a", b"1", "")
    peer.protocol.publish("b", b"22", "r")
    assert peer.wire.written == b""
    await asyncio.sleep(0)
    assert peer.wire.written == b"PUB a  1\r\n1\r\nPUB b r 2\r\n22\r\n"


async def test_headers_go_before_the_content() -> None:
    peer = Peer()
    peer.protocol.publish("a", b"xy", "r", b"NATS/1.0\r\nK: v\r\n\r\n")
    await asyncio.sleep(0)
    assert peer.wire.written == b"HPUB a r 18 20\r\nNATS/1.0\r\nK: v\r\n\r\nxy\r\n"


async def test_what_callbacks_publish_leaves_when_all_have_run() -> None:
    peer = Peer()
    order: list[str] = []

    def answer(message: Message) -> None:
        order.append(message.data.decode())
        peer.turn.defer(lambda: order.append("deferred"))
        peer.protocol.publish("answer", message.data, "")

    peer.callbacks[b"1"] = answer
    peer.feed(b"MSG a 1 1\r\nx\r\nMSG a 1 1\r\ny\r\n")
    assert order == ["x", "y", "deferred", "deferred"]
    assert peer.wire.written == b"PUB answer  1\r\nx\r\nPUB answer  1\r\ny\r\n"


async def test_what_is_published_at_the_end_of_a_turn_leaves_in_its_write() -> None:
    peer = Peer()
    turns: list[int] = []

    def publish() -> None:
        peer.protocol.publish("b", b"2", "")
        peer.turn.defer(lambda: peer.protocol.publish("c", b"3", ""))
        peer.turn.at_end(lambda: turns.append(2))

    peer.turn.at_end(publish)
    peer.protocol.publish("a", b"1", "")
    peer.feed(b"PING\r\n")
    assert peer.wire.written == b"PUB a  1\r\n1\r\nPONG\r\n", "what is dispatched is not the end of the turn"
    await asyncio.sleep(0)
    assert peer.wire.written.endswith(b"PONG\r\nPUB b  1\r\n2\r\nPUB c  1\r\n3\r\n")
    assert not turns
    await asyncio.sleep(0)
    assert turns == [2]


async def test_a_callback_that_fails_is_logged_and_the_next_is_called(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    seen: list[bytes] = []

    def fail_first(message: Message) -> None:
        seen.append(message.data)
        raise ValueError("as the first one")

    peer.callbacks[b"1"] = fail_first
    peer.feed(b"MSG a 1 1\r\nx\r\nMSG a 1 1\r\ny\r\n")
    assert seen == [b"x", b"y"]
    assert "as the first one" in caplog.text


async def test_pings_are_answered_in_order() -> None:
    peer = Peer()
    first, second = peer.protocol.ping(), peer.protocol.ping()
    peer.feed(b"PONG\r\n")
    assert (first.done(), second.done()) == (True, False)
    peer.protocol.connection_lost(None)
    with pytest.raises(ConnectionError):
        await second
    assert peer.lost == 1


async def test_credentials_are_sent_after_the_info_of_the_server() -> None:
    peer = Peer()
    assert not peer.protocol.greeted.done()
    peer.feed(b'INFO {"nonce": "x"}\r\n')
    assert peer.protocol.greeted.done()
    assert peer.protocol.info["nonce"] == "x"
    peer.protocol.introduce(connect_options("me", {"user": "u", "pass": "p"}))
    await asyncio.sleep(0)
    told = json.loads(peer.wire.written.split(b"\r\n")[0].removeprefix(b"CONNECT "))
    assert (told["name"], told["user"], told["pass"]) == ("me", "u", "p")


async def test_a_rejected_connection_raises() -> None:
    peer = Peer()
    peer.feed(b"INFO {}\r\n-ERR 'Authorization Violation'\r\n")
    with pytest.raises(ConnectionError, match="Authorization Violation"):
        await peer.protocol.established


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    started = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    started.start()
    yield started
    started.stop()


async def test_messages_of_all_sizes_through_a_real_server(server: EmbeddedNats) -> None:
    sizes = [0, 1, 100, 65_536, 1 << 20, 8 << 20]
    received: list[Message] = []
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(server.url, "test", background)
        assert bus.max_payload_bytes == 8 << 20
        unsubscribe = await bus.subscribe("sizes.*", received.append)
        for size in sizes:
            bus.publish(f"sizes.{size}", b"z" * size, "answer.here")
        await bus.flush()
        assert [len(message.data) for message in received] == sizes
        assert {message.reply for message in received} == {"answer.here"}
        unsubscribe()
        bus.publish("sizes.1", b"z")
        await bus.flush()
        assert len(received) == len(sizes)
        await bus.close()


async def test_a_subject_without_subscribers_is_reported(server: EmbeddedNats) -> None:
    received: list[Message] = []
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(server.url, "test", background)
        await bus.subscribe("told", received.append)
        bus.publish("nobody.there", b"x", "told")
        await bus.flush()
        assert [message.status for message in received] == ["503"]
        await bus.close()


@pytest.mark.parametrize("drains", [False, True])
async def test_what_is_on_its_way_when_a_subscription_ends(server: EmbeddedNats, drains: bool) -> None:
    received: list[Message] = []
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(server.url, "test", background)
        unsubscribe = await bus.subscribe("drained", received.append, "queue", drains)
        bus.publish("drained", b"on its way")
        unsubscribe()
        unsubscribe()
        bus.publish("drained", b"too late")
        await bus.flush()
        assert [message.data for message in received] == [b"on its way"] * drains
        await bus.close()
