"""What workers report of the sequences of a queue's former owner, and what follows where one does not report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Message
from weir.scheduler.service import former_sequences
from weir.scheduler.service.former_sequences import SequenceReports, SequenceSurvey
from weir.schemas.wire.batches import SequenceQuery, SequenceReport, StartedSequence

ROWS = [StartedSequence(1, 5, 10), StartedSequence(2, "five", 0)]


class Bus:
    """A bus with some workers: what each replies, b"503" for one that is gone, None for one that does not."""

    def __init__(self, **workers: bytes | None) -> None:
        self._workers = {subjects.sequence_query(name): reply for name, reply in workers.items()}
        self._on_reply: Callable[[Message], None] = lambda message: None
        self.asked: list[SequenceQuery] = []

    async def subscribe(self, _subject: str, callback: Callable[[Message], None]) -> None:
        self._on_reply = callback

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self.asked.append(SequenceQuery.unpack(data))
        response = self._workers[subject]
        if response is not None:
            status = "503" if response == b"503" else ""
            message = Message(reply, "", b"" if status else response, status)
            asyncio.get_running_loop().call_soon(self._on_reply, message)


def report(worker: str, *rows: StartedSequence, is_complete: bool = True) -> bytes:
    return SequenceReport(worker, list(rows), is_complete).pack()


async def reports(**workers: bytes | None) -> SequenceReports:
    bus = Bus(**workers)
    survey = SequenceSurvey(bus, "scheduler")  # type: ignore[arg-type]
    await survey.start()
    found = await survey.ask(LiveQueue("m", 2), workers)
    assert bus.asked == [SequenceQuery("m", 2)] * len(workers)
    return found


async def test_reports_of_all_workers_are_complete() -> None:
    assert await reports(a=report("a", ROWS[0]), b=report("b", ROWS[1])) == (ROWS, True)
    assert await reports(a=report("a")) == ([], True)


@pytest.mark.parametrize("other", [b"503", b"garbage", report("b", is_complete=False), None])
async def test_reports_are_incomplete_without_one_of_a_worker(
    other: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former_sequences, "REPORT_TIMEOUT_S", 0.05)
    assert await reports(a=report("a", *ROWS), b=other) == (ROWS, False)


async def test_nobody_to_ask() -> None:
    assert await reports() == ([], True)
