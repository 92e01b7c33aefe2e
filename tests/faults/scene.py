"""`Scene`: a cluster under load, in which one fault after the other happens; and what is said of it in the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.cluster import Cluster, Member, Shape, running
from tests.faults.loads.durable import DurableLoad
from tests.faults.loads.live import LiveLoad
from tests.faults.models import write_models
from tests.faults.report import FaultReport
from weir.options.api_key import authorization

_STEP_S = 20.0
"""A step that no request comes to within this time is not reached."""

_STOPPED_S = 0.03
_BUSY = {"scheduler": "batched", "worker": "executing"}
"""The step at which requests show who of a role has them."""


@dataclass(kw_only=True)
class Task:
    """What was asked of a fault: its seed, how often (None: as often as it does by itself), how many of each role, and
    the access policy of the gateways (None: none)."""

    seed: int
    folder: Path
    count: int | None = None
    schedulers: int = 1
    workers: int = 1
    gateways: int = 1
    policy: Path | None = None
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def times(self, usual: int) -> int:
        """How often something is done."""
        return usual if self.count is None else self.count

    def shape(self, **more: object) -> Shape:
        """The cluster that was asked for, with more said of it."""
        counts = {"schedulers": self.schedulers, "workers": self.workers, "gateways": self.gateways}
        return Shape(**{**counts, "policy": self.policy, **more})  # type: ignore[arg-type]


class Scene:
    """A cluster under load, in which one fault after another is injected."""

    def __init__(
        self, task: Task, line: FaultReport, cluster: Cluster, live: LiveLoad | None, durable: DurableLoad | None
    ):
        self.task = task
        self.line = line
        self.cluster = cluster
        self.live = live
        self.durable = durable
        self.draw = task.draw
        self.others = 0
        """Durable requests that somebody else than the durable load has sent."""

    async def at_step(self, victim_role: str, step: str, delay_ms: float = 0.0) -> None:
        """Kills a process of this role while a request is at this step; then waits until requests are answered again."""
        cluster, line = self.cluster, self.line
        await cluster.whole()
        victim = await self.busy(victim_role)
        process = victim.process
        role = cluster.steps.role_of(step)
        others = [victim] if role == victim_role else cluster.of(role)
        action = "kill" if role == victim_role else "stop"
        passages = self.draw.randint(1, 4)
        asked = {member.pid: member for member in others}
        for pid in asked:
            await cluster.until(
                lambda pid=pid: cluster.steps.order(pid, step, action, passages, delay_ms), 5, "an order is taken"
            )
        at = await cluster.steps.told_any(list(asked), step, _STEP_S)
        if at is None:
            line.failures.append(f"no request came to {step}")
            return
        moment_s = time.monotonic()
        if action == "stop":
            cluster.kill(victim.name)
            for pid in asked:
                cluster.steps.order(pid, step, "none")
            for _ in range(2):  # another may have come there before it heard that it need not stop
                await asyncio.sleep(_STOPPED_S)
                await self.kill([member.name for member in asked.values()], signal.SIGCONT)
        line.faults[f"{victim_role} at {step}"] += 1
        # Where it is still dying, the next kill would find all there, and take the other one away as well.
        await cluster.until(lambda: process is None or process.poll() is not None, 10, f"{victim.name} has ended")
        await self.recovered(moment_s)

    async def busy(self, role: str) -> Member:
        """One of this role that has requests just now: of schedulers, who owns the model."""
        cluster, step = self.cluster, _BUSY.get(role, "")
        members = cluster.of(role)
        if not step or len(members) == 1:
            return self.draw.choice(members)
        for member in members:
            await cluster.until(lambda pid=member.pid: cluster.steps.order(pid, step, "tell"), 5, "an order is taken")
        at = await cluster.steps.told_any([member.pid for member in members], step, _STEP_S)
        for member in members:
            cluster.steps.order(member.pid, step, "none")
        return next((member for member in members if member.pid == at), members[0])

    async def recovered(self, moment_s: float) -> None:
        """Waits until a request that was sent after this moment is answered, and notes how long that took."""
        if self.live is not None:
            self.line.recoveries_s.append(await self.live.answered_after(moment_s))

    async def kill(self, names: Sequence[str], number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to these processes at once."""
        for name in names:
            self.cluster.kill(name, number)

    def counter(self, name: str) -> int:
        """The sum of a counter in the gateways' metrics."""
        total = 0.0
        for number in range(self.cluster.shape.gateways):
            asked = urllib.request.Request(self.cluster.metrics(number), headers=authorization(""))
            with urllib.request.urlopen(asked, timeout=5) as answer:
                text = answer.read().decode()
            total += sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)", text, re.MULTILINE))
        return int(total)

    def refused_batches(self) -> int:
        """Batches that workers did not take of schedulers whose queue is another's by now."""
        workers = self.cluster.of("worker")
        return sum(self.cluster.log(worker.name).count("was refused: another scheduler owns") for worker in workers)

    def note_progress(self, text: str) -> None:
        """Says on standard error how far it is."""
        print(f"{self.line.id}: {text}", file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def scene(
    task: Task,
    line: FaultReport,
    shape: Shape | None = None,
    *,
    clients: int = 8,
    rate: float = 40.0,
    allowed: str = "",
    models: Callable[[Path], None] | None = None,
) -> AsyncIterator[Scene]:
    """A cluster with live load (none for 0 clients) and durable load (none for rate 0).

    In the end all of it is checked, and stands in the line; `allowed` is a pattern of errors that clients may see.
    """
    repository = task.folder / "models"
    if models is None:
        write_models(repository)
    else:
        models(repository)
    shape = shape or task.shape()
    async with running(task.folder, repository, shape) as cluster:
        addresses = [cluster.http(number) for number in range(shape.gateways)]
        live = LiveLoad(task.folder / "live", task.seed, addresses, clients) if clients else None
        durable = DurableLoad(task.folder, task.seed, cluster.nats_url, rate) if rate else None
        on = Scene(task, line, cluster, live, durable)
        if durable is not None:
            await durable.start()
        if live is not None:
            live.start()
            await live.answered_after(time.monotonic())
        yield on
        if live is not None:
            line.add(await live.end(), allowed)
        if durable is not None:
            line.add(await durable.end(on.others), allowed)
            line.notes.append(durable.note())
        line.rss(cluster.worst_rss_bytes())


Fault = Callable[[Task], Awaitable[FaultReport]]
"""Tries one fault."""
