"""`TrafficCounters`: what became of the requests of models with a traffic rule, by version and by how it was chosen.

Each process that submits requests counts its own. `TrafficReporter` publishes them while they change, and
`TrafficTotals` sums those of all processes. Models without a rule are not counted, and cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.calls.traffic.comparison import ComparisonTotals
from weir.calls.traffic.shadow import OnResponse, ShadowComparisons, ShadowCopies
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.traffic import ArmRow, ComparisonRow, TrafficReport
from weir.telemetry.instruments import DurationSketch

if TYPE_CHECKING:
    from weir.calls.traffic.split import TrafficSplit

logger = logging.getLogger("weir.calls")

REPORT_INTERVAL_S = 0.5
"""How long after a request ended its counters are published at the latest."""

MAX_PROCESSES = 1000
"""Processes whose counters are kept; those of the ones that left first are dropped."""


class ArmKey(NamedTuple):
    """A model's identity, a version, and how requests got it (`weir.calls.traffic.split`)."""

    model: str
    version: int
    arm: str


class ArmCounters:
    """The requests of one arm that ended, and how long they took."""

    __slots__ = ("duration_us", "failures", "requests", "sketch")

    def __init__(self) -> None:
        self.requests = 0
        self.failures = 0
        self.duration_us = 0
        self.sketch = DurationSketch()

    def add(self, row: ArmRow) -> None:
        """Adds the counters of another process."""
        self.requests += row.requests
        self.failures += row.failures
        self.duration_us += row.duration_us
        self.sketch.add_bins(row.bins)


class TrafficCounters:
    """The counters of one process, and its comparisons (`shadow`). `on_count` is called after each change.

    With `copies`, copies of requests are made for shadow traffic.
    """

    def __init__(self) -> None:
        self.arms: dict[ArmKey, ArmCounters] = {}
        self.shadow = ShadowComparisons()
        self.shadow.on_change = lambda: self.on_count()
        self.on_count: Callable[[], None] = lambda: None
        self.copies: ShadowCopies | None = None

    @contained()
    def observe(self, split: TrafficSplit, pending: Any, arm: str) -> None:
        """Takes each submitted `PendingRequest` before its first response: counts its end, and has a copy of it made."""
        self.count_end(pending, arm)
        if self.copies is not None and pending.lookup is None:
            self.copies.make(split, pending)

    def count_end(self, pending: Any, arm: str) -> None:
        """Counts a `PendingRequest`, which begins now, when it ends."""
        model, request, then = pending.model.name, pending.request, pending.on_response
        pending.on_response = partial(self._on_response, model, request, arm, time.monotonic_ns(), then)

    def _on_response(  # noqa: PLR0913 - bound once for a request: an object for its arguments would cost as much
        self,
        model: str,
        request: InferRequest,
        arm: str,
        began_ns: int,
        on_response: OnResponse,
        outcome: InferResponse | WeirError | None,
        is_final: bool,
    ) -> None:
        on_response(outcome, is_final)
        if is_final:
            version = outcome.model_version if isinstance(outcome, InferResponse) else request.model_version
            duration_us = (time.monotonic_ns() - began_ns) // 1000
            self.count(ArmKey(model, int(version or 0), arm), isinstance(outcome, WeirError), duration_us)

    def count(self, key: ArmKey, has_failed: bool, duration_us: int) -> None:
        """Counts a request that ended. Durations of failed requests are not part of the latencies."""
        counters = self.arms.get(key)
        if counters is None:
            counters = self.arms[key] = ArmCounters()
        counters.requests += 1
        counters.duration_us += duration_us
        if has_failed:
            counters.failures += 1
        else:
            counters.sketch.add(duration_us)
        self.on_count()

    def comparisons(self) -> list[ComparisonRow]:
        """The comparisons as they travel."""
        return [totals.row(*key) for key, totals in self.shadow.totals.items()]

    def rows(self) -> list[ArmRow]:
        """The counters as they travel."""
        return [
            ArmRow(*key, arm.requests, arm.failures, arm.duration_us, arm.sketch.bins())
            for key, arm in self.arms.items()
        ]


class TrafficTotals:
    """The counters of all processes. `process_id` names this one, whose `counters` it also publishes."""

    def __init__(self, bus: Bus, process_id: str, counters: TrafficCounters) -> None:
        self._bus = bus
        self._id = process_id
        self._own = counters
        self._others: dict[str, TrafficReport] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.malformed_messages = 0

    async def start(self) -> None:
        """Publishes the counters of this process from now on, and follows those of the others."""
        await self._bus.subscribe(subjects.TRAFFIC_COUNTERS, self._on_report)
        self._own.on_count = self._schedule

    def stop(self) -> None:
        """Publishes the counters for the last time: the other processes keep them in their sums."""
        self._own.on_count = lambda: None
        self._own.shadow.close()
        if self._timer is not None:
            self._timer.cancel()
            self._publish()

    def of(self, model: str = "") -> dict[ArmKey, ArmCounters]:
        """The sums over all processes, of one model or of all."""
        sums: dict[ArmKey, ArmCounters] = {}
        for _, row in self.rows(model):
            sums.setdefault(ArmKey(row.model, row.version, row.arm), ArmCounters()).add(row)
        return dict(sorted(sums.items()))

    def rows(self, model: str = "") -> Iterator[tuple[str, ArmRow]]:
        """(process, row) of each process, of one model or of all."""
        reports = [(self._id, self._own.rows()), *((report.process, report.rows) for report in self._others.values())]
        return ((process, row) for process, rows in reports for row in rows if not model or row.model == model)

    def comparisons(self) -> dict[tuple[str, int], ComparisonTotals]:
        """The sums of comparisons over all processes, by model and version."""
        sums: dict[tuple[str, int], ComparisonTotals] = {}
        reported = (row for report in self._others.values() for row in report.comparisons)
        for row in (*self._own.comparisons(), *reported):
            sums.setdefault((row.model, row.version), ComparisonTotals()).add_row(row)
        return dict(sorted(sums.items()))

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._publish)

    def _publish(self) -> None:
        self._timer = None
        if self._bus.is_connected:
            self._bus.publish(
                subjects.TRAFFIC_COUNTERS, TrafficReport(self._id, self._own.rows(), self._own.comparisons()).pack()
            )

    def _on_report(self, message: Message) -> None:
        try:
            report = TrafficReport.unpack(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped counters of traffic: %s", error)
            return
        if report.process == self._id:
            return
        self._others.pop(report.process, None)
        self._others[report.process] = report
        if len(self._others) > MAX_PROCESSES:
            del self._others[next(iter(self._others))]
