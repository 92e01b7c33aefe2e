"""`Bus.connect` without a broker, and what a `Bus` does while the broker is away."""

import asyncio
import socket

import pytest

from weir.bus.naming import subjects
from weir.bus.nats import connection
from weir.bus.nats.connection import Bus


async def test_no_server_is_one_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        async with asyncio.TaskGroup() as background:
            with pytest.raises(OSError, match=f"no NATS server answers at {url}"):
                await Bus.connect(url, "nobody", background, connect_timeout_s=0.2)


def test_what_is_dropped_during_an_outage_is_logged_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_KEPT_BYTES", 10)
    monkeypatch.setattr(connection, "_limited", connection.LogLimiter(connection.logger))
    bus = Bus(["nats://127.0.0.1:1"], "test")
    for _ in range(100):
        bus.publish("subject", bytes(11))
    assert [record.getMessage() for record in caplog.records] == [
        "the broker is away: dropped a message of 11 bytes on subject"
    ]


class Pinged:
    """Stands for a connection: it counts pings, and answers them if `answers`."""

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.pings = 0
        self.aborts = 0
        self.pings_outstanding = 100  # of calls of `flush`, sent a moment ago

    def ping(self) -> asyncio.Future[None]:
        self.pings += 1
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.answers:
            pong.set_result(None)
        return pong

    def abort(self) -> None:
        self.aborts += 1

    last_error = ""


@pytest.mark.parametrize("answers", [True, False])
async def test_only_unanswered_pings_of_its_own_abort_a_connection(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PING_INTERVAL_S", 0.001)
    bus, pinged = Bus(["nats://a"], "test"), Pinged(answers)
    bus._protocol = pinged  # type: ignore[assignment]
    keeping = asyncio.create_task(bus._keep())
    async with asyncio.timeout(10):
        while pinged.pings < 5 and not pinged.aborts:
            await asyncio.sleep(0.001)
    keeping.cancel()
    assert (pinged.aborts > 0) is not answers
    assert pinged.pings >= 2


def test_what_is_of_the_moment_is_not_kept_through_an_outage() -> None:
    bus = Bus(["nats://a"], "test")
    for subject in (
        subjects.heartbeat("w"),
        subjects.presence("worker", "w"),
        subjects.PRESENCE_QUERY,
        subjects.probe("w"),
        subjects.STATISTICS_QUERY,
        subjects.counters("g") + ".1",
        "$JS.API.CONSUMER.MSG.NEXT.LIVE.live-a",
    ):
        for _ in range(100):
            bus.publish(subject, b"told")
    assert bus.unsent_bytes == 0
    bus.publish(subjects.live("a"), b"request")
    bus.publish(subjects.LAST_COUNTERS, b"last")
    assert bus.unsent_bytes == len(b"requestlast")


async def test_a_failing_listener_costs_the_others_nothing_and_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RECONNECT_WAIT_S", 0.001)
    bus = Bus(["nats://a"], "test")
    bus._protocol = Pinged(True)  # type: ignore[assignment]
    called: list[str] = []

    async def fails_twice() -> None:
        called.append("fails")
        if called.count("fails") < 3:
            raise KeyError("unforeseen")

    async def works() -> None:
        called.append("works")

    bus.on_reconnect(fails_twice)
    bus.on_reconnect(works)
    bus.on_loss(lambda: called.append("first"))
    bus.on_loss(lambda: [][0])
    bus.on_loss(lambda: called.append("last"))
    async with asyncio.TaskGroup() as background:
        bus._background = background
        bus.suspect_loss("test")
    assert sorted(called) == ["fails", "fails", "fails", "works"]
    called.clear()
    bus._on_lost()
    assert called == ["first", "last"]
