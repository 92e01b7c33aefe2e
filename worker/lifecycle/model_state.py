"""The actual state of the models of one worker.

`ManagedModel` is the state of one model between loads and unloads, `ManagedModels` the table of them, with one operation
at a time for each, and `RecordPublisher` writes their records to the registry. What changes the state is in
`weir.worker.lifecycle.transitions`, what decides about it in `weir.worker.lifecycle.reconciler`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from weir.bus.payloads.reach import process_reach
from weir.runtime.containment import contained, report
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.wire.model_control import WantedModel
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.override_folder import OverrideFolder
from weir.worker.lifecycle.served_version import ServedVersion

logger = logging.getLogger("weir.worker")


class ManagedModel:
    """One model on this worker: its loaded versions, the outcome of the last operation, and the last request.

    `name` is the model's identity (name and, where needed, namespace). `result` holds the loaded versions; those in
    `retiring` still run their batches and are unloaded afterwards; `past` has a record for each version that is no longer
    loaded. `requested` is the newest request to the repository API, of revision `requested_revision`; `revision` is the
    last one carried out and `in_force` the one that loaded what serves. An operation holds `lock`; `pending` operations
    hold it or wait for it. `path` and `seen` are the model's folder and its fingerprint at the last attempt to load it.

    `reason` says why nothing serves, `rejected` why the last reload failed although older versions serve on. `is_deleted`
    means that no repository has the model any more, `is_moving` that other workers take it over, and `elsewhere` that it
    belongs on other workers, which is no failure. `namesakes` are the identities behind an ambiguous name.
    """

    def __init__(self, name: str, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.pending = 0
        self.result: LoadResult | None = None
        self.retiring: set[int] = set()
        self.past: dict[int, VersionRecord] = {}
        self.reason = ""
        self.rejected = ""
        self.error: WeirError | None = None
        self.path: Path | None = None
        self.seen: object = None
        self.folder: OverrideFolder | None = None
        self.is_deleted = False
        self.is_moving = False
        self.elsewhere = False
        self.drain_task: asyncio.Task[None] | None = None
        self.requested: WantedModel | None = None
        self.requested_revision = 0
        self.revision = 0
        self.in_force = 0
        self.namesakes: frozenset[str] = frozenset()
        self._clock_ns = clock_ns

    @property
    def served(self) -> dict[int, ServedVersion]:
        """Every loaded version by number, retiring ones included."""
        return {} if self.result is None else self.result.served

    @property
    def is_serving(self) -> bool:
        """Whether at least one version is loaded and not retiring."""
        return bool(self.served.keys() - self.retiring)

    @property
    def is_blank(self) -> bool:
        """Whether nothing about the model needs to be remembered."""
        state = self.result or self.retiring or self.past or self.reason or self.drain_task or self.namesakes
        return not (state or self.seen)

    @property
    def failure(self) -> str:
        """Why the model does not serve completely; "" if it does, or if it belongs on other workers."""
        if self.elsewhere:
            return ""
        return self.reason or next((row.reason for row in self.past.values() if row.reason not in ("", UNLOADED)), "")

    def adopt(self, result: LoadResult) -> list[ServedVersion]:
        """Replaces the loaded versions with those of `result`. Returns the replaced ones, which no longer serve.

        Versions that `result` does not have keep serving as retiring versions.
        """
        old = self.served
        replaced = [served for number, served in old.items() if result.served.get(number, served) is not served]
        self.retiring = old.keys() - result.served.keys()
        result.served = {**{number: old[number] for number in self.retiring}, **result.served}
        self.result = result
        # Earlier failures are obsolete; records of unloaded versions stay.
        self.past = {
            number: row for number, row in self.past.items() if row.reason == UNLOADED and number not in result.served
        }
        self.reason = self.rejected = ""
        self.is_deleted = self.is_moving = self.elsewhere = False
        return replaced

    def reject(self, result: LoadResult) -> None:
        """Records a failed load. Versions that serve are not affected."""
        self.past |= {number: row for number, row in result.records.items() if number not in self.served}
        self.elsewhere = result.elsewhere and not self.served
        self.is_moving = self.is_moving and bool(self.served)
        if not self.served:
            self.reason = result.reason
        else:
            self.rejected = result.reason or _first_failure(result)

    def fail(self, error: Exception) -> None:
        """Records an operation that raised an unexpected exception. Versions that serve are not affected."""
        reason = f"{ErrorCode.INTERNAL.title}: {type(error).__name__}: {error}"
        self.error = internal(f"load failed for model '{self.name}': {type(error).__name__}: {error}")
        self.revision = max(self.revision, self.requested_revision)
        if self.is_serving:
            self.rejected = reason
        else:
            self.reason = reason

    def retire(self) -> None:
        """Marks every version for unloading."""
        self.retiring = set(self.served)
        self.reason = self.rejected = ""

    def record_unloaded(self, numbers: set[int]) -> None:
        """Records versions as unloaded, except those that were loaded again in the meantime."""
        unloaded = numbers - self.served.keys()
        self.retiring -= unloaded
        for number in unloaded:
            self.past[number] = VersionRecord(ModelState.UNAVAILABLE, UNLOADED)

    def record(self) -> ModelRecord:
        """The model's record in the registry."""
        versions = dict(self.past)
        for number in self.retiring:
            versions[number] = VersionRecord(ModelState.UNLOADING, instances=0)
        for number, served in self.served.items():
            state = ModelState.UNLOADING if number in self.retiring else ModelState.READY
            versions[number] = replace(served.record, state=state)
        config = None if self.result is None else self.result.config
        return ModelRecord(
            name=self.name,
            versions=dict(sorted(versions.items())),
            config=None if config is None else config.model_dump(exclude_defaults=True),
            labels={} if self.result is None else self.result.labels,
            completed=[] if self.result is None else self.result.completed,
            reason=self.reason if not versions else "",
            written_ns=self._clock_ns(),
            revision=self.revision,
            in_force=self.in_force if self.is_serving else 0,
            error_code=0 if self.error is None else self.error.code.number,
            error="" if self.error is None else self.error.message,
            rejected=self.rejected if self.is_serving else "",
            namespace="" if self.result is None else self.result.namespace,
            elsewhere=self.elsewhere or self.is_moving,
            stays_on_host="" if config is None else process_reach().problem_of(config.output),
        )


def _first_failure(result: LoadResult) -> str:
    """Why the first version failed that did; versions unloaded because of another one's failure do not count."""
    return next((row.reason for row in result.records.values() if row.reason not in ("", UNLOADED)), "")


class RecordWriter(Protocol):
    """Writes records to the registry: implemented by `weir.worker.service.WorkerService`."""

    async def write_model(self, record: ModelRecord) -> None:
        """Writes the record of a model."""

    async def remove_model(self, name: str) -> None:
        """Removes the record of a model."""

    async def describe(self, **changes: Any) -> None:
        """Writes the worker's own record with these fields of `WorkerRecord` changed."""


class RecordPublisher:
    """Publishes records of models and of the worker. A broker that is away only delays them.

    The registry writes everything again after a reconnect, so a failed write is logged and not repeated here.
    """

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer

    async def publish(self, model: ManagedModel) -> None:
        """Writes the model's record; removes it if this worker has neither versions nor a failure to report."""
        record = model.record()
        await self.write(record)
        if not record.is_known:
            # Whoever waits for the operation has read its outcome in the record that was just written.
            await self._attempt(self._writer.remove_model(model.name), model.name)

    async def write(self, record: ModelRecord) -> None:
        """Writes a record. One that is too large for a NATS message becomes the record of an unavailable model."""
        await self._attempt(self._write(record), record.name)

    async def _write(self, record: ModelRecord) -> None:
        try:
            await self._writer.write_model(record)
        except MaxPayloadError:
            reason = (
                f"{ErrorCode.INVALID_ARG.title}: its configuration and labels are larger than a message of NATS may be"
            )
            logger.error("'%s' can't be served: %s", record.name, reason)
            versions = {
                number: replace(row, state=ModelState.UNAVAILABLE, reason=reason, instances=0, numbers=())
                for number, row in record.versions.items()
            }
            error = f"load failed for model '{record.name}': {reason}\n"
            code = ErrorCode.INVALID_ARG.number
            short = replace(record, versions=versions, config=None, labels={}, error_code=code, error=error)
            await self._writer.write_model(short)

    async def describe(self, **changes: Any) -> None:
        """Writes the worker's own record with these fields of `WorkerRecord` changed."""
        await self._attempt(self._writer.describe(**changes), "this worker")

    async def _attempt(self, write: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await write
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning(
                "the registry record of '%s' was not written (it is written again after a reconnect): %s: %s",
                name,
                type(error).__name__,
                error,
            )


class _Use:
    """How many ensembles with models of one name are being loaded, and the event that none is any more."""

    def __init__(self) -> None:
        self.users = 0
        self.is_over = asyncio.Event()


class ManagedModels:
    """The models of a worker by name, with one operation at a time for each. Blank models are removed."""

    def __init__(self, records: RecordPublisher) -> None:
        self._by_name: dict[str, ManagedModel] = {}
        self._uses: dict[str, _Use] = {}
        self.records = records

    def __iter__(self) -> Iterator[ManagedModel]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> ManagedModel | None:
        """The model, or None if this worker has no state of it."""
        return self._by_name.get(name)

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[ManagedModel]:
        """Runs one operation on the model, after the operations that were requested before it.

        An unexpected exception fails this operation only: it is recorded, published and not raised again.
        """
        model = self._by_name.setdefault(name, ManagedModel(name))
        model.pending += 1
        try:
            async with model.lock:
                try:
                    yield model
                except Exception as error:  # noqa: BLE001 - a failure of one model must not affect others
                    report("weir.worker.lifecycle.model_state: an operation on a model", error)
                    model.fail(error)
                    await self.records.publish(model)
        finally:
            model.pending -= 1
            self.drop_if_blank(model)

    @contextmanager
    def in_use(self, names: Iterable[str]) -> Iterator[None]:
        """Within the context `unused` waits for these names: an ensemble of models with these names is being loaded."""
        names = list(names)
        for name in names:
            self._uses.setdefault(name, _Use()).users += 1
        try:
            yield
        finally:
            for name in names:
                use = self._uses[name]
                use.users -= 1
                if not use.users:
                    del self._uses[name]
                    use.is_over.set()

    async def unused(self, name: str) -> None:
        """Returns when no ensemble is being loaded that has models of this name.

        Not to be awaited in a turn: those ensembles may be waiting for it.
        """
        while (use := self._uses.get(name)) is not None:
            await use.is_over.wait()

    def drop_if_blank(self, model: ManagedModel) -> None:
        """Removes the model if no operation is pending and nothing about it needs to be remembered."""
        if not model.pending and model.is_blank:
            self._by_name.pop(model.name, None)

    def failures(self, names: Iterable[str]) -> dict[str, str]:
        """The reasons of those among these models that do not serve completely, by name."""
        found = (self._by_name.get(name) for name in names)
        return {model.name: model.failure for model in found if model is not None and model.failure}


class OperationTasks:
    """Background tasks of a worker's reconciler.

    At shutdown *operations* are cancelled; *cleanups*, which release what versions hold, are awaited.
    """

    def __init__(self) -> None:
        self._background: asyncio.TaskGroup | None = None
        self._is_closing = False
        self._operations: set[asyncio.Task[None]] = set()
        self._cleanups: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether operations are accepted: from `start` until `cancel_operations`."""
        return self._background is not None and not self._is_closing

    def start(self, background: asyncio.TaskGroup) -> None:
        """Creates tasks in `background` from now on."""
        self._background = background

    def operate(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs an operation in a task."""
        return self._create(work, self._operations)

    def clean_up(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a cleanup in a task."""
        return self._create(work, self._cleanups)

    def cancel_operations(self) -> None:
        """Cancels all operations; `is_open` is False afterwards."""
        self._is_closing = True
        for task in self._operations:
            task.cancel()

    async def wait_for_cleanups(self, timeout_s: float) -> None:
        """Returns when all cleanups have ended, or after `timeout_s`."""
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=timeout_s)

    def _create(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        assert self._background is not None  # noqa: S101 - `start` comes first
        task = self._background.create_task(self._run(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    @contained()
    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        await work
