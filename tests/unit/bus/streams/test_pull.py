"""Standing pulls keep a few requests open at JetStream, through bursts, idle times and rejections."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.api import ConsumerConfig, StreamConfig

from tests.support.collecting_bus import CollectingBus
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams import pull as pulls
from weir.bus.streams.pull import MAX_HELD_MESSAGES, BoundedPull, StandingPull


class PullServer(CollectingBus):
    """Stands for the bus and for a consumer of JetStream: it keeps the pull requests that are open."""

    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.open: deque[list[float]] = deque()  # [messages left, when it expires]
        self.now_s = 0.0
        self.receive: Callable[[Message], None] = lambda message: None
        self.reports_pending = True
        self.requests: list[tuple[str, dict[str, object], str]] = []

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        request = json.loads(data)
        self.requests.append((subject, request, reply))
        self.open.append([request["batch"], self.now_s + request["expires"] / 1e9])

    def deliver_messages(self, count: int) -> None:
        """Delivers messages as nats-server does: each by the next of the open requests."""
        for _ in range(count):
            assert self.open, "no request is open"
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

    def status(self, line: str, left: int | None = None) -> None:
        pending = f"Nats-Pending-Messages: {left}\r\nNats-Pending-Bytes: 0\r\n"
        headers = pending if self.reports_pending and left is not None else ""
        self.receive(Message("inbox", "", b"", line[:3], f"NATS/1.0 {line}\r\n{headers}\r\n".encode()))


def standing_pull(server: PullServer) -> StandingPull:
    pull = StandingPull(cast(Bus, server), "LIVE", "live-a", lambda message: None, clock=lambda: server.now_s)
    server.receive = pull.receive
    pull.start("inbox")
    return pull


def bounded_pull(server: PullServer, holds: bool = False) -> BoundedPull:
    def done(message: Message) -> None:
        if not holds:
            pull.done(len(message.data) + len(message.header_block))

    pull = BoundedPull(cast(Bus, server), "QUEUE", "event-a", done, clock=lambda: server.now_s)
    server.receive = pull.receive
    pull.start("inbox", "group")
    return pull


Begin = Callable[[PullServer], StandingPull]
BOTH = pytest.mark.parametrize("begin", [standing_pull, bounded_pull])


@BOTH
def test_bursts_and_idle_times_leave_no_requests_open_behind_them(begin: Begin) -> None:
    server = PullServer()
    begin(server)
    for _ in range(50):
        server.deliver_messages(450)
        server.wait(32)
        assert 1 <= len(server.open) <= 2


STEPS = st.lists(st.one_of(st.integers(1, 2000), st.floats(0.1, 70)), max_size=20)


@BOTH
@pytest.mark.parametrize("reports_pending", [True, False])
@settings(max_examples=40)
@given(steps=STEPS)
def test_a_request_is_always_open_and_never_many(begin: Begin, reports_pending: bool, steps: list[float]) -> None:
    server = PullServer()
    server.reports_pending = reports_pending
    begin(server)
    for step in steps:
        if isinstance(step, int):
            server.deliver_messages(step)
        else:
            server.wait(step)
        assert server.open
        assert len(server.open) <= 4 or not reports_pending


@BOTH
def test_a_rejected_request_is_sent_again_later(begin: Begin) -> None:
    server = PullServer()
    pull = begin(server)
    server.open.clear()
    for _ in range(5):
        server.status("409 Exceeded MaxWaiting")
    assert not server.open
    server.now_s += 1
    pull.check()
    assert len(server.open) == 1
    assert not pull.consumer_lost


@BOTH
@pytest.mark.parametrize(
    "line",
    [
        "400 Bad Request - Priority Group missing",
        "409 Consumer Deleted",
        "409 Leadership Change",
        "503 No Responders",
    ],
)
def test_a_consumer_is_lost_with_its_leader_or_to_another_owner(begin: Begin, line: str) -> None:
    server = PullServer()
    pull = begin(server)
    requests = len(server.requests)
    server.status(line)
    assert pull.consumer_lost
    assert len(server.requests) == requests
    pull.start(group="next", stream="LIVE_1")
    assert not pull.consumer_lost
    subject, request, inbox = server.requests[-1]
    assert subject == f"$JS.API.CONSUMER.MSG.NEXT.LIVE_1.{'live-a' if begin is standing_pull else 'event-a'}"
    assert (request["group"], inbox) == ("next", "inbox")


@BOTH
def test_nothing_is_requested_while_it_is_paused(begin: Begin) -> None:
    server = PullServer()
    pull = begin(server)
    pull.pause()
    server.deliver_messages(512)
    pull.check()
    assert not server.open
    pull.resume()
    assert len(server.open) == 1


@BOTH
def test_a_lost_request_to_a_single_server_is_sent_again(begin: Begin) -> None:
    server = PullServer()
    pull = begin(server)
    server.open.clear()  # the request was lost
    server.now_s += 36
    pull.check()
    assert len(server.open) == 1
    assert "idle_heartbeat" not in server.requests[-1][1]


@BOTH
def test_a_leader_of_a_cluster_without_heartbeats_is_lost(begin: Begin) -> None:
    server = PullServer()
    server.is_clustered = True
    pull = begin(server)
    assert server.requests[-1][1]["idle_heartbeat"] == 1_000_000_000
    for _ in range(5):
        server.now_s += 1
        server.status("100 Idle Heartbeat")
        pull.check()
    assert not pull.is_silent
    server.now_s += 4
    assert pull.is_silent
    pull.check()
    assert pull.consumer_lost


@BOTH
def test_a_pause_without_open_requests_is_no_silence(begin: Begin) -> None:
    server = PullServer()
    server.is_clustered = True
    pull = begin(server)
    pull.pause()
    server.wait(60)
    assert not server.open
    pull.resume()
    pull.check()
    assert not pull.consumer_lost
    server.now_s += 4
    assert pull.is_silent


def test_a_pull_that_holds_all_it_may_waits_without_heartbeats() -> None:
    server = PullServer()
    server.is_clustered = True
    pull = bounded_pull(server, holds=True)
    while server.open:
        server.deliver_messages(1)
    server.wait(60)
    pull.check()
    assert not pull.consumer_lost
    for _ in range(1024):
        pull.done(5)
    pull.check()
    assert server.open
    assert not pull.consumer_lost


def test_no_more_messages_are_requested_than_may_be_held() -> None:
    server = PullServer()
    pull = bounded_pull(server, holds=True)
    delivered = 0
    while server.open:
        server.deliver_messages(1)
        delivered += 1
    assert MAX_HELD_MESSAGES - 1024 < delivered <= MAX_HELD_MESSAGES
    for _ in range(1024):
        pull.done(5)
    assert server.open
    server.open.clear()
    pull.clear()
    assert (pull.held, pull.held_bytes) == (0, 0)


def test_no_message_is_requested_without_memory_for_it() -> None:
    server = PullServer()
    room: list[int] = []

    def has_room(size_bytes: int) -> bool:
        room.append(size_bytes)
        return False

    pull = BoundedPull(cast(Bus, server), "QUEUE", "event-a", lambda message: None, has_room)
    pull.start("inbox", "group")
    assert not server.open
    assert room
    assert room[0] >= server.max_payload_bytes


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path)
    server.start()
    yield server
    server.stop()


async def test_nats_server_has_few_open_requests(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_EXPIRES_S", 0.2)
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        await bus.jetstream.add_stream(StreamConfig(name="S", subjects=["s"]))
        await bus.jetstream.add_consumer("S", ConsumerConfig(durable_name="c", ack_policy="none"))
        got: list[bytes] = []
        pull = StandingPull(bus, "S", "c", lambda message: got.append(message.data))
        statuses: list[str] = []

        def receive(message: Message) -> None:
            if message.status:
                statuses.append(message.status)
            pull.receive(message)

        await bus.subscribe("here", receive)
        pull.start("here")
        for burst in range(1, 7):
            for _ in range(450):
                bus.publish("s", b"x")
            ended = len(statuses)
            async with asyncio.timeout(10):
                while len(got) < 450 * burst or len(statuses) < ended + 2:
                    await asyncio.sleep(0.01)
        assert (await bus.jetstream.consumer_info("S", "c")).num_waiting <= 2
        await bus.close()
