"""Processes that end in order, and such that stand still for a while: F-07 to F-09."""

from __future__ import annotations

import asyncio
import signal
import time

from benchmarks.faults.line import Line
from benchmarks.faults.scene import Task, scene

_ROLES = ("worker", "scheduler", "gateway")
_ZOMBIE_S = 8.0
"""Longer than the 5 s of silence after which a worker is given up."""

_PAUSE_S = 8.0
_AFTER_S = 1.0
"""Long enough for who was stopped to do what it was about to."""


async def rolling_restart(task: Task) -> Line:
    """F-07: SIGTERM to one process of each role after the other, two of each being there; no client sees an error."""
    line = Line("F-07", "SIGTERM of each role in turn", seed=task.seed)
    shape = task.shape(workers=max(2, task.workers), gateways=max(2, task.gateways))
    async with scene(task, line, shape) as on:
        for _ in range(task.times(2)):
            for role in _ROLES:
                for member in on.cluster.of(role):
                    await on.cluster.whole()
                    moment_s, process = time.monotonic(), member.process
                    on.cluster.kill(member.name, signal.SIGTERM)
                    line.faults[f"end {role}"] += 1
                    await on.cluster.until(lambda p=process: p.poll() is not None, 40, f"{member.name} ends")
                    line.expect(process is not None and process.returncode == 0, f"{member.name} did not end well")
                    await on.recovered(moment_s)
                    await asyncio.sleep(0.3)
    return line


async def zombie_worker(task: Task) -> Line:
    """F-08: a worker is stopped in the midst of a batch, is given up, and comes back with its answers."""
    line = Line("F-08", f"SIGSTOP of a worker for {_ZOMBIE_S:.0f} s in the midst of a batch", seed=task.seed)
    async with scene(task, line, task.shape(workers=max(2, task.workers))) as on:
        for number in range(task.times(4)):
            await on.cluster.whole()
            worker = await on.busy("worker")
            step = ("executing", "answered")[number % 2]
            await on.cluster.until(
                lambda w=worker, s=step: on.cluster.steps.order(w.pid, s, "stop"), 5, "an order is taken"
            )
            if await on.cluster.steps.told_any([worker.pid], step, 20) is None:
                line.failures.append(f"no request came to {step}")
                continue
            moment_s = time.monotonic()
            line.faults[f"stop worker at {step}"] += 1
            await on.recovered(moment_s)
            await asyncio.sleep(max(0.0, _ZOMBIE_S - (time.monotonic() - moment_s)))
            on.cluster.kill(worker.name, signal.SIGCONT)
            await asyncio.sleep(0.5)
        dropped = on.counter("weir_gateway_duplicate_answers")
        line.notes.append(f"second answers that gateways dropped {dropped}")
        # Who was stopped between two answers, or in a batch, has answers that somebody else has given meanwhile.
        line.expect(dropped > 0 or not line.faults, "no late answer came, so none was dropped")
    return line


async def pauses(task: Task) -> Line:
    """F-09: scheduler, gateway and nats-server stand still for a while; what follows needs nobody's hand."""
    line = Line("F-09", f"SIGSTOP of scheduler, gateway, nats-server for {_PAUSE_S:.0f} s", seed=task.seed)
    async with scene(task, line) as on:
        for _ in range(task.times(1)):
            for role in ("scheduler", "gateway", "nats-server"):
                await on.cluster.whole()
                name = (await on.busy(role)).name
                moment_s = time.monotonic()
                on.cluster.kill(name, signal.SIGSTOP)
                line.faults[f"stop {role}"] += 1
                others = len(on.cluster.of(role)) > 1
                if others:  # they go on without it
                    await on.recovered(moment_s)
                await asyncio.sleep(max(0.0, _PAUSE_S - (time.monotonic() - moment_s)))
                on.cluster.kill(name, signal.SIGCONT)
                if not others:
                    await on.recovered(time.monotonic())
                await asyncio.sleep(_AFTER_S)
        if task.schedulers > 1:
            line.notes.append(f"batches of owners before that workers refused {on.refused_batches()}")
    return line
