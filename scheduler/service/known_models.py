"""`KnownModelStore`: remembers models that were served, for `--scale-to-zero`.

The records of a model's workers decide about its entry:
- while the model is served, the entry follows the records;
- when its workers have left or died, the entry stays;
- when a live worker has unloaded the model, or no longer has it, the entry is removed, because that was on purpose.
A failed load is not on purpose: it may succeed on the next worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum

from msgspec.structs import replace
from nats.errors import Error as NatsError

from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.registry import RegistryView
from weir.bus.nats.connection import Bus
from weir.runtime.containment import contained
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord

logger = logging.getLogger("weir.scheduler")

_REFRESH_AFTER_NS = 86400 * 10**9  # long before an entry expires
_REFRESH_INTERVAL_S = 3600.0
_RETRY_S = 1.0


class EntryAction(Enum):
    """What happens to an entry of which there is nothing new."""

    KEEP = "keep"
    REMOVE = "remove"


def entry_of(records: Mapping[str, ModelRecord]) -> ModelRecord | None:
    """Returns the entry for a model with these records of live workers; None while none of them serves it."""
    serving = [record for record in records.values() if record.config is not None and _ready(record)]
    if not serving:
        return None
    newest = max(serving, key=lambda record: record.written_ns)
    versions = {number: version for record in serving for number, version in _ready(record).items()}
    return replace(newest, versions=dict(sorted(versions.items())), reason="", error="", error_code=0)


def action_for(records: Mapping[str, ModelRecord], served_by: set[str], live: set[str]) -> EntryAction:
    """Decides about the entry of a model that is not served: `served_by` served it last, `live` workers are alive."""
    if any(worker in live and worker not in records for worker in served_by):
        return EntryAction.REMOVE
    loaded = [record for record in records.values() if not record.elsewhere and record.versions]
    return EntryAction.REMOVE if any(map(_is_unloaded, loaded)) else EntryAction.KEEP


def needs_write(entry: ModelRecord, stored: ModelRecord | None, now_ns: int) -> bool:
    """Whether `entry` differs from the `stored` one, or that one is old."""
    if stored is None or now_ns - stored.written_ns > _REFRESH_AFTER_NS:
        return True
    return (entry.config, entry.labels, entry.namespace, set(entry.versions)) != (
        stored.config,
        stored.labels,
        stored.namespace,
        set(stored.versions),
    )


class KnownModelStore:
    """The entries of `models`. This scheduler writes only those of models of which it `owns` a queue.

    Unless it `is_on`, nothing is remembered, and `models.remove_bucket` removes what an earlier scheduler has stored.
    """

    def __init__(self, bus: Bus, registry: RegistryView, owns: Callable[[str], bool], is_on: bool) -> None:
        self._bus = bus
        self._registry = registry
        self._owns = owns
        self.is_on = is_on
        self.models = KnownModels(bus)
        self._served_by: dict[str, set[str]] = {}
        self._changed: dict[str, None] = {}
        self._wakeup = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []  # cancelled by the service's `stop`

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Starts to follow the registry in a task of `background`, if it is on."""
        if not self.is_on:
            return
        self._registry.on_model_change(self._on_model_change)
        await self.models.start()
        self.tasks.append(background.create_task(self._run()))

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
                # Removed first, so that a change during the update causes another one.
                name = next(iter(self._changed))
                del self._changed[name]
                try:
                    await self._update_entry(name)
                except (NatsError, OSError, TimeoutError) as error:
                    self._changed[name] = None
                    logger.warning(
                        "model %s: its record for --scale-to-zero could not be stored, trying again: %s", name, error
                    )
                    await asyncio.sleep(_RETRY_S)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _update_entry(self, name: str) -> None:
        live = {worker: view for worker, view in self._registry.workers.items() if not view.record.draining}
        records = {worker: view.models[name] for worker, view in live.items() if name in view.models}
        stored = self.models.get(name)
        entry = entry_of(records)
        if entry is None:
            if (
                stored is not None
                and action_for(records, self._served_by.get(name, set()), set(live)) is EntryAction.REMOVE
            ):
                await self.models.forget(name)
            if stored is None:
                self._served_by.pop(name, None)
            return
        self._served_by[name] = {worker for worker, record in records.items() if _ready(record)}
        now_ns = time.time_ns()
        if needs_write(entry, stored, now_ns) and (stored is None or self._owns(name)):
            await self.models.write(replace(entry, written_ns=now_ns))


def _ready(record: ModelRecord) -> dict[int, VersionRecord]:
    return {number: version for number, version in record.versions.items() if version.state == ModelState.READY}


def _is_unloaded(record: ModelRecord) -> bool:
    return all(
        version.state == ModelState.UNLOADING
        or (version.state == ModelState.UNAVAILABLE and version.reason == UNLOADED)
        for version in record.versions.values()
    )
