"""`RollingReload`: several workers that serve a model reload it one after another, so that a bad one stops at the first.

Whose turn it is follows from the registry alone: a worker waits for those that serve the model and have a smaller name,
until each has told that it carried the operation out, or has gone. So nothing is locked, and who dies in his turn holds up
nobody. A model that serves nowhere is loaded by all workers at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from schemas.errors import ErrorCode, WeirError
from schemas.registry import ModelRecord, ModelState
from worker.inner_calls import InnerCalls


class RollingReload:
    """See the module. Listens to the registry from the first reload on."""

    def __init__(self, calls: InnerCalls, worker_id: str) -> None:
        self._calls = calls
        self._me = worker_id
        self._changed = asyncio.Event()
        self._is_listening = False

    async def turn(self, name: str, revision: int, holders: Collection[str] | None) -> WeirError | None:
        """Returns when it is this worker's turn to carry out operation `revision`, or with why a worker before it failed.

        `holders` are the workers that are to hold the model, None for all that have it. While the broker is away nobody
        waits for others.
        """
        if not self._is_listening:
            self._is_listening = True
            self._calls.registry.on_model_change(lambda _name: self._changed.set())
            self._calls.registry.on_worker_lost(lambda _worker: self._changed.set())
        try:
            await self._calls.open()
        except WeirError:
            return None
        while True:
            ahead = records_ahead(self._me, self._records(name, holders))
            failure = failure_among(ahead, revision)
            if failure is not None or all(record.revision >= revision for record in ahead):
                return failure
            self._changed.clear()
            await self._changed.wait()

    def _records(self, name: str, holders: Collection[str] | None) -> dict[str, ModelRecord]:
        return {
            worker: view.models[name]
            for worker, view in self._calls.registry.workers.items()
            if name in view.models
            and not (view.record.draining or view.record.leaving)
            and (holders is None or worker in holders)
        }


def records_ahead(me: str, records: Mapping[str, ModelRecord]) -> list[ModelRecord]:
    """What those tell that reload the model before worker `me` does, in their order: all that serve it and come first."""
    return [
        records[worker]
        for worker in sorted(records)
        if worker < me and any(row.state == ModelState.READY for row in records[worker].versions.values())
    ]


def failure_among(records: list[ModelRecord], revision: int) -> WeirError | None:
    """Why one of these workers could not carry out the operation; one that simply doesn't have the model is no failure."""
    for record in records:
        is_absent = record.elsewhere or record.error_code == ErrorCode.INTERNAL.number
        if record.revision >= revision and record.error_code and not is_absent:
            return WeirError(ErrorCode.from_number(record.error_code), record.error)
    return None
