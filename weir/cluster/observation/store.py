"""`ObservedStore`: the reports that an observer has received, as many as fit into a bound of bytes. Sans-IO.

The oldest reports of all models are removed first. A batch has a number (`seq`) among those of its model, so that a reader
asks only for later ones, and learns how many it has missed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from weir.schemas.wire.observation import BatchedRequest, BatchEndReport, BatchReport, Report, TraceReport

MAX_BYTES = 16 << 20
"""Reports that a store keeps, by its estimate of their memory."""

_REPORT_BYTES = 1500
_REQUEST_BYTES = 200
_TIME_BYTES = 150


@dataclass(frozen=True, slots=True)
class ObservedBatch:
    """A batch, number `seq` of those reported of its model. `busy_us` is None until it has ended.

    `is_answered` is None until then, and False if its requests had to run again.
    """

    seq: int
    report: BatchReport
    busy_us: int | None = None
    is_answered: bool | None = None
    ended_us: int | None = None


class BatchPage(NamedTuple):
    """Batches of a model after a number: `next` is the number to ask after next.

    `dropped` counts the batches since then that were not reported, because of the rate, or are not kept any more.
    """

    next: int
    dropped: int
    batches: list[ObservedBatch]


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """A trace, the batch that ran it if that was reported, and the callers and keys of the requests in that batch."""

    trace: TraceReport
    batch: ObservedBatch | None = None

    @property
    def others(self) -> Sequence[BatchedRequest]:
        """The other requests of its batch."""
        if self.batch is None:
            return ()
        own = self.trace.gateway, self.trace.key
        return [each for each in self.batch.report.requests if (each.gateway, each.key) != own]


class _Model:
    """The batches and traces of one model, oldest first."""

    __slots__ = ("batches", "dropped", "next_seq", "traces")

    def __init__(self) -> None:
        self.next_seq = 1
        self.batches: OrderedDict[int, ObservedBatch] = OrderedDict()
        self.traces: OrderedDict[tuple[str, int], TraceReport] = OrderedDict()
        self.dropped: deque[tuple[int, int]] = deque(maxlen=4096)  # (seq, batches not reported before it)


_Key = tuple[str, int]
"""The scheduler and the id of a batch, or the caller and the key of a request."""


class ObservedStore:
    """Reports of all models that one process observes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.size_bytes = 0
        self._models: dict[str, _Model] = {}
        self._batches: dict[_Key, tuple[str, int]] = {}  # model and seq, by scheduler and id
        self._requests: dict[_Key, _Key] = {}  # the batches of requests
        self._ids: dict[str, tuple[str, _Key]] = {}  # model, caller and key, by request id
        self._age: deque[tuple[int, Callable[[], None]]] = deque()  # sizes of reports, and how each is removed

    def add(self, report: Report) -> None:
        """Takes a report; removes the oldest ones beyond the bound."""
        if isinstance(report, BatchReport):
            self._add_batch(report)
        elif isinstance(report, BatchEndReport):
            self._end_batch(report)
        else:
            self._add_trace(report)
        while self.size_bytes > self._max_bytes and self._age:
            size_bytes, remove = self._age.popleft()
            self.size_bytes -= size_bytes
            remove()

    def forget(self, model: str) -> None:
        """Removes all reports of a model that is not watched any more; its batches are numbered on."""
        of_model = self._models.get(model)
        if of_model is not None:
            of_model.batches.clear()
            of_model.traces.clear()

    def traces(self, model: str = "", limit: int = 50) -> list[TraceReport]:
        """The latest traces of a model, or of all (""), latest first."""
        if model:
            of_model = self._models.get(model)
            return list(islice(reversed(of_model.traces.values()), limit)) if of_model is not None else []
        latest = [trace for each in self._models.values() for trace in islice(reversed(each.traces.values()), limit)]
        return sorted(latest, key=_began_ns, reverse=True)[:limit]

    def trace(self, id: str) -> ObservedRequest | None:
        """The latest request with this id, or, as "<caller>/<key>", the one with that key; None if it was not reported."""
        model, key = self._ids.get(id, ("", ("", 0)))
        if not model:
            caller, _, number = id.rpartition("/")
            key = caller, int(number) if number.isascii() and number.isdigit() and len(number) < 20 else 0
            model = next((name for name, each in self._models.items() if key in each.traces), "")
        of_model = self._models.get(model)
        trace = None if of_model is None else of_model.traces.get(key)
        if of_model is None or trace is None:
            return None
        ran_in = self._requests.get(key)
        if ran_in is None and trace.batch is not None:
            ran_in = trace.scheduler, trace.batch
        place = None if ran_in is None else self._batches.get(ran_in)
        batch = self._models[place[0]].batches.get(place[1]) if place is not None else None
        return ObservedRequest(trace, batch)

    def batches(self, model: str, after: int = 0, limit: int = 500) -> BatchPage:
        """The batches of a model after number `after`, at most the latest `limit`."""
        of_model = self._models.get(model)
        if of_model is None:
            return BatchPage(after, 0, [])
        found: list[ObservedBatch] = []
        for seq in reversed(of_model.batches):
            if seq <= after or len(found) >= limit:
                break
            found.append(of_model.batches[seq])
        found.reverse()
        last = of_model.next_seq - 1
        unreported = sum(count for seq, count in of_model.dropped if seq > after)
        return BatchPage(last, unreported + max(0, last - after) - len(found), found)

    def _add_batch(self, report: BatchReport) -> None:
        of_model = self._models.setdefault(report.model, _Model())
        key, seq = (report.scheduler, report.id), of_model.next_seq
        of_model.next_seq += 1
        of_model.batches[seq] = ObservedBatch(seq, report)
        if report.dropped:
            of_model.dropped.append((seq, report.dropped))
        self._batches[key] = report.model, seq
        requests = [(request.gateway, request.key) for request in report.requests]
        self._requests.update(dict.fromkeys(requests, key))

        def remove() -> None:
            of_model.batches.pop(seq, None)
            self._batches.pop(key, None)
            for request in requests:
                if self._requests.get(request) == key:
                    del self._requests[request]

        self._kept(_REPORT_BYTES + _REQUEST_BYTES * len(requests), remove)

    def _end_batch(self, report: BatchEndReport) -> None:
        model, seq = self._batches.get((report.scheduler, report.id), ("", 0))
        of_model = self._models.get(model)
        batch = None if of_model is None else of_model.batches.get(seq)
        if of_model is not None and batch is not None:
            of_model.batches[seq] = replace(
                batch, busy_us=report.busy_us, is_answered=report.is_answered, ended_us=report.ended_us
            )

    def _add_trace(self, report: TraceReport) -> None:
        of_model = self._models.setdefault(report.model, _Model())
        key = report.gateway, report.key
        if key in of_model.traces:
            return
        of_model.traces[key] = report
        place = report.model, key
        if report.id:
            self._ids[report.id] = place

        def remove() -> None:
            of_model.traces.pop(key, None)
            if self._ids.get(report.id) == place:
                del self._ids[report.id]

        self._kept(_REPORT_BYTES + _TIME_BYTES * len(report.times), remove)

    def _kept(self, size_bytes: int, remove: Callable[[], None]) -> None:
        self._age.append((size_bytes, remove))
        self.size_bytes += size_bytes


def _began_ns(trace: TraceReport) -> int:
    return trace.times[0][1] if trace.times else 0
