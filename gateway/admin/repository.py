"""`RepositoryIndex`: the models in the repositories and their states, as Triton's index lists them.

`RepositoryControl` adds the operations of clients: load and unload.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.registry import RegistryView
from weir.bus.naming import subjects
from weir.bus.naming.identity import shares_memory
from weir.bus.nats.connection import Bus, Message
from weir.calls.model_control import ModelControl
from weir.gateway.admin.history import LoadRecorder
from weir.gateway.admin.peers import Synchronise, no_peers
from weir.schemas.core.names import plain_name
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.history import LOAD, UNLOAD
from weir.schemas.wire.model_control import RegisteredFolder, RepositoryView
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord

logger = logging.getLogger("weir.gateway")


INDEX_TIMEOUT_S = 2.0
"""How long the index waits for workers to report their repositories."""

STALE = "serves as it was loaded before: the model's files as they are now could not be loaded"
"""The start of the reason of a READY version whose changed files a worker could not load."""

_BEST_FIRST = (ModelState.READY, ModelState.LOADING, ModelState.UNLOADING, ModelState.UNAVAILABLE)

Row = dict[str, str]
"""`name`, and if best `version`, `state` and `reason`."""


class RepositoryIndex:
    """Queries the live workers for the content of their repositories, and adds the states in the registry."""

    def __init__(self, bus: Bus, gateway_id: str, registry: RegistryView) -> None:
        self._bus = bus
        self._subject = subjects.repository_replies(gateway_id)
        self._registry = registry
        self._views: dict[str, RepositoryView] = {}
        self._complete = asyncio.Event()
        self._turn = asyncio.Lock()
        self.malformed_messages = 0

    async def start(self) -> None:
        """Subscribes to the reports of workers."""
        await self._bus.subscribe(self._subject, self._on_view)

    async def rows(self, ready: bool = False) -> list[Row]:
        """The index; with `ready` only its READY rows."""
        async with self._turn:
            self._views.clear()
            self._complete.clear()
            if self._registry.workers and not ready:
                self._bus.publish(subjects.REPOSITORY_QUERY, b"", self._subject)
                try:
                    await asyncio.wait_for(self._complete.wait(), INDEX_TIMEOUT_S)
                except TimeoutError:
                    logger.warning(
                        "some workers did not report their repositories within %.1f s: the index may lack models",
                        INDEX_TIMEOUT_S,
                    )
            found: dict[str, str] = {}
            for view in self._views.values():
                found |= {name: problem or found.get(name, "") for name, problem in view.problems.items()}
        records: dict[str, list[ModelRecord]] = defaultdict(list)
        for id, worker in self._registry.workers.items():
            for name, record in worker.models.items():
                if not worker.record.draining and record.is_known:
                    records[name].append(record.seen_from(shares_memory(id)))
        rows = index_rows(found, records)
        return [row for row in rows if row.get("state") == ModelState.READY] if ready else rows

    def _on_view(self, message: Message) -> None:
        if message.status:
            return
        try:
            view = RepositoryView.unpack(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message: %s", error)
            return
        if view.worker in self._registry.workers:
            self._views[view.worker] = view
        if self._views.keys() >= self._registry.workers.keys():
            self._complete.set()


def index_rows(found: Mapping[str, str], records: Mapping[str, list[ModelRecord]]) -> list[Row]:
    """Rows by identity and version, from the models `found` in repositories (with a problem or "") and workers' `records`.

    As in Triton, models that differ only by their namespaces are listed under their common name.
    """
    rows: list[Row] = []
    for name in sorted({*found, *records}, key=lambda identity: (plain_name(identity), identity)):
        reported = records.get(name, [])
        of_model = [record for record in reported if not record.elsewhere] or reported
        versions = merged_versions(of_model)
        rejected = next((record.rejected for record in of_model if record.rejected), "")
        for number, version in sorted(versions.items()):
            text = version.reason
            if version.state is ModelState.READY and rejected:
                text = f"{STALE}: {rejected}"
            reason = {"reason": text} if text else {}
            rows.append({"name": plain_name(name), "version": str(number), "state": version.state.value, **reason})
        if not versions:
            problem = found.get(name, "") or next((record.reason for record in of_model if record.reason), "")
            state = {"state": ModelState.UNAVAILABLE.value, "reason": problem} if problem else {}
            rows.append({"name": plain_name(name), **state})
    return rows


def merged_versions(records: Iterable[ModelRecord]) -> dict[int, VersionRecord]:
    """Each version in the best state that any worker reports."""
    merged: dict[int, VersionRecord] = {}
    for record in records:
        for number, version in record.versions.items():
            best = merged.get(number)
            if best is None or _BEST_FIRST.index(version.state) < _BEST_FIRST.index(best.state):
                merged[number] = version
    return merged


UNLOAD_DEPENDENTS = "unload_dependents"


class RepositoryControl:
    """The index, loads and unloads of models, as clients request them. `synchronise` waits for the other gateways;
    `recorder` records the operations.
    """

    def __init__(
        self,
        index: RepositoryIndex,
        operations: ModelControl,
        desired: DesiredModels,
        synchronise: Synchronise = no_peers,
        recorder: LoadRecorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._index = index
        self._operations = operations
        self._desired = desired
        self._synchronise = synchronise

    async def start(self) -> None:
        """Listens to workers, and to the operations of other roles."""
        await self._index.start()
        await self._desired.start()

    async def index(self, ready: bool) -> list[Row]:
        """The repository index; with `ready` only its READY rows."""
        return await self._index.rows(ready)

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes], by: str = "") -> None:
        """Passes the operation on: `ModelControl.load`. `by` is who asks for it."""
        async with self._recording(LOAD, name, by):
            await self._operations.load(name, config, files)

    async def load_registered(
        self, name: str, registered: RegisteredFolder, explicit: bool = True, by: str = ""
    ) -> None:
        """Passes the operation on: `ModelControl.load_registered`. `by` is who asks for it."""
        async with self._recording(LOAD, name, by):
            await self._operations.load_registered(name, registered, explicit)

    def registered(self) -> dict[str, RegisteredFolder]:
        """The models that are to be loaded from folders that clients have registered, by name."""
        return {
            entry.name: entry.wanted.source
            for entry in self._desired.all()
            if entry.wanted.load and entry.wanted.source is not None
        }

    async def unload(self, name: str, with_dependents: bool, by: str = "") -> None:
        """Passes the operation on: `ModelControl.unload`."""
        async with self._recording(UNLOAD, name, by):
            await self._operations.unload(name, with_dependents)

    @asynccontextmanager
    async def _recording(self, kind: str, name: str, by: str) -> AsyncIterator[None]:
        self._operations.check_allowed()  # what is refused by the mode has changed nothing: it has no place in the history
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._synchronise)
            if self._recorder is not None:
                await ends.enter_async_context(self._recorder.recording(kind, name, by))
            yield
