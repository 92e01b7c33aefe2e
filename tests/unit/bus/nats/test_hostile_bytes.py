"""Malformed bytes affect neither other messages nor, unless framing is lost, the connection."""

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.message import Message
from weir.bus.nats.protocol import NatsProtocol
from weir.bus.turn import Turn
from weir.runtime import containment


class Wire(asyncio.Transport):
    """A transport that counts how often it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = 0

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.written += b"".join(pieces)

    def is_closing(self) -> bool:
        return self.aborted > 0

    def abort(self) -> None:
        self.aborted += 1


class Peer:
    """A protocol that has been greeted, and the messages it has delivered to subscription 1."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.wire = Wire()
        self.callbacks = {b"1": self.messages.append}
        self.turn = Turn()
        self.protocol = NatsProtocol(self.callbacks, self.turn, lambda: None)
        self.protocol.connection_made(self.wire)
        self.feed(b"INFO {}\r\nPONG\r\n")

    def feed(self, data: bytes) -> None:
        self.protocol.data_received(data)

    @property
    def bodies(self) -> list[bytes]:
        return [message.data for message in self.messages]


HEALTHY = b"MSG a 1 7\r\nhealthy\r\n"
VALID = (
    HEALTHY,
    b"MSG a 1 reply.to 0\r\n\r\n",
    b"HMSG a 1 reply 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    b"HMSG a 1 22 25\r\nNATS/1.0\r\nKey: xyz\r\n\r\nabc\r\n",
    b"PING\r\n",
    b"PONG\r\n",
    b"+OK\r\n",
    b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
    b'INFO {"connect_urls": ["127.0.0.1:1"]}\r\n',
)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"MSG a.\xff 1 1\r\nx\r\n", id="subject"),
        pytest.param(b"MSG a 1 _INBOX.\xff\xfe 1\r\nx\r\n", id="reply"),
        pytest.param(b"HMSG a.\xff 1 12 13\r\nNATS/1.0\r\n\r\nx\r\n", id="subject with headers"),
        pytest.param(b"HMSG a 1 _INBOX.\xff 12 13\r\nNATS/1.0\r\n\r\nx\r\n", id="reply with headers"),
        pytest.param(b"HMSG a 1 19 20\r\nNATS/1.0 \xff\xff 503\r\n\r\nx\r\n", id="status"),
    ],
)
async def test_bytes_that_are_not_utf8_are_delivered_as_replacement_characters(message: bytes) -> None:
    peer = Peer()
    peer.feed(message + HEALTHY)
    assert peer.bodies == [b"x", b"healthy"]
    assert not peer.wire.aborted
    strange = peer.messages[0]
    assert "\ufffd" in strange.subject + strange.reply or strange.status == "\xff\xff"
    (strange.subject + strange.reply + strange.status).encode()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"MSG 1\r\nx\r\n", id="no subscription"),
        pytest.param(b"MSG a 1 reply more 1\r\nx\r\n", id="too many fields"),
        pytest.param(b"HMSG a 1 1\r\nx\r\n", id="one size"),
        pytest.param(b"HMSG a 1 9 1\r\nx\r\n", id="headers longer than the message"),
        pytest.param(b"HMSG a 1 -5 1\r\nx\r\n", id="negative size of headers"),
        pytest.param(b"HMSG a 1 x 1\r\nx\r\n", id="no size of headers"),
        pytest.param(b"HMSG a 1 " + b"9" * 5000 + b" 1\r\nx\r\n", id="5000 digits"),
    ],
)
async def test_a_malformed_message_is_skipped_and_counted(message: bytes) -> None:
    peer = Peer()
    peer.feed(message + HEALTHY)
    assert peer.bodies == [b"healthy"]
    assert peer.protocol.malformed_messages == 1
    assert not peer.wire.aborted


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"MSG a 1 x", id="not a number"),
        pytest.param(b"MSG a 1 -3", id="negative"),
        pytest.param(b"MSG a 1 \xb2", id="superscript two"),
        pytest.param(b"MSG a 1 " + b"9" * 5000, id="5000 digits"),
        pytest.param(b"MSG", id="no fields"),
        pytest.param(b"HMSG a 1 12 x", id="total size"),
        pytest.param(b"hello", id="not a line of the protocol"),
        pytest.param(b"", id="empty"),
        pytest.param(b"PINGS", id="nearly a ping"),
        pytest.param(b"INFO {", id="broken JSON"),
        pytest.param(b"INFO " + b"[" * 100_000, id="deeply nested JSON"),
        pytest.param(b"INFO []", id="not an object"),
    ],
)
async def test_the_connection_is_closed_where_the_next_message_can_not_be_found(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Peer()
    peer.feed(HEALTHY + line + b"\r\n" + HEALTHY)
    assert peer.bodies == [b"healthy"], "what came before is delivered"
    assert peer.wire.aborted == 1
    assert "closing the connection to nats-server" in caplog.text
    peer.feed(HEALTHY)
    assert peer.bodies == [b"healthy"], "what comes after is not trusted"


async def test_a_line_without_end_is_not_collected_for_ever() -> None:
    peer = Peer()
    for _ in range(40):
        peer.feed(b"x" * 65_536)
    assert peer.wire.aborted == 1


async def test_callbacks_that_fail_are_counted_and_cost_the_others_nothing() -> None:
    peer = Peer()
    delivered: list[bytes] = []

    def fail(message: Message) -> None:
        peer.turn.defer(fail_later)
        peer.turn.defer(lambda: delivered.append(message.data))
        raise KeyError(message.data)

    def fail_later() -> None:
        raise ZeroDivisionError

    before = containment.failures()
    peer.callbacks[b"1"] = fail
    peer.feed(HEALTHY * 2)
    assert delivered == [b"healthy"] * 2
    counted = {place: count - before.get(place, 0) for place, count in containment.failures().items()}
    assert counted["weir.bus.nats.protocol: dispatching a message"] == 2
    assert counted["weir.bus.turn: running a deferred callback"] == 2


def mutated(pieces: list[bytes], places: list[tuple[float, bytes]]) -> bytes:
    """The pieces as one text, in which bytes at relative places are replaced."""
    data = bytearray(b"".join(pieces))
    for place, new in places:
        start = int(place * len(data))
        data[start : start + len(new)] = new
    return bytes(data)


STREAMS = st.lists(st.sampled_from(VALID), min_size=1, max_size=8)
MUTATIONS = st.lists(st.tuples(st.floats(0, 0.999), st.binary(min_size=1, max_size=4)), max_size=6)
CUTS = st.lists(st.floats(0, 1), max_size=8)


@settings(max_examples=300)
@given(pieces=STREAMS, places=MUTATIONS, cuts=CUTS)
def test_mutated_streams_never_raise(pieces: list[bytes], places: list[tuple[float, bytes]], cuts: list[float]) -> None:
    async def run() -> None:
        peer = Peer()
        data = mutated(pieces, places)
        ends = sorted({int(cut * len(data)) for cut in cuts} | {0, len(data)})
        for start, end in itertools.pairwise(ends):
            peer.feed(data[start:end])
        if data == b"".join(pieces):
            assert not peer.wire.aborted

    asyncio.run(run())


FIELD = st.binary(min_size=1, max_size=12).filter(lambda field: len(field.split()) == 1 and b"\r\n" not in field)


@settings(max_examples=300)
@given(subject=FIELD, reply=FIELD, body=st.binary(max_size=40), block=st.binary(max_size=40), cuts=CUTS)
def test_any_subject_reply_and_status_leave_the_next_message_whole(
    subject: bytes, reply: bytes, body: bytes, block: bytes, cuts: list[float]
) -> None:
    async def run() -> None:
        peer = Peer()
        head = b"NATS/1.0 " + block + b"\r\n\r\n"
        data = (
            b"MSG %b 1 %b %d\r\n%b\r\n" % (subject, reply, len(body), body)
            + b"HMSG %b 1 %b %d %d\r\n%b%b\r\n" % (subject, reply, len(head), len(head) + len(body), head, body)
            + HEALTHY
        )
        ends = sorted({int(cut * len(data)) for cut in cuts} | {0, len(data)})
        for start, end in itertools.pairwise(ends):
            peer.feed(data[start:end])
        assert peer.bodies == [body, body, b"healthy"]

    asyncio.run(run())
