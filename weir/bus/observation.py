"""`ObservationLeases`: who observes batches and requests now, and which of them are reported to whom.

`Observed` keeps the leases of a process up to date with the bus. While no lease is live, its attribute `is_on` is False,
and that is all that the way of a request tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.runtime.containment import call_each
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.observation import (
    MAX_REPORTS,
    ObserveRequest,
    Report,
    ReportRow,
    pack_report,
    pack_reports,
)

MAX_LEASES = 64
"""Leases that a process keeps: their observers' names come from messages."""

REPORT_DELAY_S = 0.1
"""How long a report waits for others: a message costs its sender and the broker several times as much as a report."""

MAX_WAITING_BYTES = 256 << 10
"""Reports for one observer that wait; more are sent at once."""

MAX_MODELS = 4096
"""Models whose rates one lease counts."""


_TRACES_AT_ONCE_S = 0.1  # a burst of traced requests, which take longer than others, would delay those behind it


class _Rate:
    """At most `per_s` uses a second, of which those of `at_once_s` may come at once. Counts what it drops."""

    __slots__ = ("_left", "_most", "_per_s", "_since_s", "dropped")

    def __init__(self, per_s: float, now_s: float, at_once_s: float = 0.25) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * at_once_s)
        self._left = self._most
        self._since_s = now_s
        self.dropped = 0

    def has_left(self, now_s: float) -> bool:
        """Whether `spend` would return True."""
        self._left = min(self._most, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        return self._left >= 1

    def wait_s(self) -> float:
        """How long after the last `has_left`, which returned False, it will return True."""
        return (1 - self._left) / self._per_s

    def spend(self, now_s: float) -> bool:
        """Takes one use; counts it as dropped, and returns False, if none is left."""
        if not self.has_left(now_s):
            self.dropped += 1
            return False
        self._left -= 1
        return True


class _Lease:
    """One `ObserveRequest` in force until `end_s`."""

    __slots__ = ("batches", "end_s", "ids", "request", "traces")

    def __init__(self, request: ObserveRequest, now_s: float) -> None:
        self.request = request
        self.end_s = now_s + request.lease_s
        self.ids = frozenset(request.ids)
        self.traces = _Rate(request.traces_per_s, now_s, _TRACES_AT_ONCE_S)
        self.batches: dict[str, _Rate] = {}  # by model

    def renew(self, request: ObserveRequest, now_s: float) -> None:
        """Extends it; its rates start again only if they have changed."""
        if (request.traces_per_s, request.batches_per_s) != (self.request.traces_per_s, self.request.batches_per_s):
            self.traces, self.batches = _Rate(request.traces_per_s, now_s, _TRACES_AT_ONCE_S), {}
        self.request = request
        self.end_s = now_s + request.lease_s
        self.ids = frozenset(request.ids)

    def concerns(self, model: str) -> bool:
        """Whether it asks for this model."""
        return self.request.model in ("", model)

    def batches_of(self, model: str, now_s: float) -> _Rate | None:
        """The rate of a model's batches; None for more models than are counted."""
        rate = self.batches.get(model)
        if rate is None and len(self.batches) < MAX_MODELS:
            rate = self.batches[model] = _Rate(self.request.batches_per_s, now_s)
        return rate


class ObservationLeases:
    """The leases of one process, by observer and model. Sans-IO: `now_s` is monotonic time."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, str], _Lease] = {}

    def __bool__(self) -> bool:
        return bool(self._leases)

    def apply(self, request: ObserveRequest, now_s: float) -> bool:
        """Begins, renews or ends a lease. Returns False if there is no room for another one."""
        key = request.observer, request.model
        lease = self._leases.get(key)
        if request.lease_s <= 0:
            self._leases.pop(key, None)
        elif lease is not None:
            lease.renew(request, now_s)
        elif len(self._leases) < MAX_LEASES:
            self._leases[key] = _Lease(request, now_s)
        else:
            return False
        return True

    def expire(self, now_s: float) -> float | None:
        """Removes leases that have ended; returns when the next one ends, None without any."""
        self._leases = {key: lease for key, lease in self._leases.items() if lease.end_s > now_s}
        return min((lease.end_s for lease in self._leases.values()), default=None)

    def wanted_models(self, now_s: float) -> tuple[frozenset[str], float | None]:
        """The models ("" for all) of which a request that arrives now would be traced, and when there will be more.

        A lease that asks for ids wants each request, because the id of one is not known when it arrives.
        """
        wanted: set[str] = set()
        waits_s: list[float] = []
        for lease in self._leases.values():
            if lease.ids or (lease.request.traces_per_s and lease.traces.has_left(now_s)):
                wanted.add(lease.request.model)
            elif lease.request.traces_per_s:
                waits_s.append(lease.traces.wait_s())
        return frozenset(wanted), now_s + min(waits_s) if waits_s else None

    def observers_of_request(self, model: str, id: str, now_s: float) -> tuple[str, ...]:
        """The observers that get a trace of the request for `model` with this id, which has just arrived."""
        return tuple(
            lease.request.observer
            for lease in self._leases.values()
            if lease.concerns(model) and (id in lease.ids or (lease.request.traces_per_s and lease.traces.spend(now_s)))
        )

    def observers_of_batch(self, model: str, now_s: float) -> list[tuple[str, int]]:
        """The observers that get a report of a batch of `model`, each with the batches dropped since its last report."""
        found: list[tuple[str, int]] = []
        for lease in self._leases.values():
            rate = lease.batches_of(model, now_s) if lease.request.batches_per_s and lease.concerns(model) else None
            if rate is not None and rate.spend(now_s):
                found.append((lease.request.observer, rate.dropped))
                rate.dropped = 0
        return found


class Observed:
    """The leases that observers have on this process. `is_on` is whether there is any. Runs in one event loop."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.leases = ObservationLeases()
        self.is_on = False
        self.malformed_messages = 0
        self._listeners: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[str, list[ReportRow]] = {}
        self._waiting_bytes: dict[str, int] = {}

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after leases have begun or ended."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Subscribes to the requests of observers, which repeat them."""
        await self._bus.subscribe(subjects.OBSERVE, self._on_request)

    def publish(self, observers: Sequence[str], report: Report) -> None:
        """Publishes a report to each of these observers, together with those of the next `REPORT_DELAY_S`."""
        row = pack_report(report)
        for observer in observers:
            waiting = self._waiting.get(observer)
            if waiting is None:
                if not self._waiting:
                    asyncio.get_running_loop().call_later(REPORT_DELAY_S, self._flush_all)
                waiting = self._waiting[observer] = []
                self._waiting_bytes[observer] = 0
            waiting.append(row)
            self._waiting_bytes[observer] += len(row[1])
            if len(waiting) >= MAX_REPORTS or self._waiting_bytes[observer] > MAX_WAITING_BYTES:
                self._flush(observer)

    def _flush(self, observer: str) -> None:
        rows, self._waiting[observer], self._waiting_bytes[observer] = self._waiting[observer], [], 0
        if rows and self._bus.is_connected:
            self._bus.publish(subjects.observed(observer), pack_reports(rows))

    def _flush_all(self) -> None:
        for observer in self._waiting:
            self._flush(observer)
        self._waiting.clear()
        self._waiting_bytes.clear()

    def _on_request(self, message: Message) -> None:
        try:
            request = ObserveRequest.unpack(message.data)
        except MalformedMessage:
            self.malformed_messages += 1
            return
        if self.leases.apply(request, time.monotonic()):
            self._expire()

    def _expire(self) -> None:
        now_s = time.monotonic()
        end_s = self.leases.expire(now_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if end_s is not None:
            self._timer = asyncio.get_running_loop().call_later(end_s - now_s + 0.01, self._expire)
        self.is_on = end_s is not None
        call_each("weir.bus.observation: a listener", self._listeners)
