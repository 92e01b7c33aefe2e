"""What `weir status` does: connects, looks once or again and again, and shows what it has seen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.errors import Error as NatsError
from rich.live import Live

from bus.identity import new_id
from weir.named_broker import NamedBroker, out_of_groups
from weir.status.collector import Collector
from weir.status.display import own_console, print_status, rendered
from weir.status.snapshot import ClusterStatus
from weir.status.summary import summarise

HEALTHY, DEGRADED, UNREACHABLE = 0, 1, 2
"""Exit statuses."""

_CONNECT_TIMEOUT_S = 3.0
_AGAIN_S = 0.4
_UNSURE = frozenset({"queue without owner", "queue with two owners"})
"""What may be so for a moment, while queues are handed over: looked at twice."""


def show(broker: NamedBroker, as_json: bool, shows_all: bool) -> int:
    """Looks once; returns the exit status."""
    _be_quiet()
    status = asyncio.run(look_once(broker))
    if as_json:
        print(status.model_dump_json(indent=2))
    else:
        print_status(status, shows_all=shows_all)
    return exit_status(status)


def watch(broker: NamedBroker, every_s: float, as_json: bool, shows_all: bool) -> int:
    """Looks again and again until it is interrupted; returns the exit status of what it saw last.

    With `as_json` it prints one object a line.
    """
    _be_quiet()
    last: list[ClusterStatus] = []
    try:
        asyncio.run(_go_on(broker, every_s, as_json, shows_all, last))
    except KeyboardInterrupt:
        pass
    return exit_status(last[-1]) if last else UNREACHABLE


def exit_status(status: ClusterStatus) -> int:
    """The exit status that says how the cluster is."""
    return {"healthy": HEALTHY, "degraded": DEGRADED, "unreachable": UNREACHABLE}[status.state]


async def look_once(broker: NamedBroker) -> ClusterStatus:
    """What is seen in one look, or in two where the first saw what may pass in a moment."""
    try:
        async with _collector(broker) as collector:
            status = summarise(await collector.look())
            if any(problem.kind in _UNSURE for problem in status.problems):
                await asyncio.sleep(_AGAIN_S)
                status = summarise(await collector.look())
            return status
    except (NatsError, OSError, TimeoutError) as error:
        return unreachable(error)


async def _go_on(
    broker: NamedBroker, every_s: float, as_json: bool, shows_all: bool, last: list[ClusterStatus]
) -> None:
    console = own_console()
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal and not as_json else None

    def tell(status: ClusterStatus) -> None:
        last[:] = [status]
        if as_json:
            print(status.model_dump_json(), flush=True)
        elif live is not None:
            live.update(rendered(status, shows_all), refresh=True)
        else:
            print_status(status, console, shows_all)
            console.print()

    if live is not None:
        live.start()
    try:
        while True:
            await _tell_until_lost(broker, every_s, tell)
            await asyncio.sleep(every_s)
    finally:
        if live is not None:
            live.stop()


async def _tell_until_lost(broker: NamedBroker, every_s: float, tell: Callable[[ClusterStatus], None]) -> None:
    try:
        async with _collector(broker) as collector:
            while True:
                began_s = time.monotonic()
                tell(summarise(await collector.look()))
                await asyncio.sleep(max(0.0, began_s + every_s - time.monotonic()))
    except (NatsError, OSError, TimeoutError) as error:
        tell(unreachable(error))


def unreachable(error: Exception) -> ClusterStatus:
    """What is told where nobody answers."""
    text = str(error) or f"JetStream does not answer ({type(error).__name__})"
    now_ms = time.time_ns() // 1_000_000
    return ClusterStatus(taken_ms=now_ms, state="unreachable", error=text)


@asynccontextmanager
async def _collector(broker: NamedBroker) -> AsyncIterator[Collector]:
    with out_of_groups(NatsError, OSError, TimeoutError):
        name = new_id("status")
        async with asyncio.TaskGroup() as background, broker.connected(name, _CONNECT_TIMEOUT_S) as bus:
            collector = Collector(bus, name, broker.url)
            await collector.start(background)
            yield collector


def _be_quiet() -> None:
    # What roles log of their connection would stand between the lines.
    logging.getLogger("weir").addHandler(logging.NullHandler())
    logging.getLogger("weir").propagate = False
