"""`run`: connects to the broker, and shows the load of the cluster until the user quits, or prints it once."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from weir.bus.naming.identity import new_id
from weir.bus.nats.access import without_user
from weir.cluster.rates import Key, Rates, rates_by_version
from weir.cluster.status.snapshot import ClusterStatus
from weir.commands.running_server import BrokerTarget, unwrap_exception_groups
from weir.commands.top.rows import filter_rows, problems_text, roles_text, rows_of, sort_rows, table_lines, totals_text
from weir.console.collection.view import STATUS_INTERVAL_S, ClusterView
from weir.console.history.series import Values
from weir.errors import StartError
from weir.runtime.extras import is_installed, missing_extra

if TYPE_CHECKING:
    from weir.commands.top.app import TopApp

SHOWN, UNREACHABLE = 0, 2
"""Exit statuses."""

_CONNECT_TIMEOUT_S = 3.0


class ClusterSource:
    """What the screens show, from a `ClusterView`; `place` is the address of the broker."""

    def __init__(self, view: ClusterView, place: str) -> None:
        self.place = place
        self._view = view
        self._status: ClusterStatus | None = None

    def models(self) -> dict[str, Values]:
        """The load of each model by its identity; empty before the second reading, and while the broker is away."""
        load = self._view.tick.load
        return {} if load is None or not self._view.is_connected else load.models

    def cluster(self) -> Values:
        """The load of all models and hosts; empty as `models` is."""
        load = self._view.tick.load
        return {} if load is None or not self._view.is_connected else load.cluster

    def versions(self) -> dict[Key, Rates]:
        """The rates of each version."""
        readings = self._view.readings
        return {} if readings is None else rates_by_version(*readings)

    def status(self) -> ClusterStatus | None:
        """The state of the cluster, None until it is known."""
        return self._status

    def history(self, model: str, since_ms: int) -> dict[str, list[Any]]:
        """The load of a model by column, since a unix time; `at_ms` has the times."""
        finest: dict[str, list[Any]] = self._view.history.since(model, since_ms)[0]
        return finest

    async def update_status(self) -> None:
        """Collects the state of the cluster."""
        self._status = await self._view.status()


def run(broker: BrokerTarget, every_s: float, once: bool) -> int:
    """Shows the load every `every_s` seconds; with `once`, or without a terminal, prints it once. Returns the status.

    Raises StartError without the packages that show it in a terminal.
    """
    # Log lines about the connection would mix with the output.
    logging.getLogger("weir").addHandler(logging.NullHandler())
    logging.getLogger("weir").propagate = False
    # textual draws on the standard error.
    prints = once or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not prints and not is_installed("tools"):
        raise StartError(f"{missing_extra('the live table', 'tools')}; weir top --once prints one table without it")
    try:
        asyncio.run(_print(broker, every_s) if prints else _watch(broker, every_s))
    except (NatsError, OSError, TimeoutError) as error:
        print(f"weir top: {str(error) or type(error).__name__}", file=sys.stderr)
        return UNREACHABLE
    return SHOWN


async def _print(broker: BrokerTarget, every_s: float) -> None:
    async with _source(broker, every_s) as (source, ticked):
        await source.update_status()
        while not source.cluster():
            await ticked.wait()
            ticked.clear()
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        status = source.status()
        rows = sort_rows(filter_rows(rows_of(source.models(), status), ""), 1, reverse=False)
        lines = [f"{source.place}  {roles_text(status)}", totals_text(source.cluster(), status)]
        print("\n".join([*lines, *problems_text(status, width), "", *table_lines(rows, width)]))


async def _watch(broker: BrokerTarget, every_s: float) -> None:
    from weir.commands.top.app import TopApp  # late: it imports textual

    async with _source(broker, every_s) as (source, ticked):
        app = TopApp(source, ansi_color=True)
        refreshing = asyncio.create_task(_refresh(app, source, ticked, every_s))
        try:
            await app.run_async(mouse=False)
        finally:
            refreshing.cancel()


async def _refresh(app: TopApp, source: ClusterSource, ticked: asyncio.Event, every_s: float) -> None:
    """Shows each new reading, and collects the state of the cluster about as often."""
    while True:
        try:
            await asyncio.wait_for(ticked.wait(), max(STATUS_INTERVAL_S, every_s))
        except TimeoutError:
            pass  # without a broker there are no readings, which the state says
        ticked.clear()
        await source.update_status()
        app.refresh_load()


@asynccontextmanager
async def _source(broker: BrokerTarget, every_s: float) -> AsyncIterator[tuple[ClusterSource, asyncio.Event]]:
    """A source that is connected, and the event that is set after each of its readings."""
    ticked = asyncio.Event()
    name = new_id("top")
    with unwrap_exception_groups(NatsError, OSError, TimeoutError):
        async with asyncio.TaskGroup() as background, broker.connected(name, _CONNECT_TIMEOUT_S) as bus:
            view = ClusterView(bus, name, broker.url, every_s, broker.option)
            await view.start(background, ticked.set)
            try:
                yield ClusterSource(view, without_user(broker.url).removeprefix("nats://")), ticked
            finally:
                view.stop()
