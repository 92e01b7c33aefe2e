"""How a model gets from one state to another: loads, swaps of versions, drains and unloads.

```text
              load_found                               retire
  (nothing) ─────────────▶ loading ──▶ serving ──────────────────▶ retiring ──▶ drained ──▶ unloaded
                              │           ▲ │ load_found: new versions are loaded beside the old ones and swapped
                              ▼           └─┘ in within one turn of the event loop; replaced versions finish their
                           failed             batches, versions that are gone retire
```

`ModelTransitions` does what it is asked to, always inside the model's turn (`ManagedModels.turn`). What is to be done
about a model, and when, is decided in `weir.worker.lifecycle.reconciler`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace
from nats.errors import Error as NatsError

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.model_files import ModelFiles
from weir.repository.dependencies import composing_models
from weir.repository.layout import FoundModel, NotInRepository, folder_fingerprint, model_fingerprint, poll_failure
from weir.schemas.config.parameters import partitions_of
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.names import plain_name
from weir.schemas.wire.model_control import WantedModel
from weir.schemas.wire.registry import ModelState, VersionRecord
from weir.worker.ensembles.dependencies import DependencyAction, DependencyWatcher
from weir.worker.lifecycle.coordination import DrainCoordinator, RollingReload
from weir.worker.lifecycle.loader import LoadResult, ModelLoader, release_agents
from weir.worker.lifecycle.mirror import RepositoryMirrors
from weir.worker.lifecycle.model_state import ManagedModel, ManagedModels, OperationTasks
from weir.worker.lifecycle.override_folder import OverrideFolder
from weir.worker.lifecycle.placement import ModelPlacement
from weir.worker.lifecycle.served_version import ServedVersion
from weir.worker.repository_agents.agents import AppliedAgents

logger = logging.getLogger("weir.worker")


class ModelHost(Protocol):
    """Sends batches to loaded versions: implemented by `weir.worker.batch_dispatch.BatchDispatcher`."""

    def install(self, result: LoadResult) -> None:
        """Sends batches for the model to these versions from now on."""

    def uninstall(self, name: str) -> None:
        """Rejects batches for the model from now on."""

    def unload_version(self, served: ServedVersion) -> bool:
        """Finishes the batches of the version and unloads it; returns whether that succeeded. Blocking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleContext:
    """The collaborators and options of a worker's model life cycle.

    `control_mode` is "none", "poll" or "explicit"; in explicit mode `startup` names the models to load at the start.
    `mirrors` update the local copy of a model's folder before the folder is read. `threads` loads run at a time.
    """

    host: ModelHost
    models: ManagedModels
    loader: ModelLoader
    desired: DesiredModels
    files: ModelFiles
    drains: DrainCoordinator
    dependencies: DependencyWatcher
    placement: ModelPlacement
    rolling: RollingReload
    mirrors: RepositoryMirrors = field(default_factory=RepositoryMirrors)
    control_mode: str = "none"
    startup: tuple[str, ...] = ()
    threads: int = 4


class _LoadRequest(NamedTuple):
    """How to load a model: with which configuration and files, for which request (0: none), and worker by worker or not."""

    override: str | None = None
    revision: int = 0
    folder: OverrideFolder | None = None
    rolls: bool = False


class _Swapped(NamedTuple):
    """A load that has succeeded: the task that unloads what it has replaced, which an update in place does in part only."""

    unload: asyncio.Task[None]
    is_update: bool


class ModelTransitions:
    """Loads and unloads models. Every method expects to run in the model's turn."""

    def __init__(self, context: LifecycleContext, tasks: OperationTasks) -> None:
        self._context = context
        self._models = context.models
        self._records = context.models.records
        self._repository = context.loader.repository
        self._placement = context.placement
        self._tasks = tasks
        self._pool = ThreadPoolExecutor(context.threads, "loader")

    def close(self) -> None:
        """Cancels loads that have not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # Loading

    async def load(self, model: ManagedModel, wanted: WantedModel, revision: int) -> None:
        """Carries out a load request and publishes the outcome. `revision` is 0 where no request waits for it."""
        folder: OverrideFolder | None = None
        try:
            found, folder = await self._locate(model.name, wanted)
        except (WeirError, NatsError, OSError, TimeoutError) as error:
            reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
            logger.error("Poll failed for model directory '%s': %s", model.name, reason)
            model.error = error if isinstance(error, NotInRepository) else poll_failure(model.name, reason)
            model.reason = ""  # of an earlier load, of files that are gone
        else:
            if wanted.keeps_unchanged and await self._is_unchanged(model, found, revision):
                model.error, model.rejected = None, ""
            elif swapped := await self._load(model, found, _LoadRequest(wanted.config, revision, folder, rolls=True)):
                folder = None
                if swapped.is_update:
                    # As in Triton, the request ends after the instances that it removes; schedulers know that at once.
                    await self._records.publish(model)
                    await asyncio.shield(swapped.unload)
        if folder is not None:
            await asyncio.to_thread(folder.remove)
        model.revision = max(model.revision, revision)
        if revision:
            await self._placement.conclude(model)
        await self._records.publish(model)

    async def _locate(self, name: str, wanted: WantedModel) -> tuple[FoundModel, OverrideFolder | None]:
        """The folder that a load request means, which has the files of the request if it brings any. Raises WeirError."""
        if wanted.files:
            if wanted.config is None:
                raise invalid("Load parameter 'config' must be specified for model file override")
            contents = await self._context.files.fetch(wanted.files)
            folder = await asyncio.to_thread(OverrideFolder, name, contents)
            return self._repository.model_in(name, folder.path), folder
        if wanted.source is not None:
            path = Path(wanted.source.folder)
            return await asyncio.to_thread(self._repository.model_in, name, path, is_registered=True), None
        await self._context.mirrors.refresh(plain_name(name))
        return await asyncio.to_thread(self._repository.find, name), None

    async def load_found(
        self, model: ManagedModel, found: FoundModel, override: str | None = None, revision: int = 0
    ) -> None:
        """Loads what was found in a repository, with the configuration `override` if given, and publishes the outcome."""
        await self._load(model, found, _LoadRequest(override, revision))
        await self._records.publish(model)

    async def load_from_repository(self, model: ManagedModel, override: str | None = None, revision: int = 0) -> bool:
        """As `load_found`, with what the repositories have of the model now; False if none of them has it."""
        try:
            found = await asyncio.to_thread(self._repository.find, model.name)
        except WeirError:
            return False
        await self.load_found(model, found, override, revision)
        return True

    async def _is_unchanged(self, model: ManagedModel, found: FoundModel, revision: int) -> bool:
        """Whether the model was loaded from the files as they are now, an ensemble with the models that it would get now.

        As in Triton, a configuration that a client has sent with an earlier load stays in force as long as that is so.
        """
        if model.result is None or not model.is_serving or found.problem:
            return False
        if model.result.fingerprint != await asyncio.to_thread(folder_fingerprint, found):
            return False
        # As in Triton, a load of an ensemble loads the models of its steps that are not loaded yet.
        dependencies = self._context.dependencies
        async with self._composing_models(found, dependencies.override(model.name), revision):
            dependencies.keep(model.name)
            return dependencies.action(model.name, is_serving=True) is DependencyAction.KEEP

    async def _load(self, model: ManagedModel, found: FoundModel, request: _LoadRequest) -> _Swapped | None:
        """Loads what was found and swaps it in. Returns None if that failed, else the request's folder is the model's.

        Where the placement plan gives the model to other workers, nothing is loaded and `model.error` stays None. If the
        request `rolls`, a model that serves is reloaded after the workers before this one, and not if one of them failed.
        """
        override, revision = request.override, request.revision
        model.path, model.seen = found.path, await asyncio.to_thread(model_fingerprint, found)
        if not await self._placement.admits(model, found, override, revision):
            return None
        if request.rolls and model.is_serving:
            model.error = await self._context.rolling.turn(model.name, revision, self._placement.holders(model.name))
            if model.error is not None:
                logger.warning("'%s' is not reloaded: another worker failed to", model.name)
                return None
        with self._placement.loading(model):
            async with self._composing_models(found, override, revision):
                return await self._load_and_swap_in(model, found, request)

    async def _load_and_swap_in(self, model: ManagedModel, found: FoundModel, request: _LoadRequest) -> _Swapped | None:
        if not model.served:
            loading = {number: VersionRecord(ModelState.LOADING) for number in found.versions}
            await self._records.write(replace(model.record(), versions=loading, reason=""))
        serving = model.result
        if serving is not None and model.retiring:
            # Versions that are retiring may be unloaded before the load ends, so they can't be taken over.
            kept = {number: served for number, served in serving.served.items() if number not in model.retiring}
            serving = dataclasses.replace(serving, served=kept)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, self._context.loader.load, found, request.override, serving)
        return await self._swap_in(model, result, request)

    async def _swap_in(self, model: ManagedModel, result: LoadResult, request: _LoadRequest) -> _Swapped | None:
        model.error = result.error
        self._context.dependencies.tried(model.name, result.error is not None and model.is_serving)
        if result.error is not None:
            model.reject(result)
            if result.elsewhere:
                await self._placement.withdraw(model.name)
            return None
        self._stop_drain(model)
        for served in result.served.values():
            served.take_over()
        old_agents = [] if model.result is None else model.result.agents
        replaced = model.adopt(result)
        model.in_force = request.revision
        self._context.host.install(result)
        old_folder, model.folder = model.folder, request.folder
        if model.retiring:
            result.agents[:0], old_agents = old_agents, []  # versions that they prepared still run
        unload = self._tasks.clean_up(self._unload_versions(model, replaced, old_folder, old_agents))
        if model.retiring:
            self._start_drain(model)
        return _Swapped(unload, is_update=any(served.is_succeeded for served in replaced))

    # The composing models of ensembles

    @asynccontextmanager
    async def _composing_models(self, found: FoundModel, override: str | None, revision: int) -> AsyncIterator[None]:
        """Loads the composing models of an ensemble first, as far as this worker is responsible for them.

        Within the context requests to unload them wait, as in Triton.
        """
        dependencies = self._context.dependencies
        config = await asyncio.to_thread(dependencies.read, found, override)
        if config is None:
            dependencies.forget(found.identity)
            yield
            return
        dependencies.follow(found, config, override)
        # As in Triton: every model with the name of a step, in any namespace.
        names = await asyncio.to_thread(self._repository.identities, composing_models(config))
        plain_names = {plain_name(identity) for identity in names}
        with self._models.in_use(plain_names):
            await asyncio.gather(*(self._load_dependency(name, revision) for name in names))
            for name in plain_names - set(names):
                await self._end_only_one(name)
            yield

    async def _end_only_one(self, name: str) -> None:
        """Unloads the model that had this name for itself before models of other namespaces had it too."""
        if self._models.find(name) is not None:
            async with self._models.turn(name) as model:
                if model.is_serving:
                    await self.unload(model, model.revision)

    async def _load_dependency(self, name: str, revision: int) -> None:
        for entry in (self._context.desired.get(name), self._context.desired.get(plain_name(name))):
            if entry is not None and not entry.wanted.load and entry.revision > revision:
                return  # it was unloaded by a request that came after the one for the ensemble
        async with self._models.turn(name) as model:
            if self._context.control_mode == "explicit" and not model.is_serving:
                await self._context.mirrors.refresh(plain_name(name))
                await self.load_from_repository(model)  # if it is in no repository here, another worker may have it

    # Unloading

    async def unload(self, model: ManagedModel, revision: int) -> None:
        """Unloads all versions after their queued requests, and publishes that. `revision` is the request's, or 0."""
        model.revision = max(model.revision, revision)
        model.error = None
        model.is_moving = False
        model.seen = None
        self._context.dependencies.forget(model.name)
        model.retire()
        await self._placement.withdraw(model.name)
        if model.retiring:
            await self.retire(model)
        else:
            await self._conclude_unload(model)

    async def retire(self, model: ManagedModel) -> None:
        """Publishes that all versions are retiring and starts to drain them; they may be loaded again at any time."""
        model.retire()
        await self._records.publish(model)
        self._start_drain(model)

    def _start_drain(self, model: ManagedModel) -> None:
        self._stop_drain(model)
        model.drain_task = self._tasks.operate(self._drain(model))

    def _stop_drain(self, model: ManagedModel) -> None:
        if model.drain_task is not None:
            model.drain_task.cancel()
            model.drain_task = None

    async def _drain(self, model: ManagedModel) -> None:
        """Waits until the schedulers have no more batches for the retiring versions, then unloads them."""
        numbers = set(model.retiring)
        # Versions may have been loaded with different partition counts: all queues that may hold requests must be empty.
        partitions = max((partitions_of(served.model.config) for served in model.served.values()), default=1)
        await self._context.drains.wait(model.name, numbers, partitions)
        # No batches arrive from here on, and a load can't cancel this drain any more.
        model.drain_task = None
        unloading = [model.served.pop(number) for number in sorted(numbers) if number in model.served]
        folder, agents = None, []
        if not model.served:
            self._context.host.uninstall(model.name)
            agents = [] if model.result is None else model.result.agents
            model.result = None
            folder, model.folder = model.folder, None
        # The cleanup must be completed even if this task is cancelled.
        await asyncio.shield(self._tasks.clean_up(self._unload_versions(model, unloading, folder, agents)))
        model.record_unloaded(numbers)
        await self._conclude_unload(model)
        self._models.drop_if_blank(model)

    async def _conclude_unload(self, model: ManagedModel) -> None:
        if not model.served and await self._leaves_no_record(model):
            model.past.clear()
        await self._records.publish(model)

    async def _leaves_no_record(self, model: ManagedModel) -> bool:
        """Whether the model disappears with its versions: it is in no repository any more, or on other workers."""
        try:
            await asyncio.to_thread(self._repository.find, model.name)
        except WeirError:
            return True
        return model.is_deleted or model.is_moving

    async def _unload_versions(
        self,
        model: ManagedModel,
        versions: list[ServedVersion],
        folder: OverrideFolder | None,
        agents: list[AppliedAgents],
    ) -> None:
        for served in versions:
            is_unloaded = await asyncio.to_thread(self._context.host.unload_version, served)
            if is_unloaded and not served.is_succeeded:  # otherwise only some of its instances were unloaded
                logger.info("successfully unloaded '%s' version %d", model.name, served.model.version)
        if agents:
            await asyncio.to_thread(release_agents, agents)
        if folder is not None:
            await asyncio.to_thread(folder.remove)
