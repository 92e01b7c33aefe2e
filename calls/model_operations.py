"""`ModelOperations`: loading and unloading models on request: of clients at a gateway, of Python models in a worker.

An operation is an entry in the desired state, which all workers follow; it has ended when every worker that was there has
told that it carried it out. A worker that dies meanwhile is not waited for: its successor reads the entry.

Which workers carry operations out they tell themselves (`WorkerRecord.model_control_mode`); the others are not asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from nats.errors import Error as NatsError

from bus.desired_models import DesiredModels, next_revision
from bus.model_files import ModelFiles, object_name
from bus.registry import RegistryView
from repository.dependencies import left_over
from repository.paths import check_model_name
from runtime.containment import contained
from schemas.desired import MAX_CONFIG_LENGTH, MAX_FILES, DesiredModel, WantedModel
from schemas.errors import ErrorCode, WeirError, internal, invalid, overloaded, unavailable
from schemas.model_config import ModelConfig
from schemas.model_identity import plain_name
from schemas.registry import ModelRecord, ModelState

logger = logging.getLogger("weir.calls")

OPERATION_TIMEOUT_S = 1800.0
"""How long a load or unload is waited for; it goes on behind its caller's back."""

DEPENDENTS_PATIENCE_S = 10.0
"""How long the models of an ensemble that is unloaded with them are kept for its running requests."""

WRITE_PATIENCE_S = 10.0
"""How long an operation is written again where the broker does not take it."""

_GONE_POLL_S = 0.02
_WRITE_AGAIN_S = 0.1

MAX_OPERATIONS = 256
"""Loads and unloads that one role waits for."""


class ModelOperations:
    """See the module. A role with a `mode` of its own refuses loads and unloads unless that is "explicit"."""

    def __init__(
        self, registry: RegistryView, desired: DesiredModels, files: ModelFiles, mode: str = "explicit"
    ) -> None:
        self._registry = registry
        self._desired = desired
        self._files = files
        self._is_allowed = mode == "explicit"
        self._was_explicit = False
        # A lock is there for as long as some operation holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._awaited: dict[str, _Awaited] = {}
        self._operations: set[asyncio.Task[None]] = set()
        registry.on_model_change(self._on_model_change)
        registry.on_worker_lost(lambda _worker: self._on_model_change(""))

    @property
    def is_explicit(self) -> bool:
        """Whether any worker carries operations out; while none is there, whether one did of those that were last."""
        self._look_at_modes()
        return self._was_explicit

    def _look_at_modes(self) -> None:
        if self._live_workers():
            self._was_explicit = bool(self._workers_to_ask())

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Loads the model, with a configuration in JSON and files by path that stand in for those on disk, if given.

        Returns when it is loaded. Raises WeirError with Triton's codes and texts.
        """
        check_model_name(name)
        self._check_mode()
        if len(files) > MAX_FILES:
            raise invalid(f"a load request may bring {MAX_FILES} files, got {len(files)}")
        if config is not None and len(config) > MAX_CONFIG_LENGTH:
            raise invalid(f"a configuration may have {MAX_CONFIG_LENGTH} characters, got {len(config)}")
        # Triton appends a path to that of the model's folder, so one that begins with a slash lies in it, too.
        files = {path.lstrip("/"): content for path, content in files.items()}
        await self._run(name, self._load(name, config, files))

    async def unload(self, name: str, with_dependents: bool) -> None:
        """Unloads the model; returns when no version takes new requests. A model that is not there is unloaded.

        `with_dependents` also unloads the models that were loaded for its sake alone. Raises WeirError where a worker that
        carries out no operations still serves the model.
        """
        self._check_mode()
        if self._desired.get(name) is None and not self._live_workers():
            raise unavailable(f"failed to unload '{name}', no worker is there to unload it")
        dependents: list[str] = []
        if with_dependents:
            explicit = [entry.name for entry in self._desired.all() if entry.explicit and entry.wanted.load]
            in_use = self._configs(in_use=True)
            configs = [config for config in self._configs() if config.name == name]
            dependents = list(dict.fromkeys(d for config in configs for d in left_over(config, in_use, explicit)))
        await self._run(name, self._unload(name))
        if dependents:
            await self._await_gone(name)
        for dependent in dependents:
            await self._run(dependent, self._unload(dependent))
        self._check_gone(name)

    async def _await_gone(self, name: str) -> None:
        """Returns when nothing runs in the ensemble any more, or soon: its requests still need the models it is made of."""
        gone = time.monotonic() + DEPENDENTS_PATIENCE_S
        while time.monotonic() < gone and any(
            version.state == ModelState.UNLOADING
            for record in self._records(name)
            for version in record.versions.values()
        ):
            await asyncio.sleep(_GONE_POLL_S)

    def _check_mode(self) -> None:
        if not (self._is_allowed and (self.is_explicit or not self._live_workers())):
            raise unavailable("explicit model load / unload is not allowed if polling is enabled")

    def _check_gone(self, name: str) -> None:
        """Raises WeirError, in Triton's words, where workers that nobody may ask serve the model on."""
        others = self._live_workers() - self._workers_to_ask()
        records = self._records(name, others)
        ready = {n for record in records for n, row in record.versions.items() if row.state == ModelState.READY}
        if ready:
            left = ", ".join(map(str, sorted(ready)))
            raise internal(f"failed to unload '{name}', versions that are still available: {left}")

    async def _run(self, name: str, operation: Coroutine[Any, Any, None]) -> None:
        """Carries the operation out after those on the same model; it goes on when its caller has gone."""
        if len(self._operations) >= MAX_OPERATIONS:
            operation.close()
            raise overloaded("too many loads and unloads are under way")
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

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        workers = self._workers_to_ask()
        if not workers:
            raise unavailable(f"failed to load '{name}', no worker is there to load it")
        known = self._desired.get(name)
        revision = next_revision(known, time.time_ns())
        names = {path: object_name(name, revision, number) for number, path in enumerate(files)}
        wanted = WantedModel(True, config, names)
        entry = DesiredModel(name, revision, wanted, self._in_force(name))
        if files:
            referenced = {object for entry in self._desired.all() for object in entry.objects()}
            await self._files.sweep(referenced, time.time_ns())
            await self._files.put({names[path]: content for path, content in files.items()})
        try:
            answers = await self._ask(entry, workers)
        finally:
            await self._settle(entry, known, workers)
        if not answers:
            raise unavailable(f"failed to load '{name}', every worker has gone while it was loading it")
        failures = [answer for answer in answers.values() if answer.error_code]
        # A worker without the model in its repositories need not have it, as long as some other does; nor need one that
        # the model is not for.
        absent = [answer for answer in failures if _is_absent(answer)]
        broken = [answer for answer in failures if not _is_absent(answer)]
        if broken:
            raise WeirError(ErrorCode.from_number(broken[0].error_code), broken[0].error)
        if len(absent) == len(answers):
            told = max(absent, key=lambda answer: answer.elsewhere)
            raise WeirError(ErrorCode.from_number(told.error_code), told.error)

    async def _settle(self, entry: DesiredModel, before: DesiredModel | None, workers: set[str]) -> None:
        """After a load: what did not work is wanted no longer, and what nobody refers to any more is removed."""
        kept: DesiredModel | None = entry
        is_in_force = any(record.in_force == entry.revision for record in self._records(entry.name))
        if not is_in_force and not any(_has_done(one, entry.revision) for one in self._records(entry.name, workers)):
            fallback = entry.fallback
            kept = (
                None if fallback is None else DesiredModel(entry.name, entry.revision, fallback, None, entry.explicit)
            )
        newest = self._desired.get(entry.name)
        if newest is None or newest.revision > entry.revision:
            return  # another role has asked for something else meanwhile
        if kept is None:
            await self._desired.remove(entry.name)
        else:
            await self._write(DesiredModel(kept.name, kept.revision, kept.wanted, None, kept.explicit))
        objects = entry.objects() | (set() if before is None else before.objects())
        await self._files.remove(objects - (set() if kept is None else kept.objects()))

    async def _unload(self, name: str) -> None:
        known = self._desired.get(name)
        workers = {worker for worker in self._workers_to_ask() if self._records(name, [worker])}
        if known is None and not workers:
            return
        revision = next_revision(known, time.time_ns())
        await self._ask(DesiredModel(name, revision, WantedModel(load=False)), workers)
        if known is not None:
            await self._files.remove(known.objects())

    def _in_force(self, name: str) -> WantedModel | None:
        """What workers serve of the model now, if anything."""
        known = self._desired.get(name)
        serving = [record for record in self._records(name) if record.config]
        if not serving:
            return None
        if known is None:
            return WantedModel(load=True)
        if known.fallback is None or any(record.in_force == known.revision for record in serving):
            return known.wanted
        return known.fallback

    async def _ask(self, entry: DesiredModel, workers: set[str]) -> dict[str, ModelRecord]:
        """Writes the entry; returns what each of these workers told after it. One that has gone is left out."""
        # Listened before it is written: the answer may be there before the broker's word that the entry is.
        awaited = self._awaited[entry.name] = _Awaited(entry.name, entry.revision, workers, self._registry)
        try:
            await self._write(entry)
            awaited.look()
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                await awaited.complete.wait()
        except TimeoutError:
            raise unavailable(f"'{entry.name}': the workers have not ended the operation in time") from None
        finally:
            del self._awaited[entry.name]
        return awaited.answers

    async def _write(self, entry: DesiredModel) -> None:
        """Writes the entry, again and again while the broker is away for a moment: it is the same operation each time."""
        tries_until = time.monotonic() + WRITE_PATIENCE_S
        while True:
            try:
                await self._desired.write(entry)
                return
            except (NatsError, OSError, TimeoutError) as error:
                if time.monotonic() > tries_until:
                    raise unavailable(_broker_failure(error)) from error
            await asyncio.sleep(_WRITE_AGAIN_S)

    def _live_workers(self) -> set[str]:
        return {worker for worker, view in self._registry.workers.items() if not view.record.draining}

    def _workers_to_ask(self) -> set[str]:
        return {worker for worker in self._live_workers() if self._registry.workers[worker].record.takes_operations}

    def _records(self, name: str, workers: Iterable[str] | None = None) -> list[ModelRecord]:
        """What these workers, or all live ones, tell of the models that an operation on `name` is one on.

        With namespacing that may be several: those of all namespaces.
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

    @contained()
    def _on_model_change(self, name: str) -> None:
        self._look_at_modes()
        if name in self._awaited:
            self._awaited[name].look()
        elif not name:
            for awaited in self._awaited.values():
                awaited.look()


def _broker_failure(error: Exception) -> str:
    return f"the message broker did not do as asked: {type(error).__name__}"


def _has_done(record: ModelRecord, revision: int) -> bool:
    """Whether the worker serves what operation `revision` asked for; one that has left the model to others does not."""
    is_serving = any(row.state == ModelState.READY for row in record.versions.values())
    return is_serving and not record.error_code and record.revision >= revision


def _is_absent(answer: ModelRecord) -> bool:
    """Whether the worker has not failed, but simply does not have the model."""
    return answer.elsewhere or answer.error_code == ErrorCode.INTERNAL.number


class _Awaited:
    """The workers' answers to one operation. A record may be there for a moment only, so each change is looked at."""

    def __init__(self, name: str, revision: int, workers: set[str], registry: RegistryView) -> None:
        self._name = name
        self._revision = revision
        self._workers = workers
        self._registry = registry
        self.answers: dict[str, ModelRecord] = {}
        self.complete = asyncio.Event()

    def look(self) -> None:
        live = {worker for worker in self._workers if worker in self._registry.workers}
        for worker in live:
            view = self._registry.workers[worker]
            record = view.models.get(self._name)
            if record is not None and record.revision >= self._revision:
                self.answers[worker] = record
        there = {worker for worker in live if not self._registry.workers[worker].record.draining}
        if there <= self.answers.keys():
            self.complete.set()
