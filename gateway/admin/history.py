"""`HistoryControl`: the changes of models, and the rollback of the last one, as clients request them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.streams.history import ModelHistory
from weir.calls.catalog import Catalog
from weir.calls.model_control import ModelControl
from weir.gateway.admin.peers import Synchronise, no_peers
from weir.gateway.admin.traffic import TrafficControl
from weir.schemas.core.errors import WeirError, invalid, not_found, unavailable
from weir.schemas.wire.history import (
    LOAD,
    MAX_CONFIG_BYTES,
    ROLLBACK,
    LoadState,
    ModelChange,
    NumberedChange,
    change_to_undo,
)

MAX_SHOWN = 1000
"""Changes in one response."""

_MAX_ERROR_LENGTH = 500


class Loads(NamedTuple):
    """What knows how models are loaded now."""

    catalog: Catalog
    desired: DesiredModels

    def state(self, model: str) -> LoadState:
        """How the model is loaded now."""
        entry = self.desired.get(model)
        if self.catalog.served_model(model) is None:
            return LoadState()
        if entry is None or not entry.wanted.load:
            return LoadState(load=True)
        wanted = entry.wanted
        is_kept = wanted.config is None or len(wanted.config.encode()) <= MAX_CONFIG_BYTES
        return LoadState(True, wanted.config if is_kept else None, len(wanted.files), is_kept, wanted.source)


class LoadRecorder:
    """Records the loads and unloads of clients."""

    def __init__(self, history: ModelHistory, loads: Loads) -> None:
        self._history = history
        self._loads = loads

    @asynccontextmanager
    async def recording(self, kind: str, name: str, by: str) -> AsyncIterator[None]:
        """Records what the block does to the model, and the WeirError that it raises."""
        before, failure = self._loads.state(name), ""
        try:
            yield
        except WeirError as error:
            failure = error.message[:_MAX_ERROR_LENGTH]
            raise
        finally:
            after = self._loads.state(name)
            if before.load or after.load:  # else the model is unknown, or has failed before too
                now_ms = time.time_ns() // 1_000_000
                await self._history.record(
                    ModelChange(name, kind, now_ms, by, load_before=before, load_after=after, error=failure)
                )


class HistoryControl:
    """The history of models, and rollback; without `traffic`, changes of traffic rules can't be rolled back."""

    def __init__(
        self,
        history: ModelHistory,
        operations: ModelControl,
        traffic: TrafficControl | None,
        loads: Loads,
        synchronise: Synchronise = no_peers,
    ) -> None:
        self._history = history
        self._operations = operations
        self._traffic = traffic
        self._loads = loads
        self._synchronise = synchronise

    async def start(self) -> None:
        """Creates the stream unless it exists."""
        await self._history.start()

    async def show(self, model: str, limit: int = 50) -> dict[str, Any]:
        """The last changes of a model, newest first."""
        changes = await self._history.of(model)
        shown = changes[::-1][: max(1, min(limit, MAX_SHOWN))]
        return {"model": model, "changes": [row.to_dict() for row in shown]}

    async def roll_back(self, model: str, by: str = "") -> dict[str, Any]:
        """Undoes the newest change of a model that was not undone; returns that change, and the state `now`.

        Raises WeirError where there is none, or where its state before can't be restored.
        """
        changes = await self._history.of(model)
        row = change_to_undo(changes)
        if row is None:
            raise not_found(f"the history of model '{model}' has no change to roll back")
        undone = row.change
        now_ms = time.time_ns() // 1_000_000
        if undone.traffic_before is not None:
            if self._traffic is None:
                raise unavailable("this gateway changes no traffic rules")
            before, after = await self._traffic.restore(model, undone.traffic_before, by)
            change = ModelChange(
                model,
                ROLLBACK,
                now_ms,
                by,
                traffic_before=before,
                traffic_after=after,
                undoes=row.number,
            )
        else:
            loaded_before = self._loads.state(model)
            try:
                await self._restore_load(row)
            finally:
                await self._synchronise()
            change = ModelChange(
                model,
                ROLLBACK,
                now_ms,
                by,
                load_before=loaded_before,
                load_after=self._loads.state(model),
                undoes=row.number,
            )
        await self._history.record(change)
        now = msgspec.to_builtins(
            {"traffic": change.traffic_after} if change.traffic_after is not None else {"load": change.load_after},
            str_keys=True,
        )
        return {"model": model, "undone": row.to_dict(), "now": now}

    async def _restore_load(self, row: NumberedChange) -> None:
        wanted, change = row.change.load_before or LoadState(), row.change
        if not wanted.load:
            await self._operations.unload(change.model, False)
            return
        if wanted.files:
            raise invalid(
                f"change {row.number} of model '{change.model}' replaced {wanted.files} files of an earlier load request, "
                "which are not kept: load the model again with the files"
            )
        if not wanted.is_kept:
            raise invalid(
                f"change {row.number} of model '{change.model}' replaced a configuration of more than {MAX_CONFIG_BYTES} "
                "bytes, which is not kept: load the model again with the configuration"
            )
        if change.kind == LOAD and change.load_after == wanted:
            raise invalid(
                f"change {row.number} of model '{change.model}' loaded the files of its repository again, and earlier "
                "files are not kept: restore the files, then load the model"
            )
        if wanted.registered is not None:
            await self._operations.load_registered(change.model, wanted.registered)
        else:
            await self._operations.load(change.model, wanted.config, {}, drops_override=wanted.config is None)
