"""`weir status`: connects to the broker, collects the state once or repeatedly, and prints it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from nats.errors import Error as NatsError
from rich.live import Live

from weir.bus.naming.identity import new_id
from weir.cluster.status.collector import Collector
from weir.cluster.status.snapshot import ClusterStatus
from weir.cluster.status.summary import summarise
from weir.commands.running_server import BrokerTarget, unwrap_exception_groups
from weir.commands.status.display import own_console, print_status, rendered

HEALTHY, DEGRADED, UNREACHABLE, DOWN = 0, 1, 2, 3
"""Exit statuses."""

_CONNECT_TIMEOUT_S = 3.0
_RECHECK_S = 0.4
_TRANSIENT = frozenset({"queue without owner", "queue with two owners"})
"""Problems that occur briefly while a queue changes owner; they are reported only if a second collection confirms them."""


def show(broker: BrokerTarget, as_json: bool, shows_all: bool) -> int:
    """Collect once and print; returns the exit status."""
    _silence_logs()
    status = asyncio.run(collect_status(broker))
    if as_json:
        print(status.model_dump_json(indent=2))
    else:
        print_status(status, shows_all=shows_all)
    return exit_status(status)


def watch(broker: BrokerTarget, every_s: float, as_json: bool, shows_all: bool) -> int:
    """Collect and print every `every_s` seconds until interrupted; returns the exit status of the last collection.

    With `as_json` each line is one JSON object.
    """
    _silence_logs()
    last: list[ClusterStatus] = []
    try:
        asyncio.run(_watch_loop(broker, every_s, as_json, shows_all, last))
    except KeyboardInterrupt:
        pass
    return exit_status(last[-1]) if last else UNREACHABLE


def exit_status(status: ClusterStatus) -> int:
    """The exit status for the state of the cluster."""
    return {"healthy": HEALTHY, "degraded": DEGRADED, "unreachable": UNREACHABLE, "down": DOWN}[status.state]


async def collect_status(broker: BrokerTarget) -> ClusterStatus:
    """Collect once, and a second time if the first collection found a problem that may be transient."""
    try:
        async with _collector(broker) as collector:
            status = summarise(await collector.collect(), broker.option)
            if any(problem.kind in _TRANSIENT for problem in status.problems):
                await asyncio.sleep(_RECHECK_S)
                status = summarise(await collector.collect(), broker.option)
            return status
    except (NatsError, OSError, TimeoutError) as error:
        return unreachable(error)


async def _watch_loop(
    broker: BrokerTarget, every_s: float, as_json: bool, shows_all: bool, last: list[ClusterStatus]
) -> None:
    console = own_console()
    live = Live(console=console, auto_refresh=False, screen=True) if console.is_terminal and not as_json else None

    def report(status: ClusterStatus) -> None:
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
            await _report_until_lost(broker, every_s, report)
            await asyncio.sleep(every_s)
    finally:
        if live is not None:
            live.stop()


async def _report_until_lost(broker: BrokerTarget, every_s: float, report: Callable[[ClusterStatus], None]) -> None:
    try:
        async with _collector(broker) as collector:
            while True:
                started_s = time.monotonic()
                report(summarise(await collector.collect(), broker.option))
                await asyncio.sleep(max(0.0, started_s + every_s - time.monotonic()))
    except (NatsError, OSError, TimeoutError) as error:
        report(unreachable(error))


def unreachable(error: Exception) -> ClusterStatus:
    """The status for a broker that does not reply."""
    text = str(error) or f"JetStream does not reply ({type(error).__name__})"
    now_ms = time.time_ns() // 1_000_000
    return ClusterStatus(taken_ms=now_ms, state="unreachable", error=text)


@asynccontextmanager
async def _collector(broker: BrokerTarget) -> AsyncIterator[Collector]:
    with unwrap_exception_groups(NatsError, OSError, TimeoutError):
        name = new_id("status")
        async with asyncio.TaskGroup() as background, broker.connected(name, _CONNECT_TIMEOUT_S) as bus:
            collector = Collector(bus, name, broker.url)
            await collector.start(background)
            yield collector


def _silence_logs() -> None:
    # Log lines about the connection would mix with the output.
    logging.getLogger("weir").addHandler(logging.NullHandler())
    logging.getLogger("weir").propagate = False
