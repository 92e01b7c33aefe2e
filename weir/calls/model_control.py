"""`ModelControl`: loads and unloads models on request, for clients of a gateway and for Python models in a worker.

An operation is an entry in the desired state, which all workers follow. It ends when every worker that was registered has
reported its result. A worker that dies meanwhile is not waited for: its successor reads the entry.

Workers in mode "explicit" carry operations out (`WorkerRecord.model_control_mode`); the others are not waited for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from msgspec import UNSET
from msgspec.structs import replace
from nats.errors import Error as NatsError

from weir.bus.kv.desired_models import DesiredModels, next_revision
from weir.bus.kv.model_files import ModelFiles, object_name
from weir.bus.kv.registry import RegistryView
from weir.repository.dependencies import composing_models, unneeded_models
from weir.repository.paths import check_model_name
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid, overloaded, unavailable
from weir.schemas.core.names import plain_name
from weir.schemas.wire.model_control import MAX_CONFIG_LENGTH, MAX_FILES, DesiredModel, RegisteredFolder, WantedModel
from weir.schemas.wire.registry import ModelRecord, ModelState

logger = logging.getLogger("weir.calls")

OPERATION_TIMEOUT_S = 1800.0
"""How long a caller waits for a load or unload, which continues after that."""

DEPENDENTS_TIMEOUT_S = 10.0
"""How long an ensemble's models, which are unloaded with it, stay loaded for its running requests."""

WRITE_TIMEOUT_S = 10.0
"""How long writing an operation is retried while the broker does not accept it."""

_UNLOAD_POLL_S = 0.02
_WRITE_RETRY_S = 0.1

MAX_OPERATIONS = 256
"""Loads and unloads in progress at one role."""


class _Operation:
    """One operation: its `entry` in the desired state, which `make(before)` returns, and the results of `workers`."""

    def __init__(
        self, make: Callable[[DesiredModel | None], DesiredModel], workers: set[str], registry: RegistryView
    ) -> None:
        self._make = make
        self._workers = workers
        self._registry = registry
        self.before: DesiredModel | None = None
        self.entry: DesiredModel | None = None
        self.results: dict[str, ModelRecord] = {}
        self.complete = asyncio.Event()

    def change(self, current: DesiredModel | None) -> DesiredModel:
        """The entry to write over the current one; the same entry where an earlier attempt has written it."""
        if self.entry is None or self.entry != current:
            self.before, self.entry = current, self._make(current)
        return self.entry

    def update(self) -> None:
        """Reads the registry. Called after each change of it: a record may exist for a moment only."""
        if self.entry is None:
            return
        live = {worker for worker in self._workers if worker in self._registry.workers}
        for worker in live:
            view = self._registry.workers[worker]
            record = view.models.get(self.entry.name)
            if record is not None and record.revision >= self.entry.revision:
                self.results[worker] = record
        expected = {worker for worker in live if not self._registry.workers[worker].record.draining}
        if expected <= self.results.keys():
            self.complete.set()


NOT_ALLOWED = "explicit model load / unload is not allowed if polling is enabled"
"""Triton's refusal, which it also gives where nothing is polled."""

NOT_ALLOWED_HERE = (
    f"{NOT_ALLOWED}, nor with --model-control-mode=none, as here: start the server with --model-control-mode=explicit"
)


class ModelControl:
    """Loads and unloads models. A role with a `mode` of its own rejects both unless that is "explicit"."""

    def __init__(
        self, registry: RegistryView, desired: DesiredModels, files: ModelFiles, mode: str = "explicit"
    ) -> None:
        self._registry = registry
        self._desired = desired
        self._files = files
        self._is_allowed = mode == "explicit"
        self._was_explicit = False
        # A lock lives for as long as an operation holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waits: dict[str, _Operation] = {}
        self._operations: set[asyncio.Task[None]] = set()
        registry.on_model_change(self._on_model_change)
        registry.on_worker_lost(lambda _worker: self._on_model_change(""))

    @property
    def is_explicit(self) -> bool:
        """Whether any worker carries operations out; without workers, whether any of the last ones did."""
        self._update_mode()
        return self._was_explicit

    def _update_mode(self) -> None:
        if self._live_workers():
            self._was_explicit = bool(self._operated_workers())

    async def load(
        self, name: str, config: str | None, files: Mapping[str, bytes], drops_override: bool = False
    ) -> None:
        """Loads the model, with a configuration in JSON and files by path that replace those on disk, if given.

        Without them a model whose files have not changed keeps the configuration of an earlier load, unless this one
        `drops_override`. Returns when it is loaded. Raises WeirError with Triton's codes and texts.
        """
        check_model_name(name)
        self.check_allowed()
        if len(files) > MAX_FILES:
            raise invalid(f"a load request may have {MAX_FILES} files, got {len(files)}")
        if config is not None and len(config) > MAX_CONFIG_LENGTH:
            raise invalid(f"a configuration may have {MAX_CONFIG_LENGTH} characters, got {len(config)}")
        # Triton appends the path to that of the model's folder, so a path that begins with a slash is relative too.
        files = {path.lstrip("/"): content for path, content in files.items()}
        wanted = WantedModel(True, config, drops_override=drops_override or UNSET)
        await self._run(name, self._load(name, wanted, files))

    async def load_registered(self, name: str, registered: RegisteredFolder, explicit: bool = True) -> None:
        """Loads the model from a folder outside of the repositories, else as `load`.

        A model that is not `explicit` is unloaded with the ensemble that needs it.
        """
        check_model_name(name)
        self.check_allowed()
        await self._run(name, self._load(name, WantedModel(True, registered=registered), {}, explicit))

    async def unload(self, name: str, with_dependents: bool) -> None:
        """Unloads the model; returns when no version accepts new requests. An unknown model counts as unloaded.

        `with_dependents` also unloads the models that were loaded for this one only. Raises WeirError if a worker that
        carries out no operations still serves the model.
        """
        self.check_allowed()
        if self._desired.get(name) is None and not self._live_workers():
            raise unavailable(f"failed to unload '{name}', there is no worker")
        dependents: list[str] = []
        if with_dependents:
            explicit = [entry.name for entry in self._desired.all() if entry.explicit and entry.wanted.load]
            in_use = self._configs(in_use=True)
            configs = [config for config in self._configs() if config.name == name]
            dependents = list(dict.fromkeys(d for config in configs for d in unneeded_models(config, in_use, explicit)))
        await self._run(name, self._unload(name))
        await self._await_withdrawn()
        if dependents:
            await self._await_unloaded(name)
        for dependent in dependents:
            await self._run(dependent, self._unload(dependent))
        self._check_unloaded(name)

    async def _await_withdrawn(self) -> None:
        """Waits until workers have withdrawn the ensembles of unloaded models; `DEPENDENTS_TIMEOUT_S` at most."""
        until_s = time.monotonic() + DEPENDENTS_TIMEOUT_S
        while self._has_incomplete_ensembles() and time.monotonic() < until_s:
            await asyncio.sleep(_UNLOAD_POLL_S)

    def _has_incomplete_ensembles(self) -> bool:
        """Whether an ensemble is READY although no worker serves one of its models."""
        records = [
            record for worker in self._live_workers() for record in self._registry.workers[worker].models.values()
        ]
        ready = [record for record in records if any(row.state == ModelState.READY for row in record.versions.values())]
        names = {plain_name(record.name) for record in ready}
        ensembles = [record.config for record in ready if record.config and "ensemble_scheduling" in record.config]
        needed = {plain_name(n) for config in ensembles for n in composing_models(ModelConfig.model_validate(config))}
        return not needed <= names

    async def _await_unloaded(self, name: str) -> None:
        """Waits until the ensemble's running requests, which still need its models, have ended; `DEPENDENTS_TIMEOUT_S`
        at most.
        """
        until_s = time.monotonic() + DEPENDENTS_TIMEOUT_S
        while time.monotonic() < until_s and any(
            version.state == ModelState.UNLOADING
            for record in self._records(name)
            for version in record.versions.values()
        ):
            await asyncio.sleep(_UNLOAD_POLL_S)

    def check_allowed(self) -> None:
        """Raises WeirError (UNAVAILABLE, with Triton's text) unless workers carry out loads and unloads on request."""
        if not (self._is_allowed and (self.is_explicit or not self._live_workers())):
            polls = any(view.record.model_control_mode == "poll" for view in self._registry.workers.values())
            raise unavailable(NOT_ALLOWED if polls else NOT_ALLOWED_HERE)

    def _check_unloaded(self, name: str) -> None:
        """Raises WeirError with Triton's text if workers that carry out no operations still serve the model."""
        others = self._live_workers() - self._operated_workers()
        records = self._records(name, others)
        ready = {n for record in records for n, row in record.versions.items() if row.state == ModelState.READY}
        if ready:
            left = ", ".join(map(str, sorted(ready)))
            raise internal(f"failed to unload '{name}', versions that are still available: {left}")

    async def _run(self, name: str, operation: Coroutine[Any, Any, None]) -> None:
        """Carries the operation out after earlier ones on the model. It continues if its caller is cancelled."""
        if len(self._operations) >= MAX_OPERATIONS:
            operation.close()
            raise overloaded("too many loads and unloads are in progress")
        task = asyncio.get_running_loop().create_task(self._in_turn(name, operation))
        self._operations.add(task)
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    async def _in_turn(self, name: str, operation: Coroutine[Any, Any, None]) -> None:
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                await operation
        except (NatsError, OSError, TimeoutError) as error:
            raise unavailable(_broker_failure(error)) from error
        finally:
            operation.close()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._operations.discard(task)
        if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), WeirError):
            logger.error("an operation on the repository failed", exc_info=task.exception())

    async def _load(self, name: str, wanted: WantedModel, files: Mapping[str, bytes], explicit: bool = True) -> None:
        """Loads what is `wanted`, with the contents of its `files` by path."""
        workers = self._operated_workers()
        if not workers:
            raise unavailable(f"failed to load '{name}', there is no worker")
        now_ns = time.time_ns()
        names = {path: object_name(name, now_ns, number) for number, path in enumerate(files)}
        wanted = replace(wanted, files=names)

        def entry_after(known: DesiredModel | None) -> DesiredModel:
            return DesiredModel(
                name, next_revision(known, time.time_ns()), wanted, self._in_force(name, known), explicit
            )

        operation = _Operation(entry_after, workers, self._registry)
        if files:
            referenced = {object for entry in self._desired.all() for object in entry.objects()}
            await self._files.sweep(referenced, now_ns)
            await self._files.put({names[path]: content for path, content in files.items()})
        try:
            await self._carry_out(name, operation)
        finally:
            await self._clean_up(name, operation, workers, set(names.values()))
        results = operation.results
        if not results:
            raise unavailable(f"failed to load '{name}', every worker left the cluster while loading it")
        failures = [result for result in results.values() if result.error_code]
        # A worker without the model in its repositories, or on which it is not placed, need not load it as long as another
        # worker does.
        absent = [result for result in failures if _is_absent(result)]
        broken = [result for result in failures if not _is_absent(result)]
        if broken:
            raise WeirError(ErrorCode.from_number(broken[0].error_code), broken[0].error)
        if len(absent) == len(results):
            shown = max(absent, key=lambda result: (result.elsewhere, bool(result.reason or result.rejected)))
            raise WeirError(ErrorCode.from_number(shown.error_code), shown.error)

    async def _clean_up(self, name: str, operation: _Operation, workers: set[str], objects: set[str]) -> None:
        """After a load: removes a failed load from the desired state, and objects that no entry refers to."""
        entry, before = operation.entry, operation.before
        if entry is not None:
            is_in_force = any(record.in_force == entry.revision for record in self._records(name))
            is_done = is_in_force or any(_has_done(one, entry.revision) for one in self._records(name, workers))
            # A load that has left all workers as they were leaves the desired state too, with a configuration in force.
            is_no_op = is_done and not is_in_force and entry.wanted.keeps_unchanged and entry.fallback is not None
            wanted = entry.wanted if is_done and not is_no_op else entry.fallback
            kept = None if wanted is None else DesiredModel(name, entry.revision, wanted, None, entry.explicit)
            newest = await self._write(name, lambda newest: kept if newest == entry else newest)
            if newest is not None and newest.revision > entry.revision:
                return  # another role has written a later operation
            objects = (objects | (set() if before is None else before.objects())) - (
                set() if newest is None else newest.objects()
            )
        await self._files.remove(objects)

    async def _unload(self, name: str) -> None:
        known = self._desired.get(name)
        workers = {worker for worker in self._operated_workers() if self._records(name, [worker])}
        if known is None and not workers:
            return

        def entry_after(known: DesiredModel | None) -> DesiredModel:
            return DesiredModel(name, next_revision(known, time.time_ns()), WantedModel(load=False))

        operation = _Operation(entry_after, workers, self._registry)
        await self._carry_out(name, operation)
        if operation.before is not None:
            await self._files.remove(operation.before.objects())

    def _in_force(self, name: str, known: DesiredModel | None) -> WantedModel | None:
        """The desired state that workers serve now, None if they do not serve the model. `known` is its entry."""
        serving = [record for record in self._records(name) if record.config]
        if not serving:
            return None
        if known is None:
            return WantedModel(load=True)
        if known.fallback is None or any(record.in_force == known.revision for record in serving):
            return known.wanted
        return known.fallback

    async def _carry_out(self, name: str, operation: _Operation) -> None:
        """Writes the entry; returns when the operation has the results of all its workers that have not left."""
        # The wait begins before the write: a result may come before the broker's acknowledgement of the write.
        self._waits[name] = operation
        try:
            await self._write(name, operation.change)
            operation.update()
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                await operation.complete.wait()
        except TimeoutError:
            raise unavailable(f"'{name}': the workers have not finished the operation in time") from None
        finally:
            del self._waits[name]

    async def _write(
        self, name: str, change: Callable[[DesiredModel | None], DesiredModel | None]
    ) -> DesiredModel | None:
        """Changes the entry, and tries again while the broker is not connected."""
        tries_until = time.monotonic() + WRITE_TIMEOUT_S
        while True:
            try:
                return await self._desired.update(name, change)
            except (NatsError, OSError, TimeoutError) as error:
                if time.monotonic() > tries_until:
                    raise unavailable(_broker_failure(error)) from error
            await asyncio.sleep(_WRITE_RETRY_S)

    def _live_workers(self) -> set[str]:
        return {worker for worker, view in self._registry.workers.items() if not view.record.draining}

    def _operated_workers(self) -> set[str]:
        return {worker for worker in self._live_workers() if self._registry.workers[worker].record.takes_operations}

    def _records(self, name: str, workers: Iterable[str] | None = None) -> list[ModelRecord]:
        """The records, on these workers or all live ones, of the models that an operation on `name` applies to.

        With namespacing those are the models of all namespaces.
        """
        views = self._registry.workers
        return [
            record
            for worker in (self._live_workers() if workers is None else workers)
            if worker in views
            for identity, record in views[worker].models.items()
            if name in (identity, plain_name(identity))
        ]

    def _configs(self, in_use: bool = False) -> list[ModelConfig]:
        """The configurations of all models, or with `in_use` of those that are not being unloaded."""
        records = [
            record
            for view in self._registry.workers.values()
            for record in view.models.values()
            if not in_use
            or any(row.state in (ModelState.READY, ModelState.LOADING) for row in record.versions.values())
        ]
        return [ModelConfig.model_validate(record.config) for record in records if record.config is not None]

    def _on_model_change(self, name: str) -> None:
        self._update_mode()
        if name in self._waits:
            self._waits[name].update()
        elif not name:
            for wait in self._waits.values():
                wait.update()


def _broker_failure(error: Exception) -> str:
    return f"the message broker rejected the operation: {type(error).__name__}"


def _has_done(record: ModelRecord, revision: int) -> bool:
    """Whether the worker serves the result of operation `revision`; not if the model is placed on other workers."""
    is_serving = any(row.state == ModelState.READY for row in record.versions.values())
    return is_serving and not record.error_code and record.revision >= revision


def _is_absent(result: ModelRecord) -> bool:
    """Whether the worker does not have the model, or it is not placed there; not a failure."""
    return result.elsewhere or result.error_code == ErrorCode.INTERNAL.number
