"""F-31: links between processes of the host are cut, interrupted in a frame, blocked, stopped, or of another version."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from functools import partial
from pathlib import Path

from tests.faults.cases.mix import BUSY
from tests.faults.loads.sequences import SequenceLoad
from tests.faults.loads.streams import StreamLoad
from tests.faults.models import COUNTED, DIGEST, TOTAL, write_models
from tests.faults.pause_points import LINK_FORM_VARIABLE
from tests.faults.report import FaultReport
from tests.faults.scene import Scene, Task, scene

_STEPS = {"scheduler": ("batched", "ended"), "worker": ("executing", "answered"), "gateway": ("delivered",)}
_ACTIONS = ("cut", "halve")
_STOPPED_S = 1.0
"""Longer than a worker waits for a caller that reads nothing."""

_STEP_S = 20.0
_ENDED_S = 40.0


async def links(task: Task) -> FaultReport:
    """F-31: links are cut, end within a frame, are full, lead to a stopped process or to one of another version."""
    line = FaultReport("F-31", "links cut, ended in a frame, full, stopped, of another version", seed=task.seed)
    models = partial(write_models, names=(DIGEST, TOTAL, COUNTED))
    async with scene(task, line, models=models, allowed=BUSY) as on:
        http = [on.cluster.http(number) for number in range(task.gateways)]
        grpc = [on.cluster.grpc(number) for number in range(task.gateways)]
        sequences, streams = SequenceLoad(task.seed, http, 3), StreamLoad(task.seed, grpc)
        sequences.start()
        streams.start()
        for _ in range(task.times(3)):
            for role, steps in _STEPS.items():
                for step in steps:
                    for action in _ACTIONS:
                        await _order(on, role, step, action)
                on.note_progress(f"links of the {role}: {line.faults.total()} faults")
            for role in _STEPS:
                await _block(on, role)
        on.note_progress(f"full links: {line.faults.total()} faults")
        full = sum(on.cluster.log(worker.name).count("has read nothing") for worker in on.cluster.of("worker"))
        line.expect(full > 0, "no worker has closed a full link to a stopped gateway")
        await _other_version(on)
        line.add(await sequences.end())
        line.add(await streams.end(), allowed=BUSY)
        ended, anew = sequences.ended, sequences.begun_anew
        line.notes.append(f"sequences ended {ended}, ended with an error and begun anew {anew}")
        line.notes.append(
            f"streams whole {streams.whole}, ended with the error that their rest was lost {streams.interrupted}"
        )
        line.expect(streams.whole > 0 and ended > 0, "no stream, or no sequence, came to its end")
    return line


async def _order(on: Scene, role: str, step: str, action: str) -> None:
    """Has a process of this role do something to its links at this step."""
    cluster = on.cluster
    await cluster.whole()
    member = await on.busy(role)
    passages = on.draw.randint(1, 4)
    await cluster.until(lambda: cluster.steps.order(member.pid, step, action, passages), 5, "an order is taken")
    if await cluster.steps.told_any([member.pid], step, _STEP_S) is None:
        on.line.failures.append(f"no request came to {step}")
        return
    on.line.faults[f"{action} {role} at {step}"] += 1
    await on.recovered(time.monotonic())


async def _block(on: Scene, role: str) -> None:
    """Stops a process for a while, and has the others fill their links to it."""
    cluster = on.cluster
    await cluster.whole()
    member = await on.busy(role)
    cluster.kill(member.name, signal.SIGSTOP)
    for other in [each for name in _STEPS if name != role for each in cluster.of(name)]:
        cluster.steps.order(other.pid, "links", "fill")
    on.line.faults[f"full links to a stopped {role}"] += 1
    await asyncio.sleep(_STOPPED_S)
    cluster.kill(member.name, signal.SIGCONT)
    await on.recovered(time.monotonic())


async def _other_version(on: Scene) -> None:
    """Restarts a worker with another version of the frames, under load, and then with the usual one."""
    cluster, environment = on.cluster, on.cluster.shape.environment
    for form in ("2", ""):
        await cluster.whole()
        member = cluster.of("worker")[0]
        environment[member.name] = {LINK_FORM_VARIABLE: form} if form else {}
        process = member.process
        with contextlib.suppress(ProcessLookupError):
            cluster.kill(member.name, signal.SIGTERM)
        await cluster.until(lambda: process is None or process.poll() is not None, _ENDED_S, "the worker has ended")  # noqa: B023
        on.line.faults["worker of another version" if form else "worker of the same version"] += 1
        await cluster.whole()
        await on.recovered(time.monotonic())
        count = _sockets_of_links(member.pid)
        # The listening socket, and one for each link.
        on.line.expect((count == 1) == bool(form), f"a worker with version {form or 'as usual'}: {count} sockets")


def _sockets_of_links(pid: int) -> int:
    """How many sockets of the folder of links this process has."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "/weir-links-" in line]
    known = {f"socket:[{fields[6]}]" for fields in lines}
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(descriptor.readlink()) in known
    return count
