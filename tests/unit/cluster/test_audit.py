"""The recorder of a process: events reach the file and stream AUDIT once, whatever the broker does, and are bounded."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.access.audit import AuditEvent, event_of
from weir.access.gate import Gate
from weir.access.policy.actions import Action
from weir.access.policy.document import parse_policy
from weir.access.principal import NOBODY, Principal, Proof
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.cluster import audit as module
from weir.cluster.audit import AuditOptions, AuditRecorder, read_events

ALICE = Principal("alice", "red", frozenset(["operator"]), Proof.KEY, "k-17")
MAX_BYTES = 1 << 20
NOW_S = 1_800_000_000.0


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


class Recording:
    """A recorder with its bus and a clock that tests set."""

    def __init__(self, bus: Bus, publisher: AckedPublisher, gate: Gate, path: str) -> None:
        self.bus = bus
        self.now_s = NOW_S
        self.recorder = AuditRecorder(bus, publisher, gate, AuditOptions(path, MAX_BYTES), lambda: self.now_s)

    async def stored(self) -> list[AuditEvent]:
        return [event async for event in read_events(self.bus)]

    async def wait_stored(self, count: int) -> list[AuditEvent]:
        events: list[AuditEvent] = []
        async with asyncio.timeout(30):
            while len(events) < count:
                await asyncio.sleep(0.02)
                events = await self.stored()
        return events


@asynccontextmanager
async def recording(nats: EmbeddedNats, path: str = "", has_policy: bool = True) -> AsyncIterator[Recording]:
    gate = Gate(lambda: NOW_S)
    if has_policy:
        gate.use_policy(parse_policy("roles: {}"))
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        publisher = AckedPublisher(bus, "test")
        await publisher.start(background)
        recording = Recording(bus, publisher, gate, path)
        recording.recorder.start(background)
        yield recording
        await recording.recorder.stop()
        publisher.stop()
        await bus.close()


def loaded(model: str, time_s: float = NOW_S) -> AuditEvent:
    return event_of(time_s, "http", "POST /load", ALICE, Action.LOAD, allowed=True, why="rule 1", model=model)


def refused(model: str, time_s: float = NOW_S) -> AuditEvent:
    return event_of(time_s, "grpc", "ModelInfer", NOBODY, Action.INFER, allowed=False, why="no rule", model=model)


async def test_events_are_in_the_stream_in_their_order(nats: EmbeddedNats) -> None:
    async with recording(nats) as recorded:
        assert await recorded.stored() == []  # no stream yet
        for number in range(100):
            recorded.recorder.record(loaded(f"m{number}"))
        events = await recorded.wait_stored(100)
        assert events == [loaded(f"m{number}") for number in range(100)]
        assert recorded.recorder.dropped == 0


async def test_refusals_are_counted_until_their_second_is_over(nats: EmbeddedNats) -> None:
    async with recording(nats) as recorded:
        for _ in range(7):
            recorded.recorder.record(refused("m"))
        recorded.recorder.record(loaded("n"))
        assert await recorded.wait_stored(1) == [loaded("n")]
        recorded.now_s += 1
        _, event = await recorded.wait_stored(2)
        assert (event.count, event.door, event.model, event.allowed) == (7, "grpc", "m", False)


async def test_a_stop_records_what_is_still_counting(nats: EmbeddedNats, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    async with recording(nats, str(path)) as recorded:
        recorded.recorder.record(refused("m"))
    assert [json.loads(line)["model"] for line in path.read_text().splitlines()] == ["m"]
    async with recording(nats) as recorded:
        assert [event.model for event in await recorded.stored()] == ["m"]


@pytest.mark.parametrize("has_file", [False, True])
async def test_without_a_policy_only_a_file_turns_it_on(nats: EmbeddedNats, tmp_path: Path, has_file: bool) -> None:
    path = tmp_path / "audit.log"
    async with recording(nats, str(path) if has_file else "", has_policy=False) as recorded:
        recorded.recorder.record(loaded("m"))
    assert (path.read_text() if path.exists() else "").count("\n") == has_file
    async with recording(nats) as recorded:
        assert len(await recorded.stored()) == has_file


async def test_events_wait_while_the_broker_is_away_and_are_stored_once(
    nats: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording(nats) as recorded:
        recorded.recorder.record(loaded("before"))
        await recorded.wait_stored(1)
        nats.stop()
        await eventually(lambda: not recorded.bus.is_connected)
        for number in range(50):
            recorded.recorder.record(loaded(f"m{number}"))
        nats.start()
        await eventually(lambda: recorded.bus.is_connected)
        recorded.recorder.record(loaded("after"))
        events = await recorded.wait_stored(52)
        assert [event.model for event in events] == ["before", *(f"m{number}" for number in range(50)), "after"]
        assert recorded.recorder.dropped == 0


async def test_what_waits_for_the_broker_is_bounded_and_said_once(
    nats: EmbeddedNats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 10)
    path = tmp_path / "audit.log"
    async with recording(nats, str(path)) as recorded:
        recorded.recorder.record(loaded("before"))
        await recorded.wait_stored(1)
        nats.stop()
        await eventually(lambda: not recorded.bus.is_connected)
        for number in range(25):
            recorded.recorder.record(loaded(f"m{number}"))
        assert recorded.recorder.dropped == 15
        assert [record.message for record in caplog.records if "lacks audit events" in record.message] == [
            "stream AUDIT lacks audit events: 10 events wait for the broker"
        ]
        nats.start()
        await recorded.wait_stored(11)
        await eventually(lambda: "stores audit events again; it lacks 15" in caplog.text)
    assert len(path.read_text().splitlines()) == 26  # the file lacks none


async def test_a_broker_without_room_is_said_once_and_fails_nothing(
    nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def ensure(_bus: Bus, _max_bytes: int) -> None:
        nonlocal tries
        tries += 1
        raise OSError("insufficient storage resources available")

    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "ensure_audit_stream", ensure)
        async with recording(nats) as recorded:
            recorded.recorder.record(loaded("m"))
            await eventually(lambda: tries >= 3)
            patch.undo()
            assert await recorded.wait_stored(1) == [loaded("m")]
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["stream AUDIT can't be created: insufficient storage resources available: events wait"]


async def test_the_stream_is_bounded_and_takes_another_size(nats: EmbeddedNats) -> None:
    async with recording(nats) as recorded:
        recorded.recorder.record(loaded("m"))
        await recorded.wait_stored(1)
        config = (await recorded.bus.jetstream.stream_info("AUDIT")).config
        assert (config.max_bytes, config.max_age, config.deny_delete) == (MAX_BYTES, 30 * 86400, True)
        await module.ensure_audit_stream(recorded.bus, 2 * MAX_BYTES)
        config = (await recorded.bus.jetstream.stream_info("AUDIT")).config
        assert (config.max_bytes, config.max_age, config.deny_delete) == (2 * MAX_BYTES, 30 * 86400, True)
