"""Kills: F-01 to F-06, each at every step of a request's life."""

from __future__ import annotations

import asyncio
import time

from benchmarks.faults.line import Line
from benchmarks.faults.scene import Task, scene
from benchmarks.faults.steps import DURABLE, LIVE

_COUNT = 5
_EXECUTING_MS = 2.0
"""So long after the model was called its worker dies: in the midst of it."""


async def worker(task: Task) -> Line:
    """F-01: kill -9 of the worker at each of the eight steps."""
    return await _at_steps(task, Line("F-01", "kill -9 worker at each step"), "worker", LIVE)


async def scheduler(task: Task) -> Line:
    """F-02: kill -9 of the scheduler at each step."""
    line = Line("F-02", "kill -9 scheduler at each step")
    return await _at_steps(task, line, "scheduler", LIVE)


async def gateway(task: Task) -> Line:
    """F-03: kill -9 of the gateway while clients wait, at each step of live and durable requests."""
    return await _at_steps(task, Line("F-03", "kill -9 gateway at each step"), "gateway", LIVE + DURABLE)


async def broker(task: Task) -> Line:
    """F-04: kill -9 of nats-server, which syncs before it acknowledges."""
    line = Line("F-04", "kill -9 nats-server (sync: always) at each step")
    return await _at_steps(task, line, "nats-server", (*LIVE, *DURABLE))


async def lazy_broker(task: Task) -> Line:
    """F-05: the same with nats-server's own interval of two minutes: holds for kill -9, and for nothing worse."""
    line = Line("F-05", "kill -9 nats-server (sync: 2 min) at each step")
    return await _at_steps(task, line, "nats-server", LIVE, syncs="")


async def everything(task: Task) -> Line:
    """F-06: kill -9 of all processes at once."""
    line = Line("F-06", "kill -9 of everything at once", seed=task.seed)
    async with scene(task, line) as on:
        assert on.live is not None
        on.live.comes_again = True  # a gateway that is back before the workers asks for that
        for _ in range(task.times(10)):
            await on.cluster.whole()
            await asyncio.sleep(on.draw.uniform(0.2, 0.8))
            moment_s = time.monotonic()
            await on.kill(list(on.cluster.members))
            line.faults["all"] += 1
            await on.recovered(moment_s)
    line.notes.append(f"{on.live.put_off} live requests were told to come again, and did")
    return line


async def _at_steps(task: Task, line: Line, role: str, steps: tuple[str, ...], **shape: object) -> Line:
    line.seed = task.seed
    async with scene(task, line, task.shape(**shape)) as on:
        for step in steps:
            for _ in range(task.times(_COUNT)):
                delay_ms = _EXECUTING_MS if step == "executing" and role == "worker" else 0.0
                await on.at_step(role, step, delay_ms)
            on.note_progress(f"{step}: {line.faults.total()} kills, {on.live.answers if on.live else 0} answers")
    line.notes.append(f"slowest {max(line.waits_s, default=0):.2f} s")
    return line
