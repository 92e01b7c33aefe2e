"""`ModelControl`: which models this worker holds, and how it gets from one state to the next.

Follows the repositories and, in explicit mode, what the repository API has asked for. A reload loads the new versions
while the old ones serve, then swaps them within one turn of the event loop; an unload lets what is queued run first.
Operations on one model follow each other, those on several go on at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from bus.desired_models import DesiredModels
from bus.model_files import ModelFiles
from repository.dependencies import composing_models
from repository.fingerprint import appearance
from repository.layout import DUPLICATE, FoundModel
from runtime.containment import contained, report
from schemas.desired import DesiredModel
from schemas.errors import WeirError
from schemas.model_identity import plain_name
from worker.control_tasks import ControlTasks
from worker.controlled_model import ControlledModel
from worker.controlled_models import ControlledModels
from worker.drains import Drains
from worker.ensembles.following import EnsembleFollower, Verdict
from worker.loading import Loading, LoadingHost
from worker.model_loader import ModelLoader
from worker.model_placement import ModelPlacement
from worker.model_records import ModelRecords, RecordHost
from worker.placed_models import PlacedModels
from worker.rolling_reload import RollingReload
from worker.shared_names import SharedNames
from worker.startup_models import check_startup_models, wanted_at_start
from worker.unloading import Unloading, UnloadingHost

logger = logging.getLogger("weir.worker")

NOT_FOUND = "model not found in any model repository"
"""The problem of a model that is to be loaded at the start and is nowhere, in Triton's words."""

MAX_WAITING_OPERATIONS = 16
"""Operations on one model that may wait for each other; beyond it, those that a later one supersedes are passed over."""


class Host(RecordHost, LoadingHost, UnloadingHost, Protocol):
    """The worker's shell, as the control uses it."""


class ModelControl:
    """See the module. `mode` is "none", "poll" or "explicit"; in the last, `startup` names the models to begin with.

    `refresh(name)` brings what lies on disk of a model up to date before it is looked for there.
    """

    def __init__(
        self,
        host: Host,
        loader: ModelLoader,
        desired: DesiredModels,
        files: ModelFiles,
        drains: Drains,
        ensembles: EnsembleFollower,
        placement: ModelPlacement,
        roll: RollingReload,
        refresh: Callable[[str], Awaitable[None]],
        mode: str,
        startup: tuple[str, ...] = (),
        threads: int = 4,
    ) -> None:
        check_startup_models(mode, startup)
        self._loader = loader
        self._desired = desired
        self._files = files
        self._ensembles = ensembles
        self._unreadable: dict[Path, str] = {}
        self._reconsidered: set[str] = set()  # ensembles whose turn for that has not come yet
        ensembles.on_change = self._on_ensemble_change
        self._mode = mode
        self._startup = startup
        self._models = ControlledModels(self._tell_failure)
        self._tasks = ControlTasks()
        self._records = ModelRecords(host)
        self._unloading = Unloading(host, loader.repository, drains, self._records, self._models, self._tasks)
        self._loading = Loading(
            host,
            loader,
            files,
            self._records,
            self._unloading,
            ensembles,
            placement,
            roll,
            refresh,
            self._prepare_ensemble,
            threads,
        )
        self._placement = placement
        self._refresh = refresh
        self._shared_names = SharedNames(
            loader.repository, self._models, self._records, self._loading.load, self._unload
        )
        self._placed = PlacedModels(
            loader.repository,
            self._models,
            self._records,
            self._unloading,
            self._loading,
            desired,
            placement,
            self._tasks,
        )

    async def start(self, background: asyncio.TaskGroup) -> list[str]:
        """Loads what is to be there at the start; returns what failed: a repository, or a model, and the reason."""
        self._tasks.start(background)
        if self._mode != "explicit":
            found = await self._look()
            await self._placement.offer_found(found)
            await asyncio.gather(*(self._load_at_start(name, model) for name, model in found.items()))
            return self._problems(found)
        self._desired.on_change(self._on_desired)
        entries = {entry.name: entry for entry in self._desired.all()}
        found = await self._look()
        at_start = [name for name in wanted_at_start(self._startup, found) if plain_name(name) not in entries]
        await self._placement.offer_found({name: found[name] for name in at_start if name in found})
        await asyncio.gather(
            *(self._load_at_start(name, found.get(name)) for name in at_start),
            *(self._restore(entry) for entry in entries.values()),
        )
        return self._problems(at_start)

    async def poll(self, interval_s: float) -> None:
        """Looks at the repositories every `interval_s`, for ever, and follows what has changed."""
        while True:
            await asyncio.sleep(interval_s)
            await self.poll_once()

    async def poll_once(self) -> None:
        """Loads models that are new or have changed, unloads those that have gone.

        Models of a repository that can't be read stay as they are.
        """
        try:
            found = await self._look()
            await self._placement.offer_found(found)
            gone = [model.name for model in self._models if self._has_gone(model, found)]
            await asyncio.gather(
                *(self._load_if_changed(model) for model in found.values()), *(self._leave(name) for name in gone)
            )
        except Exception as error:  # noqa: BLE001 - the next look may succeed; the worker serves on
            report("worker.model_control: polling the repositories", error)

    async def _look(self) -> dict[str, FoundModel]:
        """The models that are there; a repository that can't be read is logged when that begins and when it ends."""
        snapshot = await asyncio.to_thread(self._loader.look)
        for path, problem in snapshot.unreadable.items():
            if self._unreadable.get(path) != problem:
                logger.error("%s; its models stay as they are until it can be read", problem)
        for path in self._unreadable.keys() - snapshot.unreadable.keys():
            logger.info("model repository '%s' can be read again", path.name)
        has_changed = self._unreadable != snapshot.unreadable
        self._unreadable = snapshot.unreadable
        if has_changed and self._mode != "explicit":  # there, loading a model finds what is there by then
            await self._records.describe(unreadable=list(snapshot.unreadable.values()))
        return snapshot.models

    def _problems(self, names: Iterable[str]) -> list[str]:
        failures = self._models.failures(names)
        return [*self._unreadable.values(), *(f"failed to load '{name}': {why}" for name, why in failures.items())]

    def _has_gone(self, model: ControlledModel, found: Mapping[str, FoundModel]) -> bool:
        is_unknown = model.path is not None and model.path.parent in self._unreadable
        return model.name not in found and not model.is_leaving and not is_unknown

    async def _tell_failure(self, model: ControlledModel) -> None:
        await self._records.tell(model)

    async def hand_over(self, timeout_s: float) -> None:
        """Before the end: lets other workers take over what only this one has, for `timeout_s` at most."""
        await self._placement.leave(timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Ends what goes on, and waits for what is being unloaded; what is loaded is unloaded by the host."""
        self._tasks.cancel_operations()
        self._loading.close()
        await self._tasks.await_endings(timeout_s)

    async def restore_files(self) -> None:
        """The broker came back, perhaps without the files of load requests: those in use here are put there again."""
        for entry in self._desired.all():
            model = self._models.find(entry.name)
            if model is not None and model.folder is not None and model.in_force == entry.revision:
                paths = {name: model.folder.path / path for path, name in entry.wanted.files.items()}
                missing = await self._files.missing(paths)
                await self._files.put({name: await asyncio.to_thread(paths[name].read_bytes) for name in missing})
                if missing:
                    logger.info("the broker had lost %d files of '%s': they are there again", len(missing), model.name)

    def remove_folders(self) -> None:
        """Removes what load requests brought, once nothing runs from it any more."""
        for model in self._models:
            if model.folder is not None:
                model.folder.remove()

    def tell_health(self, identity: str) -> None:
        """Instances of the model have gone for a while, or come back: the registry is told."""
        model = self._models.find(identity)
        if model is not None and model.result is not None and self._tasks.is_open:
            self._tasks.operate(self._records.write(model.record()))

    # What is to be done

    @contained()
    def _on_desired(self, entry: DesiredModel) -> None:
        model = self._models.find(entry.name)
        if not self._tasks.is_open:
            return
        if model is None or entry.revision > model.asked:
            self._tasks.operate(self._carry_out(entry))
        elif _brings_back(entry, model):
            self._tasks.operate(self._bring_back(entry))

    async def _carry_out(self, entry: DesiredModel) -> None:
        async with self._models.turn(entry.name) as model:
            if entry.revision <= model.asked:
                return
            model.asked, model.wanted = entry.revision, entry.wanted
            newest = self._desired.get(entry.name)
            if model.turns > MAX_WAITING_OPERATIONS and newest is not None and newest.revision > entry.revision:
                return
            if entry.wanted.load:
                await self._shared_names.load(model, entry.wanted, entry.revision)
                self._forget_unserved(model.name, *model.shared_by)
            else:
                await self._shared_names.unload(model, entry.revision)

    async def _bring_back(self, entry: DesiredModel) -> None:
        """An operation that failed is wanted no longer: a model that it left without versions is what it was before."""
        async with self._models.turn(entry.name) as model:
            if _brings_back(entry, model):
                model.wanted = entry.wanted
                await self._shared_names.load(model, entry.wanted, 0)

    def _forget_unserved(self, *names: str) -> None:
        """Ensembles that were asked for and can't be are not waited for: whoever asked was told."""
        for name in names:
            model = self._models.find(name)
            if model is None or not model.is_serving:
                self._ensembles.forget(name)

    async def _restore(self, entry: DesiredModel) -> None:
        """Brings about what was asked for before this worker was started."""
        async with self._models.turn(entry.name) as model:
            model.asked, model.wanted = entry.revision, entry.wanted
            if entry.wanted.load:
                await self._shared_names.load(model, entry.wanted, entry.revision)
                if model.error is not None and entry.fallback is not None and entry.fallback.load:
                    await self._shared_names.load(model, entry.fallback, 0)

    async def _load_at_start(self, name: str, found: FoundModel | None) -> None:
        async with self._models.turn(name) as model:
            if found is None:
                model.reason = NOT_FOUND
                logger.error("failed to load '%s': %s", name, NOT_FOUND)
            else:
                await self._loading.load_found(model, found, None, 0)
            await self._records.tell(model)

    async def _load_if_changed(self, found: FoundModel) -> None:
        async with self._models.turn(found.identity) as model:
            if found.problem == DUPLICATE and model.is_serving:
                # As in Triton, which of them is meant is for whoever put the second one there to say.
                logger.error("'%s' is unloaded: %s", model.name, DUPLICATE)
                model.path, seen = found.path, await asyncio.to_thread(appearance, found)
                await self._unload(model, model.revision)
                model.seen = seen
            elif model.seen != await asyncio.to_thread(appearance, found):
                await self._loading.load_found(model, found, None, 0)
                await self._records.tell(model)

    async def _leave(self, name: str) -> None:
        async with self._models.turn(name) as model:
            model.is_leaving = True
            await self._unload(model, model.revision)

    # Ensembles

    async def _prepare_ensemble(self, found: FoundModel, override: str | None, revision: int) -> None:
        """Sees to it that the models of an ensemble are loaded before it is, as far as that is this worker's to do."""
        config = await asyncio.to_thread(self._ensembles.read, found, override)
        if config is None:
            self._ensembles.forget(found.identity)
            return
        self._ensembles.follow(found, config, override)
        # As in Triton, all models that have a step's name, in whatever namespace.
        names = await asyncio.to_thread(self._loader.repository.with_namesakes, composing_models(config))
        await asyncio.gather(*(self._bring(name, revision) for name in names))

    async def _bring(self, name: str, revision: int) -> None:
        for entry in (self._desired.get(name), self._desired.get(plain_name(name))):
            if entry is not None and not entry.wanted.load and entry.revision > revision:
                return  # somebody has unloaded it since the ensemble was asked for
        async with self._models.turn(name) as model:
            if self._mode != "explicit" or model.is_serving:
                return  # what was to be loaded has been, now that it is our turn
            await self._refresh(plain_name(name))
            try:
                found = await asyncio.to_thread(self._loader.repository.find, name)
            except WeirError:
                return  # another worker may have it
            await self._loading.load_found(model, found, None, 0)
            await self._records.tell(model)

    @contained()
    def _on_ensemble_change(self, name: str) -> None:
        model = self._models.find(name)
        if (
            self._tasks.is_open
            and model is not None
            and name not in self._reconsidered
            and self._ensembles.verdict(name, model.is_serving) is not Verdict.KEEP
        ):
            self._reconsidered.add(name)
            self._tasks.operate(self._reconsider(name))

    async def _reconsider(self, name: str) -> None:
        """The models of an ensemble have changed."""
        async with self._models.turn(name) as model:
            self._reconsidered.discard(name)  # what changes from now on is a reason of its own
            verdict = self._ensembles.verdict(name, model.is_serving)
            if verdict is Verdict.WITHDRAW:
                logger.warning("'%s' is unloaded: not all of the models that it is made of are there", name)
                self._ensembles.withdrawn(name)
                model.retire()
                await self._records.tell(model)
                self._unloading.begin(model)
            elif verdict is Verdict.LOAD and model.folder is None:
                try:
                    found = await asyncio.to_thread(self._loader.repository.find, name)
                except WeirError:
                    return
                await self._loading.load_found(model, found, self._ensembles.override(name), model.in_force)
                await self._records.tell(model)

    # Unloading

    async def _unload(self, model: ControlledModel, revision: int) -> None:
        model.revision = max(model.revision, revision)
        model.error = None
        model.is_moving = False
        model.seen = None
        self._ensembles.forget(model.name)
        model.retire()
        await self._placement.withdraw(model.name)
        if model.retiring:
            await self._records.tell(model)
            self._unloading.begin(model)
        else:
            await self._unloading.conclude(model)


def _brings_back(entry: DesiredModel, model: ControlledModel) -> bool:
    """Whether the entry tells that what this worker tried last did not work, and what is wanted in its place."""
    is_other = entry.revision == model.asked and entry.wanted != model.wanted
    return is_other and entry.wanted.load and not model.is_serving
