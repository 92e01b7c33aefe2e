"""`TraceFeed`: reports the traces of requests to the processes that observe them (`weir.bus.observation`)."""

from __future__ import annotations

import asyncio
import time

from weir.bus.nats.connection import Bus
from weir.bus.observation import Observed
from weir.calls.tracing import Tracing
from weir.schemas.wire.observation import MAX_ID_LENGTH, MAX_REPORTED_TIMES, TraceReport
from weir.telemetry.tracing.trace import Trace

_MAX_ERROR_LENGTH = 400
_MAX_NAME_LENGTH = 256
_LEAST_WAIT_S = 0.002


class TraceFeed:
    """The traces of one caller, `caller_id`. Runs in one event loop.

    `protocol` is that of requests which did not come by HTTP or gRPC: "nats", or "durable". `is_on` is whether a request
    that arrives now may be traced: while the rates of all observers are used up it is False, so that the other requests
    pay for the test of one attribute.
    """

    def __init__(self, bus: Bus, caller_id: str, tracing: Tracing, protocol: str) -> None:
        self._observed = Observed(bus)
        self._leases = self._observed.leases
        self._id = caller_id
        self._protocol = protocol
        self._tracing = tracing
        self._wanted: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        self.is_on = False
        self._observed.on_change(self._update)
        tracing.observe(self)

    async def start(self) -> None:
        """Subscribes to the requests of observers."""
        await self._observed.start()

    def may_take(self, model: str) -> bool:
        """Whether some observer may want a request for `model` that has just arrived."""
        return model in self._wanted or "" in self._wanted

    def take(self, model: str, id: str) -> tuple[str, ...]:
        """The observers of a request with this id."""
        taken = self._leases.observers_of_request(model, id[:MAX_ID_LENGTH], time.monotonic())
        if taken:
            self._update()
        return taken

    def report(self, trace: Trace, key: int) -> None:
        """Reports the trace of the request `key` of this caller to its observers."""
        self._observed.publish(trace.observers, _report(self._id, self._protocol, trace, key))

    def _update(self) -> None:
        """Finds which requests are wanted now, and looks again when more of them are."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = time.monotonic()
        self._wanted, next_s = self._leases.wanted_models(now_s)
        if next_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(_LEAST_WAIT_S, next_s - now_s), self._update)
        self.is_on = bool(self._wanted)
        self._tracing.update_observers()


def _report(caller: str, protocol: str, trace: Trace, key: int) -> TraceReport:
    times = sorted(trace.timestamps[:MAX_REPORTED_TIMES], key=lambda stamp: stamp[1])
    first = times[0][0].partition("_")[0].lower() if times else ""
    facts = trace.batch

    def number(name: str) -> int | None:
        value = facts.get(name)
        return value if isinstance(value, int) and value >= 0 else None

    return TraceReport(
        gateway=caller,
        key=key,
        id=trace.request_id[:MAX_ID_LENGTH],
        model=trace.model_name,
        version=trace.model_version,
        protocol=first if first in ("http", "grpc") else protocol,
        status=trace.status,
        error=trace.error[:_MAX_ERROR_LENGTH],
        times=times,
        scheduler=str(facts.get("SCHEDULER", ""))[:_MAX_NAME_LENGTH],
        worker=str(facts.get("WORKER", ""))[:_MAX_NAME_LENGTH],
        batch=number("BATCH_ID"),
        batch_size=number("BATCH_SIZE"),
        instance=number("INSTANCE"),
    )
