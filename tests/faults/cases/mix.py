"""F-30: random faults at random times and steps, by a seed, under load of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from tests.faults.loads.sequences import SequenceLoad
from tests.faults.models import DIGEST, TOTAL, write_models
from tests.faults.nemesis import Action, Habits, Kind, Nemesis
from tests.faults.report import FaultReport
from tests.faults.scene import Scene, Task, scene
from tests.faults.steps import DURABLE, LIVE

_FAULTS = 30
_EVERY_S = 2.0
_SHORT_EVERY_S = 0.7
_MOST_PARTITIONS = 2
_AT_STEP_S = 3.0
"""Time to wait for a request at the step before the process is killed anyway."""

BUSY = "^503 "
"""Errors that are allowed while queues are full or no worker serves the model."""

_SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP, Kind.CONTINUE: signal.SIGCONT}


async def random_mix(task: Task) -> FaultReport:
    """F-30: `count` random faults at random times and steps, by the seed."""
    line = FaultReport("F-30", "random mix of kills, pauses and ends", seed=task.seed)
    async with _loaded(task, line) as on:
        await _draw(on, task.times(_FAULTS), _EVERY_S)
    return line


async def short(task: Task, kills: Sequence[tuple[str, str]], count: int) -> FaultReport:
    """A short run for the test suite: the given kills (role, step), then `count` random faults."""
    line = FaultReport("F-30", "kills at steps, then a random mix", seed=task.seed)
    async with _loaded(task, line, clients=4, rate=20.0) as on:
        for role, step in kills:
            await on.at_step(role, step)
        await _draw(on, count, _SHORT_EVERY_S)
    return line


@contextlib.asynccontextmanager
async def _loaded(task: Task, line: FaultReport, clients: int = 8, rate: float = 40.0) -> AsyncIterator[Scene]:
    """A cluster under load of every kind."""
    # Where there are several schedulers they share each model, and not only the models.
    models = partial(write_models, names=(DIGEST, TOTAL), partitions=min(task.schedulers, _MOST_PARTITIONS))
    async with scene(task, line, clients=clients, rate=rate, models=models, allowed=BUSY) as on:
        sequences = SequenceLoad(task.seed, [on.cluster.http(number) for number in range(task.gateways)], clients // 2)
        sequences.start()
        yield on
        line.add(await sequences.end())
        ended, anew = sequences.ended, sequences.begun_anew
        line.notes.append(f"sequences ended {ended}, ended with an error and begun anew {anew}")


async def _draw(on: Scene, times: int, every_s: float) -> None:
    """Run the random faults of the seed."""
    habits = Habits(every_s=every_s, until_s=float("inf"), steps=LIVE + DURABLE)
    nemesis = Nemesis(on.task.seed, list(on.cluster.members), habits)
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as recoveries:
        while nemesis.faults < times:
            await asyncio.sleep(max(0.0, (nemesis.next_s or 0.0) - (time.monotonic() - began_s)))
            for action in nemesis.due(time.monotonic() - began_s):
                await _carry_out(on, action)
                if action.kind is not Kind.STOP:
                    recoveries.create_task(on.recovered(time.monotonic()))
        for name in on.cluster.members:
            on.cluster.kill(name, signal.SIGCONT)
        await on.cluster.whole()


async def _carry_out(on: Scene, action: Action) -> None:
    if action.kind is not Kind.CONTINUE:
        on.line.faults[
            f"{action.kind} {action.names[0].rpartition('-')[0] if len(action.names) == 1 else 'several'}"
        ] += 1
    if action.step:
        await _kill_at_step(on, action.names[0], action.step)
    elif action.kind is Kind.END:
        for name in action.names:
            on.cluster.kill(name, signal.SIGCONT)
            on.cluster.kill(name, signal.SIGTERM)
    else:
        await on.kill(action.names, _SIGNALS[action.kind])


async def _kill_at_step(on: Scene, name: str, step: str) -> None:
    steps, members = on.cluster.steps, on.cluster.of(on.cluster.steps.role_of(step))
    asked = [member.pid for member in members if member.is_running and steps.order(member.pid, step, "tell")]
    await steps.told_any(asked, step, _AT_STEP_S)
    on.cluster.kill(name)
    for pid in asked:
        steps.order(pid, step, "none")
