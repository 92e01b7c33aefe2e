"""`RepositoryIndex`: the models in the repositories and what has become of them, as Triton's index lists them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

from bus import subjects
from bus.connection import Bus, Message
from bus.registry import RegistryView
from schemas.model_identity import plain_name
from schemas.registry import ModelRecord, ModelState, VersionRecord
from schemas.repository_view import RepositoryView, unpack_repository_view
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.gateway")

ANSWER_TIMEOUT_S = 2.0
"""How long the index waits for a worker that doesn't tell what it sees."""

STALE = "serves as it was loaded before: the model's files as they are now could not be loaded"
"""How the reason of a READY version begins whose model was changed in a way that a worker rejected."""

_BEST_FIRST = (ModelState.READY, ModelState.LOADING, ModelState.UNLOADING, ModelState.UNAVAILABLE)

Row = dict[str, str]
"""`name`, and where there is something to tell: `version`, `state`, `reason`."""


class RepositoryIndex:
    """Asks the live workers what is in their repositories, and adds what the registry says of it."""

    def __init__(self, bus: Bus, gateway_id: str, registry: RegistryView) -> None:
        self._bus = bus
        self._subject = subjects.repository_answers(gateway_id)
        self._registry = registry
        self._views: dict[str, RepositoryView] = {}
        self._complete = asyncio.Event()
        self._turn = asyncio.Lock()
        self.malformed_messages = 0

    async def start(self) -> None:
        """Listens for workers' answers."""
        await self._bus.subscribe(self._subject, self._on_view)

    async def rows(self, ready: bool = False) -> list[Row]:
        """The index; with `ready` only its READY rows."""
        async with self._turn:
            self._views.clear()
            self._complete.clear()
            if self._registry.workers and not ready:
                self._bus.publish(subjects.REPOSITORY_QUERY, b"", self._subject)
                try:
                    await asyncio.wait_for(self._complete.wait(), ANSWER_TIMEOUT_S)
                except TimeoutError:
                    logger.warning("not every worker told what is in its repositories")
            found: dict[str, str] = {}
            for view in self._views.values():
                found |= {name: problem or found.get(name, "") for name, problem in view.problems.items()}
        records: dict[str, list[ModelRecord]] = defaultdict(list)
        for worker in self._registry.workers.values():
            for name, record in worker.models.items():
                if not worker.record.draining and (record.versions or record.reason):
                    records[name].append(record)
        rows = index_rows(found, records)
        return [row for row in rows if row.get("state") == ModelState.READY] if ready else rows

    def _on_view(self, message: Message) -> None:
        if message.status:
            return
        try:
            view = unpack_repository_view(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message: %s", error)
            return
        if view.worker in self._registry.workers:
            self._views[view.worker] = view
        if self._views.keys() >= self._registry.workers.keys():
            self._complete.set()


def index_rows(found: Mapping[str, str], records: Mapping[str, list[ModelRecord]]) -> list[Row]:
    """Rows by identity and version, from what lies in repositories (with a problem or "") and what workers tell.

    As in Triton, models that their namespaces tell apart are listed by the name that they have in common.
    """
    rows: list[Row] = []
    for name in sorted({*found, *records}, key=lambda identity: (plain_name(identity), identity)):
        told_of = records.get(name, [])
        of_model = [record for record in told_of if not record.elsewhere] or told_of
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
            told = {"state": ModelState.UNAVAILABLE.value, "reason": problem} if problem else {}
            rows.append({"name": plain_name(name), **told})
    return rows


def merged_versions(records: Iterable[ModelRecord]) -> dict[int, VersionRecord]:
    """Each version as the worker tells it on which it is best off."""
    merged: dict[int, VersionRecord] = {}
    for record in records:
        for number, version in record.versions.items():
            known = merged.get(number)
            if known is None or _BEST_FIRST.index(version.state) < _BEST_FIRST.index(known.state):
                merged[number] = version
    return merged
