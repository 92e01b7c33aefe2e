"""`ModelMemory`: keeps the models known that were served, with `--scale-to-zero`.

What becomes of a model's entry is decided by what its workers tell:
- while it is served, the entry is what they tell of it;
- when they have left or died, it stays;
- when one that is there has unloaded it, or had it and has it no more, it goes: that was on purpose.
A load that fails is no purpose: the next worker may be luckier.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum

from nats.errors import Error as NatsError

from bus.connection import Bus
from bus.known_models import KnownModels
from bus.registry import RegistryView
from runtime.containment import contained
from schemas.registry import UNLOADED, ModelRecord, ModelState, VersionRecord

logger = logging.getLogger("weir.scheduler")

_REFRESHED_AFTER_NS = 86400 * 10**9  # long before an entry ends by its age
_REFRESH_INTERVAL_S = 3600.0
_RETRY_S = 1.0


class Fate(Enum):
    """What becomes of an entry of which nothing new is to be told."""

    STAYS = "stays"
    GOES = "goes"


def entry_of(records: Mapping[str, ModelRecord]) -> ModelRecord | None:
    """The entry of a model of which live workers tell these records; None while none of them serves it."""
    serving = [record for record in records.values() if record.config is not None and _ready(record)]
    if not serving:
        return None
    newest = max(serving, key=lambda record: record.written_ns)
    versions = {number: version for record in serving for number, version in _ready(record).items()}
    return replace(newest, versions=dict(sorted(versions.items())), reason="", error="", error_code=0)


def fate_of(records: Mapping[str, ModelRecord], served_by: set[str], live: set[str]) -> Fate:
    """What becomes of the entry of a model that no worker serves any more: `served_by` did last, `live` are there."""
    if any(worker in live and worker not in records for worker in served_by):
        return Fate.GOES
    told = [record for record in records.values() if not record.elsewhere and record.versions]
    return Fate.GOES if any(map(_is_unloaded, told)) else Fate.STAYS


def is_news(entry: ModelRecord, known: ModelRecord | None, now_ns: int) -> bool:
    """Whether an entry tells something that the known one doesn't, or that one is old."""
    if known is None or now_ns - known.written_ns > _REFRESHED_AFTER_NS:
        return True
    return (entry.config, entry.labels, entry.namespace, set(entry.versions)) != (
        known.config,
        known.labels,
        known.namespace,
        set(known.versions),
    )


class ModelMemory:
    """See the module. `owns(model)` tells whether this scheduler has a queue of the model: only such entries it writes.

    Unless it `is_on` nothing is kept, and what an earlier scheduler kept is removed by `abolish`.
    """

    def __init__(self, bus: Bus, registry: RegistryView, owns: Callable[[str], bool], is_on: bool) -> None:
        self._bus = bus
        self._registry = registry
        self._owns = owns
        self.is_on = is_on
        self._known = KnownModels(bus)
        self._served_by: dict[str, set[str]] = {}
        self._changed: dict[str, None] = {}
        self._wakeup = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []  # to be cancelled at the end

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Follows the registry from now on, in a task of `background`, where it is on."""
        if not self.is_on:
            return
        self._registry.on_model_change(self._on_model_change)
        await self._known.start(background, is_writer=True)
        self.tasks.append(background.create_task(self._run()))

    async def abolish(self) -> None:
        """Removes what was kept. No scheduler may be there that keeps it.

        Raises NatsError, OSError or TimeoutError while the broker is away.
        """
        await self._known.abolish()

    def get(self, name: str) -> ModelRecord | None:
        """A model as it was served last, if it is known."""
        return self._known.get(name)

    def names(self) -> set[str]:
        """All models that are known."""
        return self._known.names()

    def _on_model_change(self, name: str) -> None:
        if name:
            self._changed[name] = None
            self._wakeup.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_REFRESH_INTERVAL_S):
                    await self._wakeup.wait()
            except TimeoutError:
                self._changed.update(dict.fromkeys(self._served_by))
            self._wakeup.clear()
            while self._changed:
                # Taken out before it is looked at: what changes meanwhile is a reason to look again.
                name = next(iter(self._changed))
                del self._changed[name]
                try:
                    await self._settle(name)
                except (NatsError, OSError, TimeoutError) as error:
                    self._changed[name] = None
                    logger.warning("model %s could not be kept known: %s", name, error)
                    await asyncio.sleep(_RETRY_S)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _settle(self, name: str) -> None:
        live = {worker: view for worker, view in self._registry.workers.items() if not view.record.draining}
        records = {worker: view.models[name] for worker, view in live.items() if name in view.models}
        known = self._known.get(name)
        entry = entry_of(records)
        if entry is None:
            if known is not None and fate_of(records, self._served_by.get(name, set()), set(live)) is Fate.GOES:
                await self._known.forget(name)
            if known is None:
                self._served_by.pop(name, None)
            return
        self._served_by[name] = {worker for worker, record in records.items() if _ready(record)}
        now_ns = time.time_ns()
        if is_news(entry, known, now_ns) and (known is None or self._owns(name)):
            await self._known.write(replace(entry, written_ns=now_ns))


def _ready(record: ModelRecord) -> dict[int, VersionRecord]:
    return {number: version for number, version in record.versions.items() if version.state == ModelState.READY}


def _is_unloaded(record: ModelRecord) -> bool:
    return all(
        version.state == ModelState.UNLOADING
        or (version.state == ModelState.UNAVAILABLE and version.reason == UNLOADED)
        for version in record.versions.values()
    )
