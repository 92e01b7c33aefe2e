"""A version whose instance groups change reuses its loaded model and the instances that are still wanted."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.batches import NotRunReason
from weir.schemas.wire.registry import MAX_INSTANCES
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, LoadedModel, ModelVersion, Result
from weir.worker.devices.gpus import GpuMemory, WorkerDevices
from weir.worker.devices.host_policy import HostPolicies
from weir.worker.execution.instance import ModelEnvironment
from weir.worker.execution.rate_limiter import rate_limiter_permits
from weir.worker.lifecycle.served_version import ServedVersion

SEQUENCES = {"sequence_batching": {"direct": {}}}


class Backend:
    """A backend that records events; instances in `broken` can't be created."""

    def __init__(self) -> None:
        self.loads = self.unloads = 0
        self.living: list[str] = []
        self.broken: set[str] = set()
        self.keys: list[str] = []
        self.closing = threading.Barrier(1)
        self.starts_in_parallel = False
        self.creating = threading.Barrier(1)
        self.free_bytes: list[int] = []
        self.can_not_unload = False

    def read_memory(self, gpu: int) -> tuple[int, int]:
        """Raises once no reading is left, as on a GPU that can't be used any more."""
        if not self.free_bytes:
            raise unavailable(f"GPU {gpu} can't be used: cudaErrorLaunchFailure")
        return self.free_bytes.pop(0), 100

    def load(self, model: ModelVersion) -> LoadedModel:
        self.loads += 1
        outer = self

        class Running:
            def __init__(self, name: str) -> None:
                self.name = name
                outer.living.append(name)

            def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
                return [Result() for _ in requests]

            def close(self) -> None:
                outer.closing.wait()
                outer.living.remove(self.name)

        class Loaded:
            starts_in_parallel = self.starts_in_parallel

            def create_instance(self, device: InstanceDevice) -> Instance:
                outer.creating.wait(10)
                if device.name in outer.broken:
                    raise invalid("broken")
                outer.keys.append(device.key)
                return Running(device.name)

            def unload(self) -> None:
                if outer.living or outer.can_not_unload:
                    raise RuntimeError("not unloaded")
                outer.unloads += 1

        return Loaded()


Update = Callable[..., ServedVersion]


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def update(backend: Backend) -> Update:
    """Creates the version with these groups, from a predecessor if one is given."""
    loads = iter(range(1, 100))

    def make(
        groups: Sequence[dict[str, Any]], before: ServedVersion | None = None, takes_over: bool = True, **more: Any
    ) -> ServedVersion:
        groups = [{"name": "g", "kind": "KIND_CPU", **group} for group in groups]
        config = ModelConfig.model_validate({"name": "m", "max_batch_size": 2, "instance_group": groups, **more})
        environment = ModelEnvironment(
            arena_prefix="test",
            on_update=lambda finished: None,
            permits=rate_limiter_permits("execution_count", ()),
            host_policies=HostPolicies(["odd,cpu-cores=x"]),
            devices=WorkerDevices.of([0], None),
            gpu_memory=GpuMemory(read=backend.read_memory),
        )
        made = ServedVersion(backend, ModelVersion("m", 1, Path(), config), environment, next(loads), before)
        if takes_over:
            made.take_over()
        return made

    return make


def test_wanted_instances_are_reused(update: Update, backend: Backend) -> None:
    two = update([{"count": 2}])
    first, second = two.instances
    four = update([{"count": 4}], two)
    assert four.instances[:2] == [first, second]
    assert (len(four.instances), len(set(four.instances))) == (4, 4)
    assert four.statistics is two.statistics
    assert two.instances == []
    assert two.unload()
    assert sorted(backend.living) == ["g_0", "g_1", "g_2", "g_3"]
    one = update([{"count": 1, "name": "other"}], four)
    assert one.instances == [first], "a name doesn't matter"
    assert len(four.instances) == 3
    assert four.unload()
    assert backend.living == ["g_0"]
    assert (backend.loads, backend.unloads) == (1, 0)
    assert one.unload()
    assert (backend.living, backend.unloads) == ([], 1)


def test_a_version_that_can_not_be_unloaded_has_no_instances_any_more(update: Update, backend: Backend) -> None:
    version = update([{"count": 2}])
    backend.can_not_unload = True
    assert not version.unload()
    assert (backend.living, version.instances) == ([], [])


def test_instances_with_the_same_name_have_different_keys(update: Update, backend: Backend) -> None:
    two = update([{"count": 2}])
    one = update([{"count": 1}], two)
    again = update([{"count": 2}], one)  # while the other one of this name may still finalize
    leaving, new = two.instances[0], again.instances[1]
    assert leaving.name == new.name == "g_1"  # type: ignore[union-attr]
    assert leaving.key != new.key  # type: ignore[union-attr]
    assert backend.keys == [instance.key for instance in (again.instances[0], leaving, new)]  # type: ignore[union-attr]
    assert two.unload()
    assert again.unload()


def test_instances_stop_at_the_same_time(update: Update, backend: Backend) -> None:
    three = update([{"count": 3}])
    backend.closing = threading.Barrier(3, timeout=20)
    assert three.unload()
    assert (backend.living, backend.unloads) == ([], 1)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "KIND_MODEL"},
        {"rate_limiter": {"resources": [{"name": "r", "count": 1}]}},
        {"rate_limiter": {"priority": 2}},
        {"host_policy": "other"},
        {"passive": True},
    ],
)
def test_instances_with_other_settings_are_replaced(update: Update, backend: Backend, change: dict[str, Any]) -> None:
    before = update([{}])
    (old,) = before.instances
    after = update([change], before)
    assert old not in after.instances
    assert before.instances == [old]
    assert before.unload()
    assert backend.living == ["g_0"]
    assert after.unload()
    assert (backend.loads, backend.unloads) == (1, 1)


def test_a_gpu_that_fails_after_the_load_leaves_nothing_loaded(update: Update, backend: Backend) -> None:
    backend.free_bytes = [90]
    with pytest.raises(WeirError, match="GPU 0 can't be used"):
        update([{"kind": "KIND_GPU", "gpus": [0], "count": 2}])
    assert (backend.living, backend.loads, backend.unloads) == ([], 1, 1)
    backend.free_bytes = [90, 50]
    served = update([{"kind": "KIND_GPU", "gpus": [0], "count": 2}])
    assert len(backend.living) == 2
    assert served.unload()


def test_a_version_serves_on_after_a_failed_update(update: Update, backend: Backend) -> None:
    before = update([{"count": 2}])
    instances = list(before.instances)
    backend.broken = {"g_3"}
    with pytest.raises(WeirError, match="broken"):
        update([{"count": 4}], before)
    with pytest.raises(WeirError, match="Parsing 'cpu-cores' value: Can't parse 'x' to integer"):
        update([{"host_policy": "odd"}], before)
    with pytest.raises(WeirError, match="more than 4096 instances"):
        update([{"count": MAX_INSTANCES + 1}], before)
    assert before.instances == instances
    assert sorted(backend.living) == ["g_0", "g_1"]
    # One that was made and never took over, as another version of the model failed.
    backend.broken = set()
    update([{"count": 3}], before, takes_over=False).unload()
    assert sorted(backend.living) == ["g_0", "g_1"]
    assert backend.unloads == 0
    assert before.unload()
    assert (backend.living, backend.unloads) == ([], 1)


def test_the_model_is_unloaded_after_the_last_instance(update: Update, backend: Backend) -> None:
    before = update([{"count": 2}])
    after = update([{"count": 1}], before)
    ending = threading.Thread(target=after.unload)
    ending.start()
    ending.join()
    assert (backend.living, backend.unloads) == (["g_1"], 0)
    assert before.unload()
    assert backend.unloads == 1


def test_numbers_of_sequence_instances_are_unique(update: Update) -> None:
    two = update([{"count": 2}], **SEQUENCES)
    first, second = two.record.numbers
    assert two.record.instance_numbers == (first, second)
    one = update([{"count": 1}], two, **SEQUENCES)
    assert one.record.numbers == (first,)
    assert one.instance(first) is one.instances[0]
    assert one.instance(second) is None
    three = update([{"count": 3}], one, **SEQUENCES)
    assert three.record.numbers[0] == first
    assert len({first, second, *three.record.numbers}) == 4
    assert [three.instance(number) for number in three.record.numbers] == three.instances
    for served in (two, one, three):
        served.unload()


def test_instances_without_sequences_are_numbered_from_zero(update: Update) -> None:
    two = update([{"count": 2}])
    assert (two.record.numbers, list(two.record.instance_numbers)) == ((), [0, 1])
    assert [two.instance(number) for number in (-1, 0, 1, 2)] == [None, *two.instances, None]
    assert two.unload()


def test_what_keeps_an_instance_from_running_a_batch(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    two = update([{"count": 2}])
    first, second = two.instances
    assert [two.obstacle(instance) for instance in (first, second)] == [None, None]
    two.model.health.down(first.key, "it has died")
    assert [two.obstacle(instance) for instance in (first, second)] == [NotRunReason.DOWN, None]
    calls = SimpleNamespace(has_open_calls=lambda key: key == second.key)
    two.model = dataclasses.replace(two.model, calls=cast(Any, calls))
    assert two.obstacle(second) is None, "its calls come from batches that it has run"
    monkeypatch.setattr(type(second), "held", 1)
    assert two.obstacle(second) is NotRunReason.CALLING
    monkeypatch.undo()
    assert two.unload()


def test_instances_start_in_parallel_if_their_backend_allows_it(update: Update, backend: Backend) -> None:
    backend.starts_in_parallel = True
    backend.creating = threading.Barrier(4)
    served = update([{"count": 4}])
    assert [instance.name for instance in served.instances] == ["g_0", "g_1", "g_2", "g_3"]
    assert served.unload()


def test_no_instance_is_left_if_one_of_several_fails_to_start(update: Update, backend: Backend) -> None:
    backend.starts_in_parallel = True
    backend.creating = threading.Barrier(4)
    backend.broken = {"g_1", "g_2"}
    with pytest.raises(WeirError, match="broken"):
        update([{"count": 4}])
    assert backend.living == []
    assert backend.unloads == 1
