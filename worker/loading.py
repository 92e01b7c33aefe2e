"""`Loading`: from what a model is to be to versions that serve, in the place of those that did."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from nats.errors import Error as NatsError

from bus.model_files import ModelFiles
from repository.fingerprint import appearance, fingerprint
from repository.layout import FoundModel
from schemas.desired import WantedModel
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_identity import plain_name
from schemas.registry import ModelState, VersionRecord
from worker.controlled_model import ControlledModel
from worker.ensembles.following import EnsembleFollower
from worker.model_loader import LoadedResult, ModelLoader, poll_failure
from worker.model_placement import ModelPlacement
from worker.model_records import ModelRecords
from worker.override_folder import OverrideFolder
from worker.rolling_reload import RollingReload
from worker.unloading import Unloading

logger = logging.getLogger("weir.worker")


class LoadingHost(Protocol):
    """The worker's shell, as far as it is given models."""

    def install(self, result: LoadedResult) -> None:
        """From now on batches for the model go to these versions."""


class Loading:
    """See the module. All of it is done in the model's turn.

    `refresh(name)` is done before a model is looked for, `prepare(found, override, revision)` before what was found is
    loaded; `ensembles` are told what came of it.
    """

    def __init__(
        self,
        host: LoadingHost,
        loader: ModelLoader,
        files: ModelFiles,
        records: ModelRecords,
        unloading: Unloading,
        ensembles: EnsembleFollower,
        placement: ModelPlacement,
        roll: RollingReload,
        refresh: Callable[[str], Awaitable[None]],
        prepare: Callable[[FoundModel, str | None, int], Awaitable[None]],
        threads: int,
    ) -> None:
        self._host = host
        self._loader = loader
        self._files = files
        self._records = records
        self._unloading = unloading
        self._ensembles = ensembles
        self._placement = placement
        self._roll = roll
        self._refresh = refresh
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(threads, "loader")

    def close(self) -> None:
        """Loads nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def load(self, model: ControlledModel, wanted: WantedModel, revision: int) -> None:
        """Loads what a load request wants, which the registry is told of; `revision` 0 where nobody waits for it."""
        folder: OverrideFolder | None = None
        try:
            if wanted.files:
                if wanted.config is None:
                    raise invalid("Load parameter 'config' must be specified for model file override")
                contents = await self._files.fetch(wanted.files)
                folder = await asyncio.to_thread(OverrideFolder, model.name, contents)
                found = self._loader.repository.look_at(model.name, folder.path)
            else:
                await self._refresh(plain_name(model.name))
                found = await asyncio.to_thread(self._loader.repository.find, model.name)
        except (WeirError, NatsError, OSError, TimeoutError) as error:
            reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
            logger.error("Poll failed for model directory '%s': %s", model.name, reason)
            model.error = poll_failure(model.name)
        else:
            if not wanted.is_override and await self._is_unchanged(model, found):
                model.error, model.rejected = None, ""
            elif await self.load_found(model, found, wanted.config, revision, folder, rolls=True):
                model.is_override = wanted.is_override
                folder = None
            elif model.error is not None and model.error.code is ErrorCode.INTERNAL:
                model.reason = ""  # as in Triton, what can't be polled is none of the models
        if folder is not None:
            await asyncio.to_thread(folder.remove)
        model.revision = max(model.revision, revision)
        if revision:
            await self._placement.conclude(model)
        await self._records.tell(model)

    async def _is_unchanged(self, model: ControlledModel, found: FoundModel) -> bool:
        """Whether the model serves what is on disk."""
        if model.result is None or model.retiring or model.is_override or found.problem:
            return False
        return model.result.fingerprint == await asyncio.to_thread(fingerprint, found)

    async def load_found(
        self,
        model: ControlledModel,
        found: FoundModel,
        override: str | None,
        revision: int,
        folder: OverrideFolder | None = None,
        rolls: bool = False,
    ) -> bool:
        """Loads what was found and swaps it in; returns whether that worked. `folder` is the model's from then on.

        Nothing is done, and nothing has failed, where other workers are to have the model. With `rolls`, what serves is
        reloaded when the workers before this one are done, and not at all where one of them failed.
        """
        model.path, model.seen = found.path, await asyncio.to_thread(appearance, found)
        if not await self._placement.admits(model, found, override, revision):
            return False
        if rolls and model.is_serving:
            model.error = await self._roll.turn(model.name, revision, self._placement.holders(model.name))
            if model.error is not None:
                logger.warning("'%s' is not reloaded: another worker failed to", model.name)
                return False
        with self._placement.loading(model):
            return await self._load_here(model, found, override, revision, folder)

    async def _load_here(
        self,
        model: ControlledModel,
        found: FoundModel,
        override: str | None,
        revision: int,
        folder: OverrideFolder | None,
    ) -> bool:
        await self._prepare(found, override, revision)
        if not model.served:
            loading = {number: VersionRecord(ModelState.LOADING) for number in found.versions}
            await self._records.write(replace(model.record(), versions=loading, reason=""))
        # What is being unloaded may be gone when the load is done: then nothing of it can be taken over.
        serving = None if model.retiring else model.result
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, self._loader.load, found, override, serving)
        model.error = result.error
        self._ensembles.tried(model.name, result.error is not None and model.is_serving)
        if result.error is not None:
            model.reject(result)
            if result.elsewhere:
                await self._placement.withdraw(model.name)
            return False
        self._unloading.halt(model)
        for served in result.served.values():
            served.take_over()
        replaced = model.adopt(result)
        model.in_force = revision
        self._host.install(result)
        old_folder, model.folder = model.folder, folder
        self._unloading.give_up(model, replaced, old_folder)
        if model.retiring:
            self._unloading.begin(model)
        return True
