"""Faults of the network between hosts: F-21 and F-22."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from tests.faults.hosts import Hosts, hosts, missing
from tests.faults.report import FaultReport, Skipped
from tests.faults.scene import Scene, Task, scene

_LASTS_S = 4.0
_LONGER_S = 12.0
"""Longer than the time-outs for a silent worker and for its frames."""

_LATE_S = 8.0
"""Longer than the time-out for a silent worker (5 s), shorter than that for nats-server (two pongs, 10 s)."""

_CUT_S = 0.05
"""Time for frames in flight to arrive after the network is cut."""

_FLAPS = 6
_FLAP_S = 0.4

_DROPPED = "weir_gateway_duplicate_responses"

Case = Callable[[Hosts], Awaitable[None]]


async def network(task: Task) -> FaultReport:
    """F-21: partitions, one-way ones, loss, delay and flapping between gateway, worker, scheduler and nats-server."""
    line = FaultReport(
        "F-21", "network between four hosts: cut, one way, 10 % loss, 500 ms late, flapping", seed=task.seed
    )
    async with _apart(task, line) as (on, net):
        for name, case in _cases().items():
            for _ in range(task.times(1)):
                before = len(line.recoveries_s)
                await case(net)
                line.faults[name] += 1
                await on.recovered(time.monotonic())
                line.notes.append(f"{name}: recovery {line.recoveries_s[before]:.2f} s")
                on.note_progress(name)
    return line


async def long_partition(task: Task) -> FaultReport:
    """F-22: a worker is cut off, or heard too late, in the midst of a batch, until it is given up.

    Where it is cut off its connection ends, and what it had to say goes with that. What is only late does come, after
    another worker has answered: it is dropped.
    """
    line = FaultReport("F-22", f"a worker cut off for {_LONGER_S:.0f} s, or heard {_LATE_S:.0f} s late", seed=task.seed)
    async with _apart(task, line, workers=max(2, task.workers)) as (on, net):
        for _ in range(task.times(2)):
            await _in_the_midst(on, net, "cut off")
            dropped = on.counter(_DROPPED)
            await _in_the_midst(on, net, "heard late")
            line.expect(on.counter(_DROPPED) > dropped, "no late answer came, so none was dropped")
        line.notes.append(f"second answers dropped {on.counter(_DROPPED)}")
    return line


async def _in_the_midst(on: Scene, net: Hosts, what: str) -> None:
    """Duration of a batch that the worker completes while it is cut off."""
    await on.cluster.whole()
    worker = await on.busy("worker")
    pid = worker.pid
    await on.cluster.until(lambda: on.cluster.steps.order(pid, "executing", "stop"), 5, "an order is taken")
    if await on.cluster.steps.told_any([pid], "executing", 20) is None:
        on.line.failures.append("no request came to executing")
        return
    moment_s = time.monotonic()
    if what == "cut off":
        net.cut(worker.name, "nats")
    else:
        net.link(worker.name, "nats", 0.0, _LATE_S)
    await asyncio.sleep(_CUT_S)
    on.cluster.kill(worker.name, signal.SIGCONT)
    on.line.faults[what] += 1
    await on.recovered(moment_s)
    await asyncio.sleep(max(0.0, _LONGER_S - (time.monotonic() - moment_s)))
    net.cut(worker.name, "nats", 0.0)
    await asyncio.sleep(1.0)
    await on.recovered(time.monotonic())
    on.note_progress(what)


def _cases() -> dict[str, Case]:
    async def cut(net: Hosts, host: str) -> None:
        net.cut(host, "nats")
        await asyncio.sleep(_LASTS_S)
        net.cut(host, "nats", 0.0)

    async def one_way(net: Hosts, source: str, target: str) -> None:
        net.link(source, target, 1.0)
        await asyncio.sleep(_LASTS_S)
        net.link(source, target, 0.0)

    async def everywhere(net: Hosts, lost: float, delay_s: float) -> None:
        for host in ("gateway-0", "scheduler-0", "worker-0"):
            net.cut(host, "nats", lost, delay_s)
        await asyncio.sleep(_LASTS_S)
        for host in ("gateway-0", "scheduler-0", "worker-0"):
            net.cut(host, "nats", 0.0)

    async def flap(net: Hosts, host: str) -> None:
        for _ in range(_FLAPS):
            net.cut(host, "nats")
            await asyncio.sleep(_FLAP_S)
            net.cut(host, "nats", 0.0)
            await asyncio.sleep(_FLAP_S)

    return {
        "gateway cut off": lambda net: cut(net, "gateway-0"),
        "worker cut off": lambda net: cut(net, "worker-0"),
        "scheduler cut off": lambda net: cut(net, "scheduler-0"),
        "worker is not heard": lambda net: one_way(net, "worker-0", "nats"),
        "worker hears nothing": lambda net: one_way(net, "nats", "worker-0"),
        "10 % loss": lambda net: everywhere(net, 0.1, 0.0),
        "500 ms late": lambda net: everywhere(net, 0.0, 0.5),
        "worker flaps": lambda net: flap(net, "worker-0"),
        "gateway flaps": lambda net: flap(net, "gateway-0"),
    }


@contextlib.asynccontextmanager
async def _apart(task: Task, line: FaultReport, **counts: int) -> AsyncIterator[tuple[Scene, Hosts]]:
    """A cluster with each process on a host of its own; the clients run on the driver's host."""
    reason = missing()
    if reason:
        raise Skipped(reason)
    shape = task.shape(**counts)
    names = [name for role in ("scheduler", "worker", "gateway") for name in shape.names(role)]
    try:
        context = hosts(["nats", *names], task.seed)
        net = context.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skipped(f"hosts could not be made: {error}") from error
    try:
        prefixes = {name: net.prefix(name) for name in names} | {"nats-server-0": net.prefix("nats")}
        addresses = {name: net.address(name) for name in names} | {"nats-server-0": net.address("nats")}
        shape = replace(shape, prefixes=prefixes, addresses=addresses)
        async with scene(task, line, shape, clients=8, rate=30.0) as on:
            yield on, net
    finally:
        context.__exit__(None, None, None)
