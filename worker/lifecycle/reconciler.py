"""`ModelReconciler`: brings the models of a worker from their actual to their desired state.

The desired state of a model has four sources, each of which leads to operations on single models:

| source | where | operation |
|---|---|---|
| model repositories | control modes "none" (at the start) and "poll" | load what is new or changed, unload what is gone |
| repository API | control mode "explicit", by `DesiredModels` | each load or unload request, in order |
| placement plan | models that declare what they need, by `ModelPlacement` | load, or unload for another worker |
| composing models | ensembles, by `DependencyWatcher` | unload an ensemble without its models, load it when they return |

Operations on one model run one after another, operations on different models at the same time (`ManagedModels.turn`). How
an operation changes versions and instances is in `weir.worker.lifecycle.transitions`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from weir.repository.layout import DUPLICATE, FoundModel, model_fingerprint
from weir.runtime.containment import report
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.names import plain_name
from weir.schemas.wire.model_control import DesiredModel, WantedModel
from weir.schemas.wire.registry import ModelState, VersionRecord
from weir.worker.ensembles.dependencies import DependencyAction
from weir.worker.lifecycle.loader import release_agents
from weir.worker.lifecycle.model_state import ManagedModel, OperationTasks
from weir.worker.lifecycle.placement_rules import PlacementStep
from weir.worker.lifecycle.transitions import LifecycleContext, ModelTransitions

logger = logging.getLogger("weir.worker")

NOT_FOUND = "model not found in any model repository"
"""Triton's reason for a start-up model that is in no repository."""

MAX_WAITING_OPERATIONS = 16
"""Operations on one model that may wait; beyond that, requests superseded by a newer one are skipped."""

_ALL = ("*",)


class ModelReconciler:
    """Loads, reloads and unloads the models of one worker as their desired state changes."""

    def __init__(self, context: LifecycleContext) -> None:
        check_startup_models(context.control_mode, context.startup)
        self._context = context
        self._is_explicit = context.control_mode == "explicit"
        self._repository = context.loader.repository
        self._models = context.models
        self._records = context.models.records
        self._desired = context.desired
        self._placement = context.placement
        self._dependencies = context.dependencies
        self._tasks = OperationTasks()
        self._transitions = ModelTransitions(context, self._tasks)
        self._unreadable: dict[Path, str] = {}
        self._was_read: set[Path] = set()
        self._scheduled: set[str] = set()
        self._placement.on_step(self._on_placement_step)
        self._dependencies.on_change(self._on_dependency_change)

    async def start(self, background: asyncio.TaskGroup) -> list[str]:
        """Loads the models of the start. Returns the problems: unreadable repositories and models that failed."""
        self._tasks.start(background)
        entries: dict[str, DesiredModel] = {}
        if self._is_explicit:
            self._desired.on_change(self._on_desired)
            entries = {entry.name: entry for entry in self._desired.all()}
        found = await self._scan()
        pending = self._context.mirrors.pending()
        if self._context.mirrors.failures():
            await self._publish_repositories()
        names = list(dict.fromkeys([*found, *pending]))
        if self._is_explicit:
            names = [name for name in startup_names(self._context.startup, names) if plain_name(name) not in entries]
        await self._placement.offer_found({name: found[name] for name in names if name in found})
        await asyncio.gather(
            *(
                self._fetch_at_start(name, pending[name])
                if name in pending
                else self._load_at_start(name, found.get(name))
                for name in names
            ),
            *(self._restore(entry) for entry in entries.values()),
        )
        failures = self._models.failures(names)
        return [
            *self._unreadable.values(),
            *self._context.mirrors.failures(),
            *(f"failed to load '{name}': {why}" for name, why in failures.items()),
        ]

    async def hand_over(self, timeout_s: float) -> None:
        """Before shutdown: waits until other workers have loaded what only this one serves, or for `timeout_s`."""
        await self._placement.leave(timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Cancels operations and waits for unloads in progress. The host unloads what is still loaded."""
        self._tasks.cancel_operations()
        self._transitions.close()
        await self._tasks.wait_for_cleanups(timeout_s)

    def remove_folders(self) -> None:
        """Removes the files of load requests, and releases repository agents; call it when no instance runs any more."""
        for model in self._models:
            if model.result is not None:
                release_agents(model.result.agents)
            if model.folder is not None:
                model.folder.remove()

    def publish_health(self, identity: str) -> None:
        """Publishes the model's record after instances of it have become unavailable or available."""
        model = self._models.find(identity)
        if model is not None and model.result is not None and self._tasks.is_open:
            self._tasks.operate(self._records.write(model.record()))

    # Model repositories

    async def poll(self, interval_s: float) -> None:
        """Calls `poll_once` every `interval_s`, until it is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.poll_once()

    async def poll_once(self) -> None:
        """Loads models that are new or changed, and unloads those whose folders are gone.

        Models of a repository that can't be read keep their state.
        """
        try:
            found = await self._scan()
            await self._placement.offer_found(found)
            deleted = [model.name for model in self._models if self._is_deleted(model, found)]
            await asyncio.gather(
                *(self._load_if_changed(model) for model in found.values()),
                *(self._unload_deleted(name) for name in deleted),
            )
        except Exception as error:  # noqa: BLE001 - the next poll may succeed; the worker serves on
            report("weir.worker.lifecycle.reconciler: polling the repositories", error)

    async def _scan(self) -> dict[str, FoundModel]:
        """The models in the repositories. Logs when a repository becomes unreadable and when it is readable again."""
        snapshot = await asyncio.to_thread(self._context.loader.look)
        for path, problem in snapshot.unreadable.items():
            if self._unreadable.get(path) != problem:
                logger.error("%s; its models stay as they are until it can be read", problem)
        for path in self._unreadable.keys() - snapshot.unreadable.keys():
            logger.info("model repository '%s' can be read again", path.name)
        has_changed = self._unreadable != snapshot.unreadable
        self._unreadable = snapshot.unreadable
        self._was_read |= set(self._repository.paths) - snapshot.unreadable.keys()
        if has_changed and not self._is_explicit:  # in explicit mode the repositories are scanned at the start only
            await self._publish_repositories()
        return snapshot.models

    def _is_deleted(self, model: ManagedModel, found: Mapping[str, FoundModel]) -> bool:
        is_unknown = model.path is not None and model.path.parent in self._unreadable
        return model.name not in found and not model.is_deleted and not is_unknown

    def publish_repositories(self) -> None:
        """Publishes which repositories can't be read, after a mirror has noticed a change."""
        if self._tasks.is_open:
            self._tasks.operate(self._publish_repositories())

    async def _publish_repositories(self) -> None:
        # As long as models of a store serve, an outage of the store does not make the server unready.
        mirrors = self._context.mirrors
        unusable = [] if self._is_explicit else mirrors.unusable()
        outdated = [failure for failure in mirrors.failures() if failure not in unusable]
        problems = {} if self._is_explicit else self._unreadable
        never_read = [problem for path, problem in problems.items() if path not in self._was_read]
        await self._records.describe(
            unreadable=[*problems.values(), *unusable], never_read=[*never_read, *unusable], outdated=outdated
        )

    async def _load_at_start(self, name: str, found: FoundModel | None) -> None:
        async with self._models.turn(name) as model:
            if found is not None:
                await self._transitions.load_found(model, found)
                return
            model.reason = NOT_FOUND
            logger.error("failed to load '%s': %s", name, NOT_FOUND)
            await self._records.publish(model)

    async def _fetch_at_start(self, name: str, versions: Iterable[int]) -> None:
        """Loads a model of an object store as soon as it is downloaded; until then its record says that it is loading."""
        async with self._models.turn(name) as model:
            loading = {number: VersionRecord(ModelState.LOADING) for number in versions}
            await self._records.write(replace(model.record(), versions=loading))
            await self._context.mirrors.fetch(name)
            found = next(iter(await asyncio.to_thread(self._find_all, name)), None)
            if found is not None:
                await self._transitions.load_found(model, found)
                return
            model.reason = self._context.mirrors.problems().get(name, NOT_FOUND)
            logger.error("failed to load '%s': %s", name, model.reason)
            await self._records.publish(model)

    async def load_fetched(self, names: Iterable[str]) -> None:
        """Loads models of object stores that could not be fetched at the start and are here now."""
        for name in names:
            async with self._models.turn(name) as model:
                if not model.is_serving:
                    await self._transitions.load_from_repository(model)

    async def _load_if_changed(self, found: FoundModel) -> None:
        async with self._models.turn(found.identity) as model:
            if found.problem == DUPLICATE and model.is_serving:
                # As in Triton: the user decides which one is meant, by removing the other.
                logger.error("'%s' is unloaded: %s", model.name, DUPLICATE)
                model.path, seen = found.path, await asyncio.to_thread(model_fingerprint, found)
                await self._transitions.unload(model, model.revision)
                model.seen = seen
            elif model.seen != await asyncio.to_thread(model_fingerprint, found):
                await self._transitions.load_found(model, found)

    async def _unload_deleted(self, name: str) -> None:
        async with self._models.turn(name) as model:
            model.is_deleted = True
            await self._transitions.unload(model, model.revision)

    # Requests to the repository API

    def _on_desired(self, name: str) -> None:
        entry, model = self._desired.get(name), self._models.find(name)
        if entry is None or not self._tasks.is_open:
            return
        if model is None or entry.revision > model.requested_revision:
            self._tasks.operate(self._carry_out(entry))
        elif _is_rollback(entry, model):
            self._tasks.operate(self._roll_back(entry))

    async def _carry_out(self, entry: DesiredModel) -> None:
        if not entry.wanted.load:
            await self._models.unused(entry.name)
        async with self._models.turn(entry.name) as model:
            if entry.revision <= model.requested_revision:
                return
            model.requested_revision, model.requested = entry.revision, entry.wanted
            newest = self._desired.get(entry.name)
            if model.pending > MAX_WAITING_OPERATIONS and newest is not None and newest.revision > entry.revision:
                return
            if not entry.wanted.load:
                await self._unload_by_name(model, entry.revision)
                return
            await self._load_by_name(model, entry.wanted, entry.revision)
            for name in (model.name, *model.namesakes):
                loaded = self._models.find(name)
                if loaded is None or not loaded.is_serving:
                    # The request has failed, so its ensemble is not loaded when its models appear later.
                    self._dependencies.forget(name)

    async def _roll_back(self, entry: DesiredModel) -> None:
        """The failed request was withdrawn: loads what was desired before it, if nothing serves."""
        async with self._models.turn(entry.name) as model:
            if _is_rollback(entry, model):
                model.requested = entry.wanted
                await self._load_by_name(model, entry.wanted, 0)

    async def _restore(self, entry: DesiredModel) -> None:
        """Carries out a request from before the start of this worker."""
        async with self._models.turn(entry.name) as model:
            model.requested_revision, model.requested = entry.revision, entry.wanted
            if entry.wanted.load:
                await self._load_by_name(model, entry.wanted, entry.revision)
                if model.error is not None and entry.fallback is not None and entry.fallback.load:
                    await self._load_by_name(model, entry.fallback, 0)

    async def restore_files(self) -> None:
        """Uploads the files of load requests again that the broker has lost, for the models that were loaded from them."""
        files = self._context.files
        for entry in self._desired.all():
            model = self._models.find(entry.name)
            if model is not None and model.folder is not None and model.in_force == entry.revision:
                paths = {name: model.folder.path / path for path, name in entry.wanted.files.items()}
                missing = await files.missing(paths)
                await files.put({name: await asyncio.to_thread(paths[name].read_bytes) for name in missing})
                if missing:
                    logger.info("uploaded %d files of '%s' again: the broker had lost them", len(missing), model.name)

    # Names that models of several namespaces share. As in Triton, a request means all of them; each is a model of its own
    # with its own turns, and the state under the plain name has no versions and reports the outcome of the request only.

    async def _load_by_name(self, model: ManagedModel, wanted: WantedModel, revision: int) -> None:
        """Loads `model`, or all models of its name if there are several; runs in the turn of `model`."""
        if not self._repository.namespacing:
            await self._transitions.load(model, wanted, revision)
            return
        # Files or a folder of the request replace whatever the repositories have under this name.
        found = [] if wanted.files or wanted.source else await asyncio.to_thread(self._find_all, model.name)
        identities = frozenset(one.identity for one in found if one.is_ambiguous)
        errors = await asyncio.gather(*(self._load_namesake(name, wanted, revision) for name in sorted(identities)))
        if identities:
            if model.is_serving:
                await self._transitions.unload(model, model.revision)  # the name has become ambiguous
            model.namesakes = identities
            model.revision = max(model.revision, revision)
            model.error = next((error for error in errors if error is not None), None)
            await self._records.publish(model)
        else:
            await self._transitions.load(model, wanted, revision)
            if model.error is not None:
                return  # the namesakes serve on
            model.namesakes = frozenset()
        await self._unload_namesakes(model, revision, keep=identities)

    async def _unload_by_name(self, model: ManagedModel, revision: int) -> None:
        """Unloads `model` and all other models of its name; runs in the turn of `model`."""
        await self._unload_namesakes(model, revision)
        model.namesakes = frozenset()
        await self._transitions.unload(model, revision)

    async def _load_namesake(self, name: str, wanted: WantedModel, revision: int) -> WeirError | None:
        async with self._models.turn(name) as model:
            await self._transitions.load(model, wanted, revision)
            return model.error

    async def _unload_namesakes(self, model: ManagedModel, revision: int, keep: frozenset[str] = frozenset()) -> None:
        others = [other.name for other in self._models if other is not model and plain_name(other.name) == model.name]
        for name in others:
            if name not in keep:
                async with self._models.turn(name) as other:
                    await self._transitions.unload(other, revision)

    def _find_all(self, name: str) -> list[FoundModel]:
        try:
            return self._repository.find_all(name)
        except WeirError:
            return []  # loading the model by its plain name reports the error

    # Placement plan and composing models

    def _on_placement_step(self, name: str, step: PlacementStep) -> None:
        model = self._models.find(name)
        is_reported_nowhere = model is not None and model.elsewhere
        if step in (PlacementStep.LOAD, PlacementStep.UNLOAD) or is_reported_nowhere != (step is PlacementStep.NOWHERE):
            self._schedule(name)

    def _on_dependency_change(self, name: str) -> None:
        model = self._models.find(name)
        if model is not None and self._dependencies.action(name, model.is_serving) is not DependencyAction.KEEP:
            self._schedule(name)

    def _schedule(self, name: str) -> None:
        if self._tasks.is_open and name not in self._scheduled:
            self._scheduled.add(name)
            self._tasks.operate(self._reconcile(name))

    async def _reconcile(self, name: str) -> None:
        """Compares the model with the placement plan and, if it is an ensemble, with its composing models."""
        try:
            async with self._models.turn(name) as model:
                self._scheduled.discard(name)  # later changes schedule another operation
                if self._placement.is_offered(name):
                    await self._follow_placement(model)
                await self._follow_dependencies(model)
        finally:
            self._scheduled.discard(name)

    async def _follow_placement(self, model: ManagedModel) -> None:
        step = self._placement.step(model.name)
        if step is PlacementStep.UNLOAD and model.is_serving:
            logger.info("'%s' is unloaded: the placement plan gives it to other workers", model.name)
            model.is_moving = True
            await self._transitions.retire(model)
        elif step is not PlacementStep.KEEP and not model.is_serving:
            # In a step other than LOAD this only updates the reason why the model is not loaded here.
            entry = self._desired.get(plain_name(model.name))
            if entry is None:
                if not await self._transitions.load_from_repository(model):
                    await self._placement.withdraw(model.name)
            elif entry.wanted.load:
                await self._transitions.load(model, entry.wanted, max(model.revision, entry.revision))

    async def _follow_dependencies(self, model: ManagedModel) -> None:
        action = self._dependencies.action(model.name, model.is_serving)
        if action is DependencyAction.WITHDRAW:
            logger.warning("'%s' is unloaded: not all of its composing models are available", model.name)
            self._dependencies.withdrawn(model.name)
            await self._transitions.retire(model)
        elif action is DependencyAction.LOAD and model.folder is None:
            override = self._dependencies.override(model.name)
            await self._transitions.load_from_repository(model, override, model.in_force)


def check_startup_models(control_mode: str, names: tuple[str, ...]) -> None:
    """Raises INVALID_ARG, in Triton's words, for values of `--load-model` that are not allowed."""
    if names and control_mode != "explicit":
        raise invalid("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in names and names != _ALL:
        raise invalid("Wildcard model name '*' must be the ONLY startup model if specified at all.")


def startup_names(names: tuple[str, ...], found: Iterable[str]) -> list[str]:
    """The identities of the start-up models: all that were `found` under each name, or the name itself if none was."""
    identities = list(found)
    if names == _ALL:
        return identities
    by_name: dict[str, list[str]] = {}
    for identity in identities:
        by_name.setdefault(plain_name(identity), []).append(identity)
    return [identity for name in dict.fromkeys(names) for identity in by_name.get(name, [name])]


def _is_rollback(entry: DesiredModel, model: ManagedModel) -> bool:
    """Whether the entry replaces a failed request of the same revision, and the model has to be loaded as before."""
    is_other = entry.revision == model.requested_revision and entry.wanted != model.requested
    return is_other and entry.wanted.load and not model.is_serving
