"""The instances of a configuration: devices, names, and checks against the devices of the worker."""

from __future__ import annotations

from typing import Any

import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.registry import MAX_INSTANCES
from weir.worker.devices.gpus import CPU_ONLY, WorkerDevices
from weir.worker.lifecycle.instance_plan import (
    NotPlacedHere,
    check_devices,
    check_partitions,
    planned_instances,
    runs_elsewhere,
    used_gpus,
)

GPUS = WorkerDevices.of([0, 1], None)
GPU_1_ONLY = WorkerDevices.of([0, 1], 1, has_cpu=False)


def config(*groups: dict[str, Any], **fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "instance_group": list(groups), **fields})


def names(plan: Any) -> list[tuple[str, int]]:
    return [(planned.device.name, planned.device.device_id) for planned in plan]


def test_a_model_without_groups_has_one_instance_on_the_cpu() -> None:
    (planned,) = planned_instances(config())
    assert (planned.device.kind, planned.device.name) == ("KIND_CPU", "m_0")


def test_instances_with_the_same_number_on_several_gpus_share_a_name() -> None:
    plan = planned_instances(config({"name": "g", "kind": "KIND_GPU", "gpus": [0, 1], "count": 2}), GPUS)
    assert names(plan) == [("g_0", 0), ("g_0", 1), ("g_1", 0), ("g_1", 1)]
    assert used_gpus(plan) == [0, 1]


def test_a_worker_plans_the_instances_for_its_own_devices_only() -> None:
    groups = [
        {"name": "c", "kind": "KIND_CPU", "count": 2},
        {"name": "g", "kind": "KIND_GPU", "gpus": [0, 1], "count": 1},
    ]
    assert names(planned_instances(config(*groups), GPU_1_ONLY)) == [("g_0", 1)]
    assert names(planned_instances(config(*groups), CPU_ONLY)) == [("c_0", 0), ("c_1", 0)]


def test_passive_instances_come_last() -> None:
    groups = [{"name": "p", "kind": "KIND_CPU", "passive": True}, {"name": "a", "kind": "KIND_CPU"}]
    assert [name for name, _ in names(planned_instances(config(*groups)))] == ["a_0", "p_0"]


def test_the_number_of_instances_is_bounded() -> None:
    with pytest.raises(WeirError, match=f"has more than {MAX_INSTANCES} instances"):
        planned_instances(config({"name": "c", "kind": "KIND_CPU", "count": MAX_INSTANCES + 1}))


def test_instances_of_equal_groups_replace_each_other_whatever_their_names() -> None:
    def signature(**fields: Any) -> tuple[int, str]:
        return planned_instances(config({"kind": "KIND_GPU", "gpus": [0], **fields}), GPUS)[0].signature

    assert signature(name="a", count=1) == signature(name="b", count=3)
    assert signature(name="a") == signature(name="a", gpus=[0, 1])
    assert signature(name="a") != signature(name="a", profile=["fast"])


@pytest.mark.parametrize(
    ("group", "devices", "problem"),
    [
        ({"kind": "KIND_GPU", "gpus": [0]}, CPU_ONLY, "has kind KIND_GPU but no GPUs are available"),
        ({"kind": "KIND_GPU", "gpus": [7]}, GPUS, r"invalid or unsupported gpu id 7. GPUs available are: 0, 1"),
        ({"kind": "KIND_CPU"}, GPU_1_ONLY, "has kind KIND_CPU but this worker runs instances on GPUs only"),
    ],
)
def test_a_model_for_devices_of_other_workers_is_not_loaded(
    group: dict[str, Any], devices: WorkerDevices, problem: str
) -> None:
    model = config({"name": "g", **group})
    assert runs_elsewhere(model, devices)
    with pytest.raises(NotPlacedHere, match=problem):
        check_devices(model, devices)


def test_a_model_with_one_instance_on_this_worker_is_loaded() -> None:
    groups = [{"name": "c", "kind": "KIND_CPU"}, {"name": "g", "kind": "KIND_GPU", "gpus": [0]}]
    for devices in (CPU_ONLY, GPUS):
        assert not runs_elsewhere(config(*groups), devices)
        check_devices(config(*groups), devices)
    assert not runs_elsewhere(config({"name": "a", "kind": "KIND_AUTO"}), CPU_ONLY)


def test_each_partition_of_a_sequence_model_needs_an_instance() -> None:
    partitions = {"parameters": {"weir_partitions": {"string_value": "2"}}}
    one, two = {"name": "c", "kind": "KIND_CPU", "count": 1}, {"name": "c", "kind": "KIND_CPU", "count": 2}
    check_partitions(config(one, **partitions), CPU_ONLY)
    check_partitions(config(two, sequence_batching={}, **partitions), CPU_ONLY)
    with pytest.raises(WeirError, match="there are only 1 instances"):
        check_partitions(config(one, sequence_batching={}, **partitions), CPU_ONLY)
