"""`RampHost`: runs the ramps of traffic rules whose leases this process holds.

A ramp is part of the traffic record of its model (bucket `traffic`), which a gateway writes. Of all processes that do
background work, the one that holds the ramp's lease runs it: once a second it gives the counters of requests by version to
a `RampPolicy` and writes the shares that the policy decides. When the process dies, another one continues with the current
step; the evidence of its tests begins anew. A change of the rule by a client ends the ramp.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

from msgspec.structs import replace

from weir.bus.kv.leases import Leases
from weir.bus.kv.traffic import TrafficRecords
from weir.bus.naming.subjects import token
from weir.bus.streams.history import ModelHistory
from weir.calls.traffic.counters import TrafficTotals
from weir.calls.traffic.observer import VersionObserver
from weir.calls.traffic.ramp import AbortConditions, RampPolicy, Step, ramp_weights, read_conditions
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.history import RAMP, ModelChange, TrafficState
from weir.schemas.wire.traffic import ABORTED, DONE, RampState, TrafficRecord

logger = logging.getLogger("weir.durable")

LOOK_INTERVAL_S = 1.0
"""How often the counters are given to the policy."""

_RETRY_S = 1.0


class RampHost:
    """The ramps of one process. `totals` are the counters of all callers."""

    def __init__(self, leases: Leases, records: TrafficRecords, totals: TrafficTotals, history: ModelHistory) -> None:
        self._leases = leases
        self._records = records
        self._totals = totals
        self._history = history
        self._background: asyncio.TaskGroup | None = None
        self._wanted: dict[str, int] = {}  # the number of the running ramp, by model
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()  # models whose ramp's end is being written, and then reported

    def start(self, background: asyncio.TaskGroup) -> None:
        """Runs ramps in tasks of `background` from now on."""
        self._background = background
        self._records.on_change(self._on_change)
        for record in self._records.all():
            self._on_change(record.model)

    def stop(self) -> None:
        """Leaves the ramps to other processes."""
        self._background = None
        for model in list(self._wanted):
            self._end(model)

    def _on_change(self, model: str) -> None:
        record = self._records.get(model)
        ramp = None if record is None else record.ramp
        number = ramp.number if ramp is not None and ramp.is_running else 0
        if self._background is None or self._wanted.get(model, 0) == number:
            return
        if model in self._wanted:
            self._end(model)
        if number:
            self._wanted[model] = number
            self._leases.acquire(_lease(model), partial(self._begin, model), partial(self._cancel, model))

    def _begin(self, model: str) -> None:
        if self._background is not None and model in self._wanted:
            self._cancel(model)
            self._tasks[model] = self._background.create_task(self._run(model, self._wanted[model]))

    def _cancel(self, model: str) -> None:
        task = self._tasks.pop(model, None)
        if task is not None and model not in self._ending:
            task.cancel()

    def _end(self, model: str) -> None:
        self._wanted.pop(model, None)
        self._cancel(model)
        self._leases.release(_lease(model))

    async def _run(self, model: str, number: int) -> None:
        ramp = _running(self._records.get(model), number)
        if ramp is None:
            return
        policy = RampPolicy(ramp.goal, ramp.over_s, _conditions(ramp), time.monotonic(), ramp.step)
        observer = VersionObserver(self._totals, model, ramp.version)
        logger.info(
            "the ramp of model %s to version %d is at %.2f %% (step %d)",
            model,
            ramp.version,
            100 * policy.share,
            ramp.step,
        )
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            version, others = observer.look()
            step = policy.look(time.monotonic(), version, others)
            if step is None:
                continue
            if step.is_over:
                self._ending.add(model)
            try:
                if not await self._apply(model, number, step, policy.step) or step.is_over:
                    return
            finally:
                self._ending.discard(model)

    async def _apply(self, model: str, number: int, step: Step, index: int) -> bool:
        """Writes the shares of a step; returns whether the ramp is still the one to run."""

        def stepped(record: TrafficRecord | None) -> TrafficRecord | None:
            ramp = _running(record, number)
            if record is None or ramp is None:
                return record
            weights = ramp.before if step.reason else ramp_weights(ramp.before, ramp.version, step.share)
            state = ramp.state if not step.is_over else ABORTED if step.reason else DONE
            return replace(record, weights=weights, ramp=ramp.changed(index, state, step.reason))

        while _running(self._records.get(model), number) is not None:
            with contextlib.suppress(WeirError):  # the broker is away
                before, after = await self._records.change(model, "ramp", stepped)
                if before is None or after is None or after is before:
                    return False
                await self._report(before, after, step)
                return True
            await asyncio.sleep(_RETRY_S)
        return False

    async def _report(self, before: TrafficRecord, after: TrafficRecord, step: Step) -> None:
        ramp = after.ramp
        assert ramp is not None  # noqa: S101 - the caller has made it
        share = f"{100 * step.share:.4g} %"
        note = f"went back: {step.reason}" if step.reason else f"{'reached' if step.is_over else 'step to'} {share}"
        level = logging.WARNING if step.reason else logging.INFO
        logger.log(level, "the ramp of model %s to version %d %s", after.model, ramp.version, note)
        states = TrafficState(before.weights, before.sticky), TrafficState(after.weights, after.sticky)
        await self._history.record(
            ModelChange(after.model, RAMP, after.changed_ms, "ramp", None, None, *states, note=note)
        )


def _running(record: TrafficRecord | None, number: int) -> RampState | None:
    """The ramp of this number, if it is running."""
    ramp = None if record is None else record.ramp
    return ramp if ramp is not None and ramp.is_running and ramp.number == number else None


def _conditions(ramp: RampState) -> AbortConditions:
    return read_conditions(ramp.abort_if) if ramp.abort_if else AbortConditions()


def _lease(model: str) -> str:
    return f"ramp.{token(model)}"
