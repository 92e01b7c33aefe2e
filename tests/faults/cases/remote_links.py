"""F-32: links between hosts are cut, interrupted in a frame, blocked, stopped, or of the next version."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

from tests.faults.cases.mix import BUSY
from tests.faults.loads.large import LARGE, LargeLoad
from tests.faults.pause_points import LINK_FORM_VARIABLE
from tests.faults.report import FaultReport
from tests.faults.scene import Scene, Task, scene
from tests.support.models.zoo import write_identity
from weir.bus.naming.identity import HOST_VARIABLE

_STEPS = {"worker": ("executing", "answered"), "gateway": ("published", "delivered")}
_ACTIONS = ("cut", "halve")
_STOPPED_S = 2.5
"""Longer than a reader waits for bytes of pieces that it has requested."""

_WAIT_S = 40.0


async def remote_links(task: Task) -> FaultReport:
    """F-32: links between hosts are cut, end within a frame, are full, lead to a stopped process or the next version."""
    line = FaultReport("F-32", "links between hosts cut, ended in a frame, full, stopped, next version", seed=task.seed)
    listens = ("--payload-listen=127.0.0.1",)
    shape = task.shape(options={"gateway": listens, "worker": listens})
    shape.environment.update({name: {HOST_VARIABLE: "another"} for name in shape.names("worker")})
    async with scene(task, line, shape, clients=0, rate=0, models=_write_model) as on:
        addresses = [on.cluster.http(number) for number in range(task.gateways)]
        on.live = load = LargeLoad(task.folder / "large", task.seed, addresses, clients=4)
        load.start()
        await load.answered_after(time.monotonic())
        for _ in range(task.times(2)):
            await _fetched_more(on)
            for role, steps in _STEPS.items():
                for step in steps:
                    for action in _ACTIONS:
                        await _order(on, role, step, action)
                await _stop(on, role)
                on.note_progress(f"links of the {role}: {line.faults.total()} faults")
        await _next_version(on)
        on.live = None
        line.add(await load.end(), allowed=BUSY)
        line.notes.append(f"bytes fetched {_fetched(on)}")
    return line


def _write_model(repository: Path) -> None:
    write_identity(repository, LARGE, "FP32")


async def _order(on: Scene, role: str, step: str, action: str) -> None:
    """Has a process of this role do something to its links at this step, while links carry payloads."""
    cluster = on.cluster
    await cluster.whole()
    await _fetched_more(on)
    member = on.draw.choice(cluster.of(role))
    passages = on.draw.randint(1, 4)
    await cluster.until(lambda: cluster.steps.order(member.pid, step, action, passages), 5, "an order is taken")
    if await cluster.steps.told_any([member.pid], step, _WAIT_S) is None:
        on.line.failures.append(f"no request came to {step}")
        return
    on.line.faults[f"{action} {role} at {step}"] += 1
    await on.recovered(time.monotonic())


async def _stop(on: Scene, role: str) -> None:
    """Stops a process for a while; the others fill their links to it, and requests of theirs wait for it."""
    cluster = on.cluster
    await cluster.whole()
    await _fetched_more(on)
    member = on.draw.choice(cluster.of(role))
    cluster.kill(member.name, signal.SIGSTOP)
    for other in [each for name in _STEPS if name != role for each in cluster.of(name)]:
        cluster.steps.order(other.pid, "links", "fill")
    on.line.faults[f"full links to a stopped {role}"] += 1
    await asyncio.sleep(_STOPPED_S)
    cluster.kill(member.name, signal.SIGCONT)
    await on.recovered(time.monotonic())


async def _next_version(on: Scene) -> None:
    """Restarts the workers with the next version of links, under load, and then with the usual one."""
    cluster, environment = on.cluster, on.cluster.shape.environment
    for form in ("2", ""):
        for member in cluster.of("worker"):
            await cluster.whole()
            environment[member.name] = {HOST_VARIABLE: "another", **({LINK_FORM_VARIABLE: form} if form else {})}
            process = member.process
            with contextlib.suppress(ProcessLookupError):
                cluster.kill(member.name, signal.SIGTERM)
            await cluster.until(lambda: process is None or process.poll() is not None, _WAIT_S, "the worker has ended")  # noqa: B023
        on.line.faults["workers of the next version" if form else "workers of the same version"] += 1
        await cluster.whole()
        await _fetched_more(on)


async def _fetched_more(on: Scene) -> None:
    """Returns when further payloads were fetched."""
    before = await asyncio.to_thread(_fetched, on)
    deadline_s = time.monotonic() + _WAIT_S
    while await asyncio.to_thread(_fetched, on) <= before:
        if time.monotonic() > deadline_s:
            on.line.failures.append(f"nothing was fetched within {_WAIT_S:.0f} s")
            return
        await asyncio.sleep(0.1)


def _fetched(on: Scene) -> int:
    """Bytes that gateways have fetched."""
    return on.counter('weir_gateway_payload_fetched_bytes{way="tcp"}')
