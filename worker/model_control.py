"""`ModelControl`: which models this worker holds, and how it gets from one state to the next.

Follows the repositories and, in explicit mode, what the repository API has asked for. A reload loads the new versions
while the old ones serve, then swaps them within one turn of the event loop; an unload lets what is queued run first.
Operations on one model follow each other, those on several go on at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

from nats.errors import Error as NatsError

from bus.desired_models import DesiredModels
from bus.model_files import ModelFiles
from repository.dependencies import composing_models
from repository.fingerprint import appearance, fingerprint
from repository.layout import FoundModel
from schemas.desired import DesiredModel, WantedModel
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_identity import plain_name
from schemas.registry import ModelState, VersionRecord
from worker.controlled_model import ControlledModel
from worker.drains import Drains
from worker.ensembles.following import EnsembleFollower, Verdict
from worker.model_loader import LoadedResult, ModelLoader, poll_failure
from worker.model_records import ModelRecords, RecordHost
from worker.override_folder import OverrideFolder
from worker.shared_names import SharedNames
from worker.startup_models import check_startup_models, wanted_at_start
from worker.unloading import Unloading, UnloadingHost

logger = logging.getLogger("weir.worker")

MAX_WAITING_OPERATIONS = 16
"""Operations on one model that may wait for each other; beyond it, those that a later one supersedes are passed over."""


class Host(RecordHost, UnloadingHost, Protocol):
    """The worker's shell, as the control uses it."""

    def install(self, result: LoadedResult) -> None:
        """From now on batches for the model go to these versions."""


class ModelControl:
    """See the module. `mode` is "none", "poll" or "explicit"; in the last, `startup` names the models to begin with."""

    def __init__(
        self,
        host: Host,
        loader: ModelLoader,
        desired: DesiredModels,
        files: ModelFiles,
        drains: Drains,
        mode: str,
        startup: tuple[str, ...] = (),
        threads: int = 4,
        ensembles: EnsembleFollower | None = None,
    ) -> None:
        check_startup_models(mode, startup)
        self._host = host
        self._loader = loader
        self._records = ModelRecords(host)
        self._unloading = Unloading(host, loader.repository, drains, self._records, self._end)
        self._ensembles = ensembles
        self._reconsidered: set[str] = set()  # ensembles whose turn for that has not come yet
        if ensembles is not None:
            ensembles.on_change = self._on_ensemble_change
        self._desired = desired
        self._files = files
        self._drains = drains
        self._mode = mode
        self._startup = startup
        self._pool = ThreadPoolExecutor(threads, "loader")
        self._models: dict[str, ControlledModel] = {}
        self._shared_names = SharedNames(
            loader.repository, self._models, self._records, self._turn, self._load, self._unload
        )
        self._background: asyncio.TaskGroup | None = None
        self._operations: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()

    async def start(self, background: asyncio.TaskGroup) -> dict[str, str]:
        """Loads what is to be there at the start; returns those of the start-up models that failed, with the reason."""
        self._background = background
        if self._mode != "explicit":
            found = await asyncio.to_thread(self._loader.scan)
            await asyncio.gather(*(self._load_at_start(name, model) for name, model in found.items()))
            return self._failures(found)
        self._desired.on_change(self._on_desired)
        entries = {entry.name: entry for entry in self._desired.all()}
        found = await asyncio.to_thread(self._loader.scan)
        at_start = [name for name in wanted_at_start(self._startup, found) if plain_name(name) not in entries]
        await asyncio.gather(
            *(self._load_at_start(name, found.get(name)) for name in at_start),
            *(self._restore(entry) for entry in entries.values()),
        )
        return self._failures(at_start)

    async def poll(self, interval_s: float) -> None:
        """Looks at the repositories every `interval_s`, for ever, and follows what has changed."""
        while True:
            await asyncio.sleep(interval_s)
            await self.poll_once()

    async def poll_once(self) -> None:
        """Loads models that are new or have changed, unloads those that have gone."""
        try:
            found = await asyncio.to_thread(self._loader.scan)
        except WeirError as error:
            logger.error("the repositories can't be polled: %s", error.message)
            return
        gone = [name for name, model in self._models.items() if name not in found and not model.is_leaving]
        await asyncio.gather(
            *(self._load_if_changed(model) for model in found.values()), *(self._leave(name) for name in gone)
        )

    async def stop(self, timeout_s: float) -> None:
        """Ends what goes on, and waits for what is being unloaded; what is loaded is unloaded by the host."""
        if self._ensembles is not None:
            self._ensembles.on_change = lambda _name: None  # that models go now is no reason to begin anything
        for task in self._operations:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._endings:
            await asyncio.wait(self._endings, timeout=timeout_s)

    async def restore_files(self) -> None:
        """The broker came back, perhaps without the files of load requests: those in use here are put there again."""
        for entry in self._desired.all():
            model = self._models.get(entry.name)
            if model is not None and model.folder is not None and model.in_force == entry.revision:
                paths = {name: model.folder.path / path for path, name in entry.wanted.files.items()}
                missing = await self._files.missing(paths)
                await self._files.put({name: await asyncio.to_thread(paths[name].read_bytes) for name in missing})
                if missing:
                    logger.info("the broker had lost %d files of '%s': they are there again", len(missing), model.name)

    def remove_folders(self) -> None:
        """Removes what load requests brought, once nothing runs from it any more."""
        for model in self._models.values():
            if model.folder is not None:
                model.folder.remove()

    def _failures(self, names: Iterable[str]) -> dict[str, str]:
        models = {name: self._models[name] for name in names if name in self._models}
        return {name: model.failure for name, model in models.items() if model.failure}

    # What is to be done

    def _on_desired(self, entry: DesiredModel) -> None:
        model = self._models.get(entry.name)
        if (model is None or entry.revision > model.asked) and self._background is not None:
            self._later(self._carry_out(entry))

    async def _carry_out(self, entry: DesiredModel) -> None:
        async with self._turn(entry.name) as model:
            if entry.revision <= model.asked:
                return
            model.asked = entry.revision
            newest = self._desired.get(entry.name)
            if model.turns > MAX_WAITING_OPERATIONS and newest is not None and newest.revision > entry.revision:
                return
            if entry.wanted.load:
                await self._shared_names.load(model, entry.wanted, entry.revision)
                self._forget_unserved(model.name, *model.shared_by)
            else:
                await self._shared_names.unload(model, entry.revision)

    def _forget_unserved(self, *names: str) -> None:
        """Ensembles that were asked for and can't be are not waited for: whoever asked was told."""
        if self._ensembles is None:
            return
        for name in names:
            model = self._models.get(name)
            if model is None or not model.is_serving:
                self._ensembles.forget(name)

    async def _restore(self, entry: DesiredModel) -> None:
        """Brings about what was asked for before this worker was started."""
        async with self._turn(entry.name) as model:
            model.asked = entry.revision
            if entry.wanted.load:
                await self._shared_names.load(model, entry.wanted, entry.revision)
                if model.error is not None and entry.fallback is not None and entry.fallback.load:
                    await self._shared_names.load(model, entry.fallback, entry.revision)

    async def _load_at_start(self, name: str, found: FoundModel | None) -> None:
        async with self._turn(name) as model:
            if found is None:
                model.reason = poll_failure(name).message
                logger.error("failed to load '%s': it is in no repository", name)
            else:
                await self._load_found(model, found, None, 0)
            await self._records.tell(model)

    async def _load_if_changed(self, found: FoundModel) -> None:
        async with self._turn(found.identity) as model:
            if model.seen != await asyncio.to_thread(appearance, found):
                await self._load_found(model, found, None, 0)
                await self._records.tell(model)

    async def _leave(self, name: str) -> None:
        async with self._turn(name) as model:
            model.is_leaving = True
            await self._unload(model, model.revision)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[ControlledModel]:
        """The model, for one operation on it after those that came before; forgotten afterwards if nothing is left."""
        model = self._models.setdefault(name, ControlledModel(name))
        model.turns += 1
        try:
            async with model.lock:
                yield model
        finally:
            model.turns -= 1
            self._drop_if_blank(model)

    def _drop_if_blank(self, model: ControlledModel) -> None:
        if not model.turns and model.is_blank:
            self._models.pop(model.name, None)

    # Loading

    async def _load(self, model: ControlledModel, wanted: WantedModel, revision: int) -> None:
        folder: OverrideFolder | None = None
        try:
            if wanted.files:
                if wanted.config is None:
                    raise invalid("Load parameter 'config' must be specified for model file override")
                contents = await self._files.fetch(wanted.files)
                folder = await asyncio.to_thread(OverrideFolder, model.name, contents)
                found = self._loader.repository.look_at(model.name, folder.path)
            else:
                found = await asyncio.to_thread(self._loader.repository.find, model.name)
        except (WeirError, NatsError, OSError, TimeoutError) as error:
            reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
            logger.error("Poll failed for model directory '%s': %s", model.name, reason)
            model.error = poll_failure(model.name)
        else:
            if not wanted.is_override and await self._is_unchanged(model, found):
                model.error = None
            elif await self._load_found(model, found, wanted.config, revision, folder):
                model.is_override = wanted.is_override
                folder = None
            elif model.error is not None and model.error.code is ErrorCode.INTERNAL:
                model.reason = ""  # as in Triton, what can't be polled is none of the models
        if folder is not None:
            await asyncio.to_thread(folder.remove)
        model.revision = max(model.revision, revision)
        await self._records.tell(model)

    async def _is_unchanged(self, model: ControlledModel, found: FoundModel) -> bool:
        """Whether the model serves what is on disk."""
        if model.result is None or model.retiring or model.is_override or found.problem:
            return False
        return model.result.fingerprint == await asyncio.to_thread(fingerprint, found)

    async def _load_found(
        self,
        model: ControlledModel,
        found: FoundModel,
        override: str | None,
        revision: int,
        folder: OverrideFolder | None = None,
    ) -> bool:
        """Loads what was found and swaps it in; returns whether that worked. `folder` is the model's from then on."""
        model.seen = await asyncio.to_thread(appearance, found)
        if self._ensembles is not None:
            await self._prepare_ensemble(self._ensembles, found, override, revision)
        if not model.served:
            loading = {number: VersionRecord(ModelState.LOADING) for number in found.versions}
            await self._records.write(replace(model.record(), versions=loading, reason=""))
        # What is being unloaded may be gone when the load is done: then nothing of it can be taken over.
        serving = None if model.retiring else model.result
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, self._loader.load, found, override, serving)
        model.error = result.error
        if self._ensembles is not None:
            self._ensembles.tried(model.name, result.error is not None and model.is_serving)
        if result.error is not None:
            model.reject(result)
            return False
        if model.draining is not None:
            model.draining.cancel()
            model.draining = None
        replaced = model.adopt(result)
        model.in_force = revision
        self._host.install(result)
        old_folder, model.folder = model.folder, folder
        self._end(self._unloading.let_go(model, replaced, old_folder))
        if model.retiring:
            self._drain(model)
        return True

    # Ensembles

    async def _prepare_ensemble(
        self, ensembles: EnsembleFollower, found: FoundModel, override: str | None, revision: int
    ) -> None:
        """Sees to it that the models of an ensemble are loaded before it is, as far as that is this worker's to do."""
        config = await asyncio.to_thread(ensembles.read, found, override)
        if config is None:
            ensembles.forget(found.identity)
            return
        await ensembles.follow(found, config, override)
        # As in Triton, all models that have a step's name, in whatever namespace.
        names = await asyncio.to_thread(self._loader.repository.with_namesakes, composing_models(config))
        await asyncio.gather(*(self._bring(name, revision) for name in names))

    async def _bring(self, name: str, revision: int) -> None:
        for entry in (self._desired.get(name), self._desired.get(plain_name(name))):
            if entry is not None and not entry.wanted.load and entry.revision > revision:
                return  # somebody has unloaded it since the ensemble was asked for
        async with self._turn(name) as model:
            if self._mode != "explicit" or model.is_serving:
                return  # what was to be loaded has been, now that it is our turn
            try:
                found = await asyncio.to_thread(self._loader.repository.find, name)
            except WeirError:
                return  # another worker may have it
            await self._load_found(model, found, None, 0)
            await self._records.tell(model)

    def _on_ensemble_change(self, name: str) -> None:
        model = self._models.get(name)
        if (
            self._ensembles is not None
            and model is not None
            and name not in self._reconsidered
            and self._ensembles.verdict(name, model.is_serving) is not Verdict.KEEP
        ):
            self._reconsidered.add(name)
            self._later(self._reconsider(self._ensembles, name))

    async def _reconsider(self, ensembles: EnsembleFollower, name: str) -> None:
        """The models of an ensemble have changed."""
        async with self._turn(name) as model:
            self._reconsidered.discard(name)  # what changes from now on is a reason of its own
            verdict = ensembles.verdict(name, model.is_serving)
            if verdict is Verdict.WITHDRAW:
                logger.warning("'%s' is unloaded: not all of the models that it is made of are there", name)
                ensembles.withdrawn(name)
                model.retire()
                await self._records.tell(model)
                self._drain(model)
            elif verdict is Verdict.LOAD and model.folder is None:
                try:
                    found = await asyncio.to_thread(self._loader.repository.find, name)
                except WeirError:
                    return
                await self._load_found(model, found, ensembles.override(name), model.in_force)
                await self._records.tell(model)

    # Unloading

    async def _unload(self, model: ControlledModel, revision: int) -> None:
        model.revision = max(model.revision, revision)
        model.error = None
        model.seen = None
        if self._ensembles is not None:
            self._ensembles.forget(model.name)
        model.retire()
        if model.retiring:
            await self._records.tell(model)
            self._drain(model)
        else:
            await self._unloading.conclude(model)

    def _drain(self, model: ControlledModel) -> None:
        if model.draining is not None:
            model.draining.cancel()
        model.draining = self._later(self._let_drain(model))

    async def _let_drain(self, model: ControlledModel) -> None:
        await self._unloading.drain(model)
        self._drop_if_blank(model)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._keep(work, self._operations)

    def _end(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._keep(work, self._endings)

    def _keep(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        assert self._background is not None  # noqa: S101 - set by `start`
        task = self._background.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task
