"""Standing pulls keep a few requests open at JetStream, however many bursts and idle times there are."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from collecting_bus import CollectingBus
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.api import ConsumerConfig, StreamConfig

from bus import pull as frame_pulls
from bus.connection import Bus, Message
from bus.embedded import EmbeddedNats
from bus.message_pull import MessagePull
from bus.pull import FramePull


class PullServer(CollectingBus):
    """Stands for the bus and for a consumer of JetStream: it keeps the pull requests that are open."""

    is_clustered = False
    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.open: deque[list[float]] = deque()  # [messages left, when it expires]
        self.now_s = 0.0
        self.receive: Callable[[Message], None] = lambda message: None
        self.tells_pending = True

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        asked = json.loads(data)
        self.open.append([asked["batch"], self.now_s + asked["expires"] / 1e9])

    def deliver(self, count: int) -> None:
        """Delivers messages as nats-server does: each by the next of the open requests."""
        for _ in range(count):
            assert self.open, "nothing was asked for"
            request = self.open.popleft()
            request[0] -= 1
            if request[0]:
                self.open.append(request)
            self.receive(Message("inbox", "$JS.ACK.x", b"frame", ""))

    def wait(self, seconds: float) -> None:
        """Time passes: requests that expire end with a status."""
        until_s = self.now_s + seconds
        while self.open and min(request[1] for request in self.open) <= until_s:
            ended = min(self.open, key=lambda request: request[1])
            self.now_s = ended[1]
            self.open.remove(ended)
            self.status("408 Request Timeout", int(ended[0]))
        self.now_s = until_s

    def status(self, line: str, left: int | None) -> None:
        told = (
            f"Nats-Pending-Messages: {left}\r\nNats-Pending-Bytes: 0\r\n"
            if self.tells_pending and left is not None
            else ""
        )
        self.receive(Message("inbox", "", b"", line[:3], f"NATS/1.0 {line}\r\n{told}\r\n".encode()))


def frame_pull(server: PullServer) -> FramePull:
    pull = FramePull(cast(Bus, server), "LIVE", "live-a", "inbox", lambda data, ack: None)
    server.receive = pull.receive
    pull.start()
    return pull


def message_pull(server: PullServer) -> MessagePull:
    def done(message: Message) -> None:
        pull.done(len(message.data) + len(message.header_block))

    pull = MessagePull(cast(Bus, server), "QUEUE", "event-a", done)
    server.receive = lambda message: pull.receive(message, server.now_s)
    pull.start(0.0, "inbox", "group")
    return pull


Begin = Callable[[PullServer], Any]
BOTH = pytest.mark.parametrize("begin", [frame_pull, message_pull])


@BOTH
def test_bursts_and_idle_times_leave_no_requests_open_behind_them(begin: Begin) -> None:
    server = PullServer()
    begin(server)
    for _ in range(50):
        server.deliver(450)
        server.wait(32)
        assert 1 <= len(server.open) <= 2


STEPS = st.lists(st.one_of(st.integers(1, 2000), st.floats(0.1, 70)), max_size=20)


@BOTH
@settings(max_examples=40)
@given(steps=STEPS)
def test_something_is_always_asked_for_and_never_much(begin: Begin, steps: list[float]) -> None:
    server = PullServer()
    begin(server)
    for step in steps:
        if isinstance(step, int):
            server.deliver(step)
        else:
            server.wait(step)
        assert 1 <= len(server.open) <= 4


@BOTH
@settings(max_examples=40)
@given(steps=STEPS)
def test_something_is_asked_for_where_the_server_does_not_say_what_it_leaves_out(
    begin: Begin, steps: list[float]
) -> None:
    server = PullServer()
    server.tells_pending = False
    begin(server)
    for step in steps:
        if isinstance(step, int):
            server.deliver(step)
        else:
            server.wait(step)
        assert server.open


@BOTH
def test_a_request_that_is_refused_is_not_repeated_at_once(begin: Begin) -> None:
    server = PullServer()
    begin(server)
    for _ in range(5):
        if server.open:
            server.open.pop()
            server.status("409 Exceeded MaxWaiting", None)
    assert len(server.open) == 0


def test_a_durable_pull_that_was_refused_asks_again_later() -> None:
    server = PullServer()
    pull = message_pull(server)
    server.open.clear()
    server.status("409 Exceeded MaxWaiting", None)
    pull.check(1.0)
    assert len(server.open) == 1
    assert not pull.consumer_lost


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path)
    server.start()
    yield server
    server.stop()


async def test_nats_server_sees_few_open_requests(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_pulls, "_EXPIRES_S", 0.2)
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        await bus.jetstream.add_stream(StreamConfig(name="S", subjects=["s"]))
        await bus.jetstream.add_consumer("S", ConsumerConfig(durable_name="c", ack_policy="none"))
        got: list[bytes] = []
        pull = FramePull(bus, "S", "c", "here", lambda data, ack: got.append(data))
        statuses: list[str] = []

        def receive(message: Message) -> None:
            if message.status:
                statuses.append(message.status)
            pull.receive(message)

        await bus.subscribe("here", receive)
        pull.start()
        for burst in range(1, 7):
            for _ in range(450):
                bus.publish("s", b"x")
            ended = len(statuses)
            async with asyncio.timeout(10):
                while len(got) < 450 * burst or len(statuses) < ended + 2:
                    await asyncio.sleep(0.01)
        assert (await bus.jetstream.consumer_info("S", "c")).num_waiting <= 2
        await bus.close()
