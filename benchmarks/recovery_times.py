"""Recovery time after a process is killed: `python -m benchmarks.recovery_times` prints a table.

Roles are separate processes on one nats-server under a light load: requests at a fixed rate, independent of earlier
ones, to several models, through both gateways in turn. A client whose gateway has died sends to the other one. One
process after another is killed with kill -9 at a random time. It is restarted at once if it was the only one of its
role (as `weir serve` and Kubernetes do), else after the measurement.

- back after: from the kill until each model has answered a request that was sent after it;
- longest gap: the longest time after the kill in which no model answered;
- slowest: the longest latency of requests that were in flight at the kill or sent within --settle seconds after it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.cluster.clients import OpenLoop, Request, quantile, table, wait_ready
from benchmarks.cluster.roles import Cluster, write_sleeper

NATS = "nats-server"
ROLES = ("gateway", "scheduler", "worker", NATS)
_BACK_WITHIN_S = 60.0
_POLL_S = 0.02


@dataclass
class Measured:
    """Of one role: seconds, one number for each kill; and requests that ended with an error."""

    back_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    slowest_s: list[float] = field(default_factory=list)
    errors: int = 0
    never: int = 0

    def row(self, role: str) -> tuple[object, ...]:
        """Of the table."""
        figures = []
        for values in (self.back_s, self.gap_s, self.slowest_s):
            ordered = sorted(values)
            figures += [f"{quantile(ordered, 0.5):.2f}", f"{max(ordered, default=0.0):.2f}"]
        return (role, len(self.back_s) + self.never, *figures, self.errors, self.never)


async def measure(cluster: Cluster, options: argparse.Namespace, models: Sequence[str]) -> dict[str, Measured]:
    """Kills each of the roles so often, under load all the time."""
    draw = random.Random(options.seed)
    await wait_ready(cluster.places, models)
    load = OpenLoop(cluster.places, models, options.rate, patience_s=_BACK_WITHIN_S)
    sending = asyncio.create_task(load.run())
    measured = {role: Measured() for role in options.roles.split(",")}
    try:
        await asyncio.sleep(options.settle)
        # In turn, so that no role has a better time than others.
        for number in range(options.kills):
            for role, reply in measured.items():
                await asyncio.sleep(draw.uniform(0.0, 1.0))
                await _kill(cluster, role, number, load, reply, models, options.settle)
    finally:
        load.stop()
        await sending
    return measured


async def _kill(
    cluster: Cluster, role: str, number: int, load: OpenLoop, reply: Measured, models: Sequence[str], settle_s: float
) -> None:
    requests = load.account.requests
    first = len(requests)
    moment_s = time.monotonic()
    if role == NATS:
        assert cluster.nats.process is not None
        cluster.nats.process.kill()
        await asyncio.to_thread(cluster.nats.process.wait)
        await asyncio.to_thread(cluster.nats.start)
        restarted = None
    else:
        of_role = cluster.roles[role]
        restarted = of_role[number % len(of_role)]
        await asyncio.to_thread(restarted.kill)
        if len(of_role) == 1:
            restarted.start()
    back_s = await _back_s(requests, first, moment_s, models)
    if back_s is None:
        reply.never += 1
    else:
        reply.back_s.append(back_s)
    # What hangs longer than the first answers takes is part of it too.
    await asyncio.sleep(max(0.0, moment_s + settle_s - time.monotonic()))
    until_s = moment_s + settle_s
    await _wait_for(lambda: all(r.is_over for r in requests if r.due_s < until_s))
    since = [request for request in requests if request.answered_s > moment_s or request.due_s > moment_s]
    answers = [moment_s, *sorted(r.answered_s for r in since if moment_s < r.answered_s < until_s + (back_s or 0.0))]
    reply.gap_s.append(max((later - earlier for earlier, later in pairwise(answers)), default=0.0))
    reply.slowest_s.append(
        max((r.answered_s - r.due_s for r in since if r.answered_s and r.due_s < until_s), default=0.0)
    )
    reply.errors += sum(
        r.is_over and not r.answered_s for r in requests[max(0, first - 100) :] if moment_s - 1 < r.due_s < until_s
    )
    if restarted is not None:
        if not restarted.is_running:
            restarted.start()
        await asyncio.to_thread(restarted.wait_ready)
    await wait_ready(cluster.places, models)
    await asyncio.sleep(settle_s / 2)


async def _back_s(requests: list[Request], first: int, moment_s: float, models: Sequence[str]) -> float | None:
    """Seconds from the kill until each model has answered a request that was due after it."""

    def answered(model: str) -> float:
        times = (r.answered_s for r in requests[first:] if r.model == model and r.answered_s and r.due_s > moment_s)
        return min(times, default=0.0)

    is_back = await _wait_for(lambda: all(answered(model) for model in models))
    return max(answered(model) for model in models) - moment_s if is_back else None


async def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + _BACK_WITHIN_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    parser.add_argument("--roles", default=",".join(ROLES), help="which are killed, separated by commas")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--schedulers", type=int, default=2, help="1 where schedulers don't share queues")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--ms", type=float, default=5.0, help="what a request takes")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, of all models")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds that are looked at after a kill")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    options = parser.parse_args()
    models = [f"m{number}" for number in range(options.models)]
    with tempfile.TemporaryDirectory(prefix="recovery-times-") as folder:
        for model in models:
            write_sleeper(Path(folder) / "models", model, options.ms)
        cluster = Cluster(Path(folder), options.gateways, options.schedulers, options.workers)
        try:
            measured = asyncio.run(measure(cluster, options, models))
        finally:
            cluster.close()
    print(
        f"{options.gateways} gateways, {options.schedulers} schedulers, {options.workers} workers, {len(models)} models, "
        f"{options.rate:g} requests/s; seconds"
    )
    head = ("killed", "times", "back p50", "max", "gap p50", "max", "slowest p50", "max", "errors", "never back")
    print(table(head, [reply.row(role) for role, reply in measured.items()]))


if __name__ == "__main__":
    main()
