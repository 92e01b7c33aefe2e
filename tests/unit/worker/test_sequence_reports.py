"""The sequences that a worker has run, as it reports them to the next owner of a queue."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.waiting import eventually
from weir.bus.naming import subjects
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.batches import (
    BatchEntry,
    BatchMessage,
    SequencePosition,
    SequenceQuery,
    SequenceReport,
    StartedSequence,
)
from weir.worker import sequence_reports
from weir.worker.execution.batch import Batch
from weir.worker.sequence_reports import SequenceReporter, SequenceRoll

REPLY = f"{subjects.sequence_reports('scheduler')}.1"


def batch(*rows: tuple[int | str, int], model: str = "m", version: int = 1, number: int = 0) -> Batch:
    """A batch of requests of sequences, each with its correlation id and flags; `number` ran before each of them."""
    places = [SequencePosition(slot, number, False, 1, flags) for slot, (_, flags) in enumerate(rows)]
    entries = [BatchEntry("gateway", key, 0, b"", 0, place) for key, place in enumerate(places)]
    running = Batch(BatchMessage("scheduler", 1, model, version, 0, entries))
    running.sequence_ids = {position: id for position, (id, _) in enumerate(rows)}
    return running


def ids(roll: SequenceRoll, model: str = "m") -> list[tuple[int, int | str]]:
    return [(version, id) for version, id, age_us, *_ in roll.of(model) if age_us >= 0]


def test_a_sequence_is_on_the_roll_from_its_first_request_to_its_last() -> None:
    roll = SequenceRoll()
    roll.ended(batch((1, SEQUENCE_START), ("two", SEQUENCE_START)))
    roll.ended(batch((3, SEQUENCE_START), version=2))
    roll.ended(batch((4, SEQUENCE_START), model="other"))
    roll.ended(batch((5, SEQUENCE_START | SEQUENCE_END)))
    assert ids(roll) == [(1, 1), (1, "two"), (2, 3)]
    roll.ended(batch((1, 0), ("two", SEQUENCE_END), number=4))
    assert [(row.number, row.gateway, row.key) for row in roll.of("m")] == [(5, "gateway", 0), (1, "gateway", 0)]
    assert ids(roll) == [(1, 1), (2, 3)]
    roll.forget("m")
    assert (ids(roll), ids(roll, "other")) == ([], [(1, 4)])


def test_the_roll_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_reports, "MAX_SEQUENCES", 2)
    roll = SequenceRoll()
    for id in (1, 2, 1, 3):
        roll.ended(batch((id, SEQUENCE_START)))
    assert ids(roll) == [(1, 1), (1, 3)]


async def reported(held: list[Any], query: bytes = SequenceQuery("m").pack(), reply: str = REPLY) -> CollectingBus:
    bus, roll = CollectingBus(), SequenceRoll()
    roll.ended(batch((1, SEQUENCE_START)))
    async with asyncio.TaskGroup() as background:
        await SequenceReporter(bus, "w", roll, lambda: held).start(background)
        bus.deliver(subjects.sequence_query("w"), query, reply)
        if held:
            await asyncio.sleep(0)
            assert not bus.published
            held.pop()
    return bus


def report_in(bus: CollectingBus) -> tuple[list[tuple[int, int | str]], bool]:
    ((subject, data, _),) = bus.published
    assert subject == REPLY
    report = SequenceReport.unpack(data)
    assert all(isinstance(row, StartedSequence) for row in report.sequences)
    return [(version, id) for version, id, *_ in report.sequences], report.is_complete


async def test_a_report_waits_for_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_reports, "RUNNING_WAIT_S", 600)
    plain = SimpleNamespace(message=BatchMessage("s", 2, "m", 1, 0, [BatchEntry("g", 1, 0, b"")]))
    assert report_in(await reported([])) == ([(1, 1)], True)
    assert report_in(await reported([batch((2, SEQUENCE_START))])) == ([(1, 1)], True)
    bus, roll = CollectingBus(), SequenceRoll()
    async with asyncio.TaskGroup() as background:
        await SequenceReporter(bus, "w", roll, lambda: [plain, batch((2, 0), model="other")]).start(background)
        bus.deliver(subjects.sequence_query("w"), SequenceQuery("m").pack(), REPLY)
        await eventually(lambda: bus.published)


async def test_a_report_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_reports, "RUNNING_WAIT_S", 0.02)
    bus, roll = CollectingBus(), SequenceRoll()
    async with asyncio.TaskGroup() as background:
        await SequenceReporter(bus, "w", roll, lambda: [batch((2, 0))]).start(background)
        bus.deliver(subjects.sequence_query("w"), SequenceQuery("m").pack(), REPLY)
    assert report_in(bus) == ([], False)


@pytest.mark.parametrize(("query", "reply"), [(b"garbage", REPLY), (SequenceQuery("m").pack(), "result.m.1")])
async def test_a_query_that_is_none_has_no_reply(query: bytes, reply: str) -> None:
    assert not (await reported([], query, reply)).published
