"""Killed and suspended processes: F-01 to F-06 at every step of a request, F-07 to F-09."""

from __future__ import annotations

import asyncio
import signal
import time

from tests.faults.report import FaultReport
from tests.faults.scene import Task, scene
from tests.faults.steps import DURABLE, LIVE

_COUNT = 5
_EXECUTING_MS = 2.0
"""Delay of the kill after the model was called, so that the worker dies during the execution."""


async def worker(task: Task) -> FaultReport:
    """F-01: kill -9 of the worker at each of the eight steps."""
    return await _at_steps(task, FaultReport("F-01", "kill -9 worker at each step"), "worker", LIVE)


async def scheduler(task: Task) -> FaultReport:
    """F-02: kill -9 of the scheduler at each step."""
    line = FaultReport("F-02", "kill -9 scheduler at each step")
    return await _at_steps(task, line, "scheduler", LIVE)


async def gateway(task: Task) -> FaultReport:
    """F-03: kill -9 of the gateway while clients wait, at each step of live and durable requests."""
    return await _at_steps(task, FaultReport("F-03", "kill -9 gateway at each step"), "gateway", LIVE + DURABLE)


async def broker(task: Task) -> FaultReport:
    """F-04: kill -9 of nats-server, which syncs before it acknowledges."""
    line = FaultReport("F-04", "kill -9 nats-server (sync: always) at each step")
    return await _at_steps(task, line, "nats-server", (*LIVE, *DURABLE))


async def lazy_broker(task: Task) -> FaultReport:
    """F-05: the same with nats-server's default sync interval of two minutes, which suffices for kill -9 only."""
    line = FaultReport("F-05", "kill -9 nats-server (sync: 2 min) at each step")
    return await _at_steps(task, line, "nats-server", LIVE, syncs="")


async def everything(task: Task) -> FaultReport:
    """F-06: kill -9 of all processes at once."""
    line = FaultReport("F-06", "kill -9 of everything at once", seed=task.seed)
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


async def _at_steps(task: Task, line: FaultReport, role: str, steps: tuple[str, ...], **shape: object) -> FaultReport:
    line.seed = task.seed
    async with scene(task, line, task.shape(**shape)) as on:
        for step in steps:
            for _ in range(task.times(_COUNT)):
                delay_ms = _EXECUTING_MS if step == "executing" and role == "worker" else 0.0
                await on.at_step(role, step, delay_ms)
            on.note_progress(f"{step}: {line.faults.total()} kills, {on.live.answers if on.live else 0} answers")
    line.notes.append(f"slowest {max(line.waits_s, default=0):.2f} s")
    return line


_ROLES = ("worker", "scheduler", "gateway")
_ZOMBIE_S = 8.0
"""Longer than the 5 s after which a silent worker is considered dead."""

_PAUSE_S = 8.0
_AFTER_S = 1.0
"""Time for a resumed process to do what it was about to do."""


async def rolling_restart(task: Task) -> FaultReport:
    """F-07: SIGTERM to one of two processes of each role in turn; no client sees an error."""
    line = FaultReport("F-07", "SIGTERM of each role in turn", seed=task.seed)
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


async def zombie_worker(task: Task) -> FaultReport:
    """F-08: a worker is suspended during a batch, considered dead, and resumes with its responses."""
    line = FaultReport("F-08", f"SIGSTOP of a worker for {_ZOMBIE_S:.0f} s in the midst of a batch", seed=task.seed)
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
        dropped = on.counter("weir_gateway_duplicate_responses")
        line.notes.append(f"second answers that gateways dropped {dropped}")
        # Who was stopped between two answers, or in a batch, has answers that somebody else has given meanwhile.
        line.expect(dropped > 0 or not line.faults, "no late answer came, so none was dropped")
    return line


async def pauses(task: Task) -> FaultReport:
    """F-09: scheduler, gateway and nats-server are suspended for a while; the cluster recovers without intervention."""
    line = FaultReport("F-09", f"SIGSTOP of scheduler, gateway, nats-server for {_PAUSE_S:.0f} s", seed=task.seed)
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
