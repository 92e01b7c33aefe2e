"""Operations on one model wait for each other, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from nats.errors import TimeoutError as NatsTimeoutError

from tests.support.waiting import eventually
from weir.bus.kv.desired_models import DesiredModels
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import ensure_streams
from weir.calls import model_control as model_operations
from weir.calls.model_control import ModelControl
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.model_control import MAX_CONFIG_LENGTH, DesiredModel, WantedModel
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord


class NoRegistry:
    """A registry that never changes."""

    workers: dict[str, Any]

    def on_model_change(self, _listener: object) -> None:
        pass

    def on_worker_lost(self, _listener: object) -> None:
        pass


async def test_operations_on_one_model_run_one_after_another() -> None:
    nothing = cast(Any, None)
    operations = ModelControl(cast(Any, NoRegistry()), nothing, nothing, "explicit")
    running: list[str] = []
    done: list[str] = []

    async def operation(name: str) -> None:
        running.append(name)
        assert running == [name], "two at once"
        for _ in range(3):
            await asyncio.sleep(0)
        running.remove(name)
        done.append(name)

    async def later(name: str, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await operations._run("model", operation(name))

    names = [str(number) for number in range(12)]
    await asyncio.gather(*(later(name, int(name)) for name in names))
    assert done == names
    assert not operations._locks


class Broker:
    """Takes entries after `failures` attempts; `carry_out(entry)` is what workers do then."""

    def __init__(self, known: DesiredModel, failures: int = 0) -> None:
        self.entries = [known]
        self.failures = failures
        self.carry_out: Callable[[DesiredModel], None] = lambda _entry: None

    def get(self, name: str) -> DesiredModel:
        return self.entries[-1]

    async def update(self, _name: str, change: Callable[[DesiredModel], DesiredModel]) -> DesiredModel:
        if self.failures:
            self.failures -= 1
            raise NatsTimeoutError
        entry = change(self.entries[-1])
        if entry != self.entries[-1]:
            self.entries.append(entry)
            self.carry_out(entry)
        return entry


class NoFiles:
    async def remove(self, names: set[str]) -> None:
        assert not names


def told(revision: int, in_force: int = 0, error_code: int = 0) -> ModelRecord:
    versions = {1: VersionRecord(ModelState.READY, instances=1)} if in_force else {}
    error = "no" if error_code else ""
    return ModelRecord(
        "m", versions, {"name": "m"}, revision=revision, in_force=in_force, error_code=error_code, error=error
    )


def a_cluster(failures: int = 0, **answers: Callable[[int], ModelRecord]) -> tuple[ModelControl, Broker]:
    """Workers, the first of which serves `m`, that answer with these records to the revision that they are asked for."""
    registry = NoRegistry()
    views = {
        name: SimpleNamespace(record=SimpleNamespace(draining=False, takes_operations=True), models={})
        for name in answers
    }
    registry.workers = views
    views[next(iter(views))].models["m"] = told(1, in_force=1)
    broker = Broker(DesiredModel("m", 1, WantedModel(True)), failures)

    def carry_out(entry: DesiredModel) -> None:
        for name, answer in answers.items():
            if name in views:
                views[name].models["m"] = answer(entry.revision)

    broker.carry_out = carry_out
    return ModelControl(cast(Any, registry), cast(Any, broker), cast(Any, NoFiles())), broker


async def test_a_failed_load_leaves_the_desired_state() -> None:
    operations, broker = a_cluster(
        holder=lambda revision: told(revision, in_force=1, error_code=4), other=lambda revision: told(revision)
    )
    with pytest.raises(WeirError, match="no"):
        await operations.load("m", "{}", {})
    assert [entry.wanted.config for entry in broker.entries] == [None, "{}", None]


async def test_a_configuration_that_is_too_long_is_rejected() -> None:
    operations, broker = a_cluster(holder=lambda revision: told(revision))
    with pytest.raises(WeirError, match="a configuration may have 1048576 characters, got 1048577"):
        await operations.load("m", " " * (MAX_CONFIG_LENGTH + 1), {})
    assert [entry.wanted.config for entry in broker.entries] == [None]  # as at the start


async def test_a_load_that_succeeded_on_one_worker_stays_desired() -> None:
    operations, broker = a_cluster(
        holder=lambda revision: told(revision, in_force=revision), other=lambda revision: told(revision)
    )
    await operations.load("m", "{}", {})
    assert broker.entries[-1].wanted.config == "{}"


async def test_a_load_that_changes_nothing_leaves_the_desired_configuration() -> None:
    operations, broker = a_cluster(holder=lambda revision: told(revision, in_force=1))
    broker.entries = [DesiredModel("m", 1, WantedModel(True, "{}"))]
    await operations.load("m", None, {})
    assert broker.entries[-1].wanted.config == "{}"
    assert broker.entries[-1].revision > 1
    await operations.load("m", None, {}, drops_override=True)
    assert broker.entries[-1].wanted == WantedModel(True, drops_override=True)


async def test_a_load_that_reads_changed_files_drops_the_desired_configuration() -> None:
    operations, broker = a_cluster(holder=lambda revision: told(revision, in_force=revision))
    broker.entries = [DesiredModel("m", 1, WantedModel(True, "{}"))]
    await operations.load("m", None, {})
    assert broker.entries[-1].wanted == WantedModel(True)


async def test_operations_retry_while_the_broker_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_operations, "_WRITE_RETRY_S", 0.0)
    operations, broker = a_cluster(failures=3, holder=lambda revision: told(revision, in_force=revision))
    await operations.load("m", None, {})
    broker.failures = 1
    monkeypatch.setattr(model_operations, "WRITE_TIMEOUT_S", -1.0)
    with pytest.raises(WeirError, match="the message broker rejected the operation: TimeoutError"):
        await operations.load("m", None, {})


async def test_workers_that_carry_out_no_operations_are_not_waited_for() -> None:
    operations, broker = a_cluster(
        fixed=lambda revision: told(1, in_force=1), holder=lambda revision: told(revision, in_force=revision)
    )
    views = operations._registry.workers
    views["fixed"].record = WorkerRecord("fixed", 1)
    await operations.load("m", None, {})
    assert operations.is_explicit
    broker.entries[-1] = DesiredModel("m", 1, WantedModel(True))
    with pytest.raises(WeirError, match="failed to unload 'm', versions that are still available: 1") as refused:
        await operations.unload("m", with_dependents=False)
    assert refused.value.code is ErrorCode.INTERNAL
    views.pop("holder")
    refusal = "explicit model load / unload is not allowed if polling is enabled"
    for operation in (operations.load("m", None, {}), operations.unload("m", with_dependents=False)):
        with pytest.raises(
            WeirError, match=f"{refusal}, nor with --model-control-mode=none, as here: start the server"
        ):
            await operation
    assert not operations.is_explicit
    views["fixed"].record = WorkerRecord("fixed", 1, model_control_mode="poll")
    with pytest.raises(WeirError, match=f"{refusal}$"):
        await operations.load("m", None, {})


def of(name: str, state: ModelState, *parts: str) -> ModelRecord:
    """The record of a model, or of an ensemble of these parts."""
    steps = [{"model_name": part, "model_version": -1} for part in parts]
    config = {"name": name, **({"ensemble_scheduling": {"step": steps}} if parts else {})}
    return ModelRecord(name, {1: VersionRecord(state, instances=0)}, config, revision=1)


async def test_an_unload_returns_once_the_ensembles_of_the_model_are_withdrawn() -> None:
    unloaded = ModelRecord("m", {1: VersionRecord(ModelState.UNLOADING, instances=0)}, {"name": "m"})
    operations, broker = a_cluster(holder=lambda revision: replace(unloaded, revision=revision))
    models = operations._registry.workers["holder"].models
    models |= {"inner": of("inner", ModelState.READY, "m"), "outer": of("outer", ModelState.READY, "inner")}
    models |= {"other": of("other", ModelState.READY, "n"), "n": of("n", ModelState.READY)}
    unload = asyncio.create_task(operations.unload("m", with_dependents=False))
    await eventually(lambda: not broker.entries[-1].wanted.load)
    for name in ("inner", "outer"):
        await asyncio.sleep(0)
        assert not unload.done(), f"'{name}' is still READY"
        models[name] = of(name, ModelState.UNLOADING, "m")
    await asyncio.wait_for(unload, 20)


async def test_the_mode_of_the_last_workers_counts_while_there_is_none() -> None:
    operations, broker = a_cluster(holder=lambda revision: told(revision, in_force=revision))
    assert operations.is_explicit
    operations._registry.workers.clear()
    assert operations.is_explicit
    with pytest.raises(WeirError, match="failed to load 'm', there is no worker"):
        await operations.load("m", None, {})
    await operations.unload("m", with_dependents=False)
    assert not broker.entries[-1].wanted.load, "the next worker will not load it"


class SlowFiles(NoFiles):
    """Files whose upload takes until `may_end` is set."""

    def __init__(self) -> None:
        self.is_uploading, self.may_end = asyncio.Event(), asyncio.Event()

    async def sweep(self, _referenced: set[str], _now_ns: int) -> None:
        pass

    async def put(self, _contents: dict[str, bytes]) -> None:
        self.is_uploading.set()
        await self.may_end.wait()


class OneWorker(NoRegistry):
    """The registry while one worker carries each operation out at once."""

    def __init__(self) -> None:
        record = SimpleNamespace(draining=False, takes_operations=True)
        self.workers = {"w": SimpleNamespace(record=record, models={"m": told(1, in_force=1)})}
        self.listeners: list[Callable[[str], None]] = []

    def on_model_change(self, listener: Any) -> None:
        self.listeners.append(listener)

    def carry_out(self, entry: DesiredModel) -> None:
        self.workers["w"].models["m"] = told(entry.revision, entry.revision if entry.wanted.load else 0)
        for listener in self.listeners:
            listener("m")


async def test_the_bucket_and_all_views_agree_on_the_last_of_two_operations(tmp_path: Path) -> None:
    """A load takes its time to upload its files; an unload at another gateway comes in between."""
    nats = EmbeddedNats(tmp_path)
    nats.start()
    async with asyncio.TaskGroup() as background:
        buses = [await Bus.connect(nats.url, "test", background) for _ in range(3)]
        await ensure_streams(buses[0])
        registry, files = OneWorker(), SlowFiles()
        first, second, worker = map(DesiredModels, buses)
        worker.on_change(lambda name: registry.carry_out(cast(DesiredModel, worker.get(name))))
        for desired in (first, second, worker):
            await desired.start()
        one = ModelControl(cast(Any, registry), first, cast(Any, files))
        other = ModelControl(cast(Any, registry), second, cast(Any, files))
        loading = background.create_task(one.load("m", "{}", {"1/model": b""}))
        await files.is_uploading.wait()
        await other.unload("m", False)
        files.may_end.set()
        await loading
        late = DesiredModels(buses[2])
        await late.start()
        last = late.get("m")
        assert last is not None
        await eventually(lambda: first.get("m") == second.get("m") == worker.get("m") == last)
        for bus in buses:
            await bus.close()
    nats.stop()
