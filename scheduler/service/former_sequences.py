"""`SequenceSurvey`: asks workers which sequences of a model have started, when its queue gets another owner.

A scheduler keeps the order of sequences in memory, so a sequence is lost with it. Its requests go on arriving, and only
workers can tell that it was started: they have run its first request.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.replies import ReplyInbox
from weir.runtime.log_limiter import LogLimiter
from weir.schemas.wire.batches import SequenceQuery, SequenceReport, StartedSequence
from weir.schemas.wire.codec import MalformedMessage

_limited = LogLimiter(logging.getLogger("weir.scheduler"))

REPORT_TIMEOUT_S = 0.75
"""How long reports of workers are waited for, a little longer than a worker waits for the batches that it runs."""


class SequenceReports(NamedTuple):
    """Sequences that workers have started. `is_complete`: there are no others."""

    sequences: list[StartedSequence]
    is_complete: bool


class SequenceSurvey:
    """Asks workers for one scheduler. Everything runs in one event loop."""

    def __init__(self, bus: Bus, scheduler_id: str) -> None:
        self._replies = ReplyInbox(bus, subjects.sequence_reports(scheduler_id))

    async def start(self) -> None:
        """Subscribes to reports."""
        await self._replies.start()

    async def ask(self, queue: LiveQueue, workers: Collection[str]) -> SequenceReports:
        """What these workers report. It is incomplete if one of them is gone or stands still."""
        reports: list[SequenceReport] = []
        missing = [len(workers)]

        def take(message: Message) -> bool:
            missing[0] -= 1
            if not message.status:  # else nothing listens there: the worker is gone
                try:
                    reports.append(SequenceReport.unpack(message.data))
                except MalformedMessage as error:
                    _limited.warning("malformed report", "subject %s: %s", message.subject, error)
            return not missing[0]

        query = SequenceQuery(queue.model, queue.partition).pack()
        if workers:
            asked = [subjects.sequence_query(worker) for worker in workers]
            try:
                await self._replies.gather(asked, query, take, timeout_s=REPORT_TIMEOUT_S)
            except ConnectionError:
                pass  # what has arrived counts
        is_complete = len(reports) == len(workers) and all(report.is_complete for report in reports)
        return SequenceReports([row for report in reports for row in report.sequences], is_complete)
