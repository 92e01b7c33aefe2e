"""`ClusterView`: the state and the load of a cluster, collected over the bus.

The load is collected every second for as long as the console runs, so that a page that is opened later shows the last hour.
The state, for which JetStream and all processes answer more questions, is collected only while a page asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from nats.errors import Error as NatsError

from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.presence import PresenceView
from weir.bus.kv.registry import RegistryView
from weir.bus.nats.connection import Bus
from weir.calls.catalog import Catalog
from weir.cluster.counters.collection import Statistics
from weir.cluster.counters.devices import devices_of
from weir.cluster.rates import Reading, reading_of
from weir.cluster.status.collector import Collector
from weir.cluster.status.snapshot import ClusterStatus
from weir.cluster.status.summary import summarise
from weir.console.collection.load import Load, measure
from weir.console.history.series import SeriesHistory
from weir.runtime.ticks import next_tick

logger = logging.getLogger("weir.console")

TICK_S = 1.0
"""How often the load is collected."""

STATUS_INTERVAL_S = 2.0
"""How old the state may be that a page is shown."""

GATEWAY_SILENCE_S = 3.0
"""How long a gateway, which announces itself every second, may be silent before it counts as one that does not reply."""

_NO_GATEWAY_POLL_S = 0.25


class Tick(NamedTuple):
    """One collection of the load. `number` counts them from 1; `load` is None for the first."""

    number: int
    at_ms: int
    load: Load | None


class ClusterView:
    """Collects over `bus`; `id` is this process's name on it. Everything runs in one event loop.

    The load is collected every `interval_s`. `readings` are the last two, once there are two. `option` is added to commands
    in the advice of problems.
    """

    def __init__(self, bus: Bus, id: str, url: str, interval_s: float = TICK_S, option: str = "") -> None:
        self._bus = bus
        self._option = option
        self._interval_s = interval_s
        self.readings: tuple[Reading, Reading] | None = None
        self._registry = RegistryView(bus)
        self.catalog = Catalog(self._registry, strict_readiness=True)
        self.statistics = Statistics(bus, id, self._registry, self.catalog)
        self.history = SeriesHistory()
        self.tick = Tick(0, 0, None)
        self._known = KnownModels(bus)
        self._gateways = PresenceView(bus, "gateway")
        self._collector = Collector(bus, f"{id}-status", url)
        self._reading: Reading | None = None
        self._status: ClusterStatus | None = None
        self._collected_s = float("-inf")
        self._collecting: asyncio.Task[ClusterStatus] | None = None
        self._collecting_load: asyncio.Task[None] | None = None

    async def start(self, background: asyncio.TaskGroup, announced: Callable[[], None] = lambda: None) -> None:
        """Starts the collection, in tasks of `background`. `announced` is called after each tick.

        Raises NatsError, OSError or TimeoutError if the broker is lost.
        """
        await self._registry.start(background)
        await self._known.start(is_maker=False)
        self.catalog.accept_known(self._known)
        self.catalog.start_warmup()
        await self.statistics.start()
        await self._gateways.start()
        await self._collector.start(background)
        self._collecting_load = background.create_task(self._collect_load(announced))

    def stop(self) -> None:
        """Ends the collection of the load."""
        if self._collecting_load is not None:
            self._collecting_load.cancel()

    @property
    def is_connected(self) -> bool:
        """Whether the broker is connected: nothing is collected meanwhile."""
        return self._bus.is_connected

    @property
    def has_gateway(self) -> bool:
        """Whether any gateway replies. Without one, no requests are counted, and none can be sent."""
        return bool(self._gateways.processes)

    async def wait_without_gateway(self) -> None:
        """Returns when no gateway replies."""
        while self.has_gateway:
            await asyncio.sleep(_NO_GATEWAY_POLL_S)

    @property
    def control_mode(self) -> str:
        """How workers load models: "explicit" if any does so on request, else "poll" or "none"; "" without a worker."""
        modes = {worker.record.model_control_mode for worker in self._registry.workers.values()}
        return next((mode for mode in ("explicit", "poll", "none") if mode in modes), "")

    async def status(self) -> ClusterStatus:
        """The state of the cluster, at most `STATUS_INTERVAL_S` old. Callers share a running collection.

        An unreachable broker is a state of its own, not an error.
        """
        if self._status is not None and time.monotonic() < self._collected_s + STATUS_INTERVAL_S:
            return self._status
        if self._collecting is None:
            self._collecting = asyncio.get_running_loop().create_task(self._collect_status())
        return await asyncio.shield(self._collecting)

    async def _collect_status(self) -> ClusterStatus:
        try:
            try:
                status = summarise(await self._collector.collect(), self._option)
            except (NatsError, OSError, TimeoutError) as error:
                text = str(error) or f"JetStream does not reply ({type(error).__name__})"
                status = ClusterStatus(taken_ms=time.time_ns() // 1_000_000, state="unreachable", error=text)
            self._status, self._collected_s = status, time.monotonic()
            return status
        finally:
            self._collecting = None

    async def _collect_load(self, announced: Callable[[], None]) -> None:
        while True:
            await next_tick(self._interval_s)
            if self._bus.is_connected:
                self._registry.expire()
                self._gateways.expire(GATEWAY_SILENCE_S)
                await self.statistics.refresh()
                self._take_reading()
                announced()

    def _take_reading(self) -> None:
        before = self._reading
        self._reading = reading_of(time.monotonic(), self.statistics.versions(), self.statistics.schedulers())
        load = None
        at_ms = time.time_ns() // 1_000_000
        if before is not None:
            self.readings = before, self._reading
            devices = devices_of(self.statistics.live_workers())
            load = measure(before, self._reading, devices, self.has_gateway)
            self.history.add(at_ms, load.cluster, load.models)
        self.tick = Tick(self.tick.number + 1, at_ms, load)
