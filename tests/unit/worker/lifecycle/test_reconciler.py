"""Reconciling models with repositories, requests of the repository API and composing models; with a fake loader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.waiting import eventually
from weir.repository.layout import FoundModel, ModelRepository, RepositorySnapshot, folder_fingerprint
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import ResourceAmounts
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.wire.model_control import DesiredModel, WantedModel
from weir.schemas.wire.registry import UNLOADED, ModelRecord, ModelState, VersionRecord
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.ensembles.dependencies import DependencyWatcher
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.model_state import ManagedModels, RecordPublisher
from weir.worker.lifecycle.placement import ModelPlacement
from weir.worker.lifecycle.reconciler import NOT_FOUND, ModelReconciler, check_startup_models, startup_names
from weir.worker.lifecycle.transitions import LifecycleContext

LOAD, UNLOAD = WantedModel(True), WantedModel(False)


class Version:
    """A loaded version."""

    def __init__(self, name: str, number: int) -> None:
        self.model = SimpleNamespace(name=name, version=number, config=ModelConfig(name=name))
        self.record = VersionRecord(ModelState.READY, instances=1)
        self.is_succeeded = False

    def take_over(self) -> None:
        pass


class Loader:
    """Loads every version of a model at once, except of the models in `broken`."""

    def __init__(self, repository: ModelRepository) -> None:
        self.repository = repository
        self.broken: set[str] = set()
        self.loads: list[str] = []
        self.overrides: list[str | None] = []
        self.reusable: list[set[int]] = []
        self.gates: dict[str, threading.Event] = {}
        self.updates_in_place = False

    def look(self) -> RepositorySnapshot:
        return self.repository.snapshot()

    def load(self, found: FoundModel, override: str | None, serving: LoadResult | None) -> LoadResult:
        self.loads.append(found.identity)
        self.overrides.append(override)
        self.reusable.append(set() if serving is None else set(serving.served))
        if found.name in self.gates:
            assert self.gates[found.name].wait(20)
        if found.name in self.broken:
            records = {number: VersionRecord(ModelState.UNAVAILABLE, "Internal: no") for number in found.versions}
            return LoadResult(found.identity, records=records, error=invalid("no"))
        served = {number: cast(Any, Version(found.identity, number)) for number in found.versions}
        for version in () if serving is None else serving.served.values():
            version.is_succeeded = self.updates_in_place
        config = ModelConfig(name=found.name)
        return LoadResult(found.identity, config=config, served=served, fingerprint=folder_fingerprint(found))


class Desired:
    """The entries of the repository API."""

    def __init__(self) -> None:
        self.entries: dict[str, DesiredModel] = {}
        self.listener: Callable[[str], None] = lambda name: None

    def on_change(self, listener: Callable[[str], None]) -> None:
        self.listener = listener

    def get(self, name: str) -> DesiredModel | None:
        return self.entries.get(name)

    def all(self) -> list[DesiredModel]:
        return list(self.entries.values())

    def request(self, entry: DesiredModel) -> None:
        self.entries[entry.name] = entry
        self.listener(entry.name)


class Drains:
    """A scheduler that agrees to every unload while `agrees` is set."""

    def __init__(self) -> None:
        self.agrees = asyncio.Event()
        self.agrees.set()

    async def wait(self, _model: str, _versions: set[int], _partitions: int) -> None:
        await self.agrees.wait()


class Worker:
    """A reconciler with fakes around it, and the records that it publishes."""

    def __init__(self, *folders: Path, namespacing: bool = False, **options: Any) -> None:
        self.folder = folders[0]
        self.loader = Loader(ModelRepository(folders, None, namespacing))
        self.desired, self.drains = Desired(), Drains()
        self.records: dict[str, ModelRecord] = {}
        self.installed: dict[str, LoadResult] = {}
        self.unloaded: list[tuple[str, int]] = []
        self.unloads = threading.Event()
        self.unloads.set()
        self.served: dict[str, Any] = {}  # what the registry says about composing models
        self.written: list[ModelRecord] = []
        self.described: dict[str, Any] = {}
        self.removed: list[str] = []
        client = SimpleNamespace(
            registry=SimpleNamespace(on_model_change=self._on_model_change, workers={}),
            catalog=SimpleNamespace(served_model=self.served.get, is_wanted=lambda _name: True),
            each_second=lambda _listener: None,
            open_soon=lambda: None,
            is_open=True,
        )
        records = RecordPublisher(
            cast(
                Any,
                SimpleNamespace(
                    write_model=self._write_model, remove_model=self._remove_model, describe=self._describe
                ),
            )
        )
        models = ManagedModels(records)
        self.reconciler = ModelReconciler(
            LifecycleContext(
                host=cast(Any, self),
                models=models,
                loader=cast(Any, self.loader),
                desired=cast(Any, self.desired),
                files=cast(Any, None),
                drains=cast(Any, self.drains),
                dependencies=DependencyWatcher(cast(Any, client), lambda _config, _found: ""),
                placement=ModelPlacement(
                    models, cast(Any, client), "w", ResourceAmounts(), WorkerDevices.of([], None, True)
                ),
                rolling=cast(Any, SimpleNamespace(turn=self._roll)),
                **options,
            )
        )

    def add(self, name: str, config: str = "", version: int = 1) -> None:
        """Writes a model into the repository."""
        (self.folder / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.folder / name / "config.pbtxt").write_text(config)

    def delete(self, name: str) -> None:
        (self.folder / name / "config.pbtxt").unlink()
        for version in (self.folder / name).iterdir():
            version.rmdir()
        (self.folder / name).rmdir()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[list[str]]:
        """The reconciler from its start to its end; yields the problems of the start."""
        async with asyncio.TaskGroup() as background:
            yield await self.reconciler.start(background)
            await self.reconciler.stop(5)

    def states(self, name: str) -> dict[int, str]:
        """The published states of the model's versions."""
        record = self.records.get(name)
        return {} if record is None else {number: row.state.name for number, row in record.versions.items()}

    def serve(self, name: str, config: str = "") -> None:
        """Reports the model as served, as the registry does for a model of any worker."""
        self.served[name] = SimpleNamespace(versions=[1], config=ModelConfig(name=name, platform=config), labels={})
        self.notify(name)

    def withdraw(self, name: str) -> None:
        del self.served[name]
        self.notify(name)

    # What the reconciler calls

    def install(self, result: LoadResult) -> None:
        self.installed[result.name] = result

    def uninstall(self, name: str) -> None:
        del self.installed[name]

    def unload_version(self, served: Any) -> bool:
        assert self.unloads.wait(20)
        self.unloaded.append((served.model.name, served.model.version))
        return True

    def _on_model_change(self, listener: Callable[[str], None]) -> None:
        self.notify = listener

    async def _write_model(self, record: ModelRecord) -> None:
        self.records[record.name] = record
        self.written.append(record)

    async def _remove_model(self, name: str) -> None:
        self.records.pop(name, None)
        self.removed.append(name)

    async def _describe(self, **changes: Any) -> None:
        self.described |= changes

    async def _roll(self, *_: object) -> WeirError | None:
        return None


# The start


async def test_mode_none_loads_every_model_and_reports_failures(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.add("good")
    worker.add("bad")
    worker.loader.broken.add("bad")
    async with worker.running() as problems:
        assert problems == ["failed to load 'bad': Internal: no"]
        assert worker.states("good") == {1: "READY"}
        assert worker.states("bad") == {1: "UNAVAILABLE"}
        assert set(worker.installed) == {"good"}


async def test_mode_explicit_loads_the_startup_models_only(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit", startup=("first", "missing"))
    worker.add("first")
    worker.add("second")
    async with worker.running() as problems:
        assert set(worker.installed) == {"first"}
        assert problems == [f"failed to load 'missing': {NOT_FOUND}"]


async def test_a_new_worker_carries_out_the_requests_from_before_its_start(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit", startup=("second",))
    for name in ("first", "second", "third"):
        worker.add(name)
    worker.desired.entries = {
        "first": DesiredModel("first", 7, LOAD),
        "second": DesiredModel("second", 8, UNLOAD),
        "third": DesiredModel("third", 9, WantedModel(True, config="{}"), fallback=LOAD),
    }
    async with worker.running():
        assert set(worker.installed) == {"first", "third"}, "a request overrides --load-model"
        assert worker.records["first"].revision == 7


def test_a_startup_name_means_all_models_that_have_it() -> None:
    found = ["once", "/a::twice", "/b::twice"]
    assert startup_names(("*",), found) == found
    assert startup_names(("twice", "once", "twice"), found) == ["/a::twice", "/b::twice", "once"]
    assert startup_names(("missing",), found) == ["missing"]
    assert startup_names((), found) == []


def test_startup_models_need_explicit_mode_and_a_lone_wildcard() -> None:
    with pytest.raises(WeirError, match="requires setting '--model-control-mode=explicit'"):
        check_startup_models("poll", ("m",))
    with pytest.raises(WeirError, match="must be the ONLY startup model"):
        check_startup_models("explicit", ("*", "m"))


# Polling


async def test_polling_follows_the_repositories(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="poll")
    worker.add("kept")
    worker.add("deleted")
    async with worker.running():
        await worker.reconciler.poll_once()
        assert worker.loader.loads.count("kept") == 1, "it has not changed"
        worker.add("kept", version=2)
        worker.add("new")
        worker.delete("deleted")
        await worker.reconciler.poll_once()
        assert worker.states("kept") == {1: "READY", 2: "READY"}
        assert worker.states("new") == {1: "READY"}
        await eventually(lambda: ("deleted", 1) in worker.unloaded)
        await eventually(lambda: "deleted" not in worker.records)
        assert "deleted" not in worker.installed


async def test_a_failed_reload_leaves_the_old_versions_and_is_tried_again_after_a_change(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="poll")
    worker.add("m")
    async with worker.running():
        worker.loader.broken.add("m")
        worker.add("m", version=2)
        await worker.reconciler.poll_once()
        assert worker.states("m") == {1: "READY", 2: "UNAVAILABLE"}
        assert worker.records["m"].rejected == "Internal: no"
        await worker.reconciler.poll_once()
        assert len(worker.loader.loads) == 2, "nothing has changed since the failure"
        worker.loader.broken.clear()
        worker.add("m", version=3)
        await worker.reconciler.poll_once()
        assert worker.states("m") == {1: "READY", 2: "READY", 3: "READY"}
        assert worker.records["m"].rejected == ""


async def test_a_repository_counts_as_never_read_until_it_can_be_read_once(tmp_path: Path) -> None:
    later = tmp_path / "later"
    worker = Worker(tmp_path, later, control_mode="poll")
    worker.add("m")
    problem = "failed to read model repository 'later': No such file or directory"
    async with worker.running() as problems:
        assert problems == [problem]
        assert worker.described == {"unreadable": [problem], "never_read": [problem], "outdated": []}
        later.mkdir()
        await worker.reconciler.poll_once()
        assert worker.described == {"unreadable": [], "never_read": [], "outdated": []}
        later.rmdir()
        await worker.reconciler.poll_once()
        assert worker.described == {"unreadable": [problem], "never_read": [], "outdated": []}


async def test_an_unreadable_repository_keeps_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path, control_mode="poll")
    worker.add("m")
    async with worker.running():
        snapshot = RepositorySnapshot({}, {tmp_path: "it can't be read"})
        monkeypatch.setattr(worker.loader, "look", lambda: snapshot)
        await worker.reconciler.poll_once()
        assert worker.states("m") == {1: "READY"}


# Requests


async def test_requests_on_one_model_are_carried_out_in_order(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("m")
    async with worker.running():
        worker.desired.request(DesiredModel("m", 1, LOAD))
        worker.desired.request(DesiredModel("m", 2, UNLOAD))
        await eventually(lambda: worker.unloaded == [("m", 1)])
        await eventually(lambda: worker.states("m") == {1: "UNAVAILABLE"})
        assert worker.records["m"].versions[1].reason == UNLOADED
        assert worker.records["m"].revision == 2


async def test_versions_that_retire_do_not_make_a_model_changed(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit", startup=("m",))
    for number in (1, 2):
        worker.add("m", version=number)
    async with worker.running():
        (tmp_path / "m" / "1").rmdir()
        worker.drains.agrees.clear()
        worker.desired.request(DesiredModel("m", 1, LOAD))
        await eventually(lambda: worker.states("m") == {1: "UNLOADING", 2: "READY"})
        loads = list(worker.loader.loads)
        worker.desired.request(DesiredModel("m", 2, LOAD))
        await eventually(lambda: worker.records["m"].revision == 2)
        assert worker.loader.loads == loads
        assert worker.states("m") == {1: "UNLOADING", 2: "READY"}
        worker.add("m", version=3)
        worker.desired.request(DesiredModel("m", 3, LOAD))
        await eventually(lambda: worker.records["m"].revision == 3)
        assert worker.loader.reusable[-1] == {2}, "what retires may be unloaded before the load ends"
        worker.drains.agrees.set()
        await eventually(lambda: worker.states("m")[1] == "UNAVAILABLE")


async def test_an_update_in_place_ends_after_the_instances_that_it_removes(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("m")
    async with worker.running():
        worker.desired.request(DesiredModel("m", 1, LOAD))
        await eventually(lambda: "m" in worker.records and worker.records["m"].revision == 1)
        worker.add("m", "instance_group { count: 1 }")
        worker.loader.updates_in_place = True
        worker.unloads.clear()
        worker.desired.request(DesiredModel("m", 2, LOAD))
        await eventually(lambda: worker.records["m"].in_force == 2)
        assert worker.records["m"].revision == 1, "schedulers know of the update, its client has to wait"
        worker.unloads.set()
        await eventually(lambda: worker.records["m"].revision == 2)
        assert worker.unloaded == [("m", 1)]


async def test_a_plain_load_keeps_a_sent_configuration_until_the_files_change(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("m")
    dropping = WantedModel(True, drops_override=True)
    async with worker.running():
        for revision, wanted, overrides in (
            (1, WantedModel(True, config="{}"), ["{}"]),
            (2, LOAD, ["{}"]),
            (3, dropping, ["{}", None]),
            (4, WantedModel(True, config="{ }"), ["{}", None, "{ }"]),
        ):
            worker.desired.request(DesiredModel("m", revision, wanted))
            await eventually(
                lambda expected=revision: "m" in worker.records and worker.records["m"].revision == expected
            )
            assert worker.loader.overrides == overrides
        assert worker.records["m"].in_force == 4
        worker.add("m", "# changed")
        worker.desired.request(DesiredModel("m", 5, LOAD))
        await eventually(lambda: worker.records["m"].in_force == 5)
        assert worker.loader.overrides[3:] == [None]


async def test_a_load_during_a_drain_cancels_it(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit", startup=("m",))
    worker.add("m")
    async with worker.running():
        worker.drains.agrees.clear()
        worker.desired.request(DesiredModel("m", 1, UNLOAD))
        await eventually(lambda: worker.states("m") == {1: "UNLOADING"})
        worker.desired.request(DesiredModel("m", 2, LOAD))
        await eventually(lambda: worker.states("m") == {1: "READY"})
        worker.drains.agrees.set()
        await asyncio.sleep(0.02)
        assert worker.states("m") == {1: "READY"}
        assert worker.installed["m"].served


async def test_a_request_for_an_unknown_model_reports_the_error_and_leaves_no_record(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    async with worker.running():
        worker.desired.request(DesiredModel("m", 1, LOAD))
        await eventually(lambda: worker.removed == ["m"])
        assert "failed to poll from model repository" in worker.written[-1].error
        assert worker.installed == {}


async def test_a_withdrawn_request_brings_back_what_was_desired_before(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("m")
    worker.loader.broken.add("m")
    async with worker.running():
        worker.desired.request(DesiredModel("m", 5, WantedModel(True, config="{}")))
        await eventually(lambda: worker.records.get("m") and worker.records["m"].error)
        worker.loader.broken.clear()
        worker.desired.request(DesiredModel("m", 5, LOAD))
        await eventually(lambda: worker.states("m") == {1: "READY"})


# Namespaces


async def test_a_name_in_two_namespaces_means_both_models(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        (folder / "m" / "1").mkdir(parents=True)
        (folder / "m" / "config.pbtxt").write_text("")
    worker = Worker(*folders, control_mode="explicit", namespacing=True)
    async with worker.running():
        worker.desired.request(DesiredModel("m", 1, LOAD))
        await eventually(lambda: len(worker.installed) == 2)
        assert {result.name.rpartition("::")[2] for result in worker.installed.values()} == {"m"}
        worker.desired.request(DesiredModel("m", 2, UNLOAD))
        await eventually(lambda: not worker.installed)


# Ensembles

ENSEMBLE = """
platform: "ensemble"
input { name: "X" data_type: TYPE_FP32 dims: [1] }
output { name: "Y" data_type: TYPE_FP32 dims: [1] }
ensemble_scheduling { step { model_name: "part" model_version: -1
  input_map { key: "A" value: "X" } output_map { key: "B" value: "Y" } } }
"""


async def test_an_ensemble_is_unloaded_without_its_composing_models_and_comes_back(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.add("whole", ENSEMBLE)
    worker.add("part")
    worker.served["part"] = SimpleNamespace(versions=[1], config=ModelConfig(name="part"), labels={})
    async with worker.running():
        assert worker.states("whole") == {1: "READY"}
        worker.withdraw("part")
        await eventually(lambda: ("whole", 1) in worker.unloaded)
        worker.serve("part")
        await eventually(lambda: worker.states("whole") == {1: "READY"})
        worker.serve("part", "another configuration")
        await eventually(lambda: worker.loader.loads.count("whole") == 3)


async def test_loading_an_ensemble_loads_its_composing_models_first(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("whole", ENSEMBLE)
    worker.add("part")
    async with worker.running():
        worker.desired.request(DesiredModel("whole", 1, LOAD))
        await eventually(lambda: "whole" in worker.installed)
        assert worker.loader.loads == ["part", "whole"]


async def test_a_composing_model_that_was_unloaded_later_stays_unloaded(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("whole", ENSEMBLE)
    worker.add("part")
    async with worker.running():
        worker.desired.entries["part"] = DesiredModel("part", 2, UNLOAD)
        worker.desired.request(DesiredModel("whole", 1, LOAD))
        await eventually(lambda: "whole" in worker.installed)
        assert worker.loader.loads == ["whole"]


async def test_a_composing_model_is_not_unloaded_while_its_ensemble_is_loaded(tmp_path: Path) -> None:
    worker = Worker(tmp_path, control_mode="explicit")
    worker.add("whole", ENSEMBLE)
    worker.add("part")
    gate = worker.loader.gates["whole"] = threading.Event()
    async with worker.running():
        worker.desired.request(DesiredModel("whole", 1, LOAD))
        await eventually(lambda: "whole" in worker.loader.loads)
        worker.desired.request(DesiredModel("part", 2, UNLOAD))
        for _ in range(20):
            await asyncio.sleep(0)
        assert worker.states("part") == {1: "READY"}
        gate.set()
        await eventually(lambda: worker.unloaded == [("part", 1)])
        assert worker.written[-1].name == "part"
        assert "whole" in worker.installed


# Health


async def test_a_change_of_health_is_published(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.add("m")
    async with worker.running():
        worker.installed["m"].served[1].record = VersionRecord(ModelState.READY, problem="down")  # type: ignore[misc]
        worker.reconciler.publish_health("m")
        worker.reconciler.publish_health("unknown")
        await eventually(lambda: worker.records["m"].versions[1].problem == "down")
