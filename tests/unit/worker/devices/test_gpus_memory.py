from __future__ import annotations

import pytest

from weir.schemas.config.model_config import InstanceGroup, ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.devices.gpus import GpuMemory, WorkerDevices, gpu_limits
from weir.worker.lifecycle.instance_plan import planned_instances, used_gpus

GIB = 1 << 30


class Card:
    """A GPU of 8 GiB."""

    def __init__(self) -> None:
        self.used = {0: GIB, 1: GIB}

    def read(self, gpu: int) -> tuple[int, int]:
        return 8 * GIB - self.used[gpu], 8 * GIB


def test_the_memory_of_a_load_is_measured() -> None:
    card = Card()
    with GpuMemory(read=card.read).loading("net", [0, 1]) as taken:
        card.used[0] += 3 * GIB
    assert taken == {0: 3 * GIB, 1: 0}


def test_an_unused_gpu_is_not_queried() -> None:
    def fail(gpu: int) -> tuple[int, int]:
        raise AssertionError(f"GPU {gpu} was asked")

    with GpuMemory({0: 0.1}, fail).loading("net", []) as taken:
        pass
    assert taken == {}


def test_no_model_is_loaded_beyond_the_limit() -> None:
    card = Card()
    memory = GpuMemory(gpu_limits(["0:0.5"]), card.read)
    with memory.loading("first", [0, 1]):
        card.used[0] += 4 * GIB
    with pytest.raises(WeirError, match="can not create model 'second': memory limit set for GPU 0") as refused:  # noqa: SIM117
        with memory.loading("second", [0]):
            pass
    assert refused.value.code is ErrorCode.UNAVAILABLE
    with memory.loading("second", [1]):
        pass


def test_without_cuda_bindings_memory_is_not_measured_and_a_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.devices.gpus.has_cuda_bindings", lambda: False)
    with GpuMemory().loading("net", [0]) as taken:
        pass
    assert taken == {}
    message = "limit of GPU 0 can't be checked: the cuda-bindings package is not installed"
    with pytest.raises(WeirError, match=message), GpuMemory({0: 0.5}).loading("net", [0]):
        pass
    with GpuMemory({1: 0.5}).loading("net", [0]):
        pass


def test_a_worker_runs_the_instances_of_its_gpu() -> None:
    groups = [
        InstanceGroup(name="gpu", kind="KIND_GPU", count=2, gpus=[0, 1]),
        InstanceGroup(name="cpu", kind="KIND_CPU", count=1),
    ]
    config = ModelConfig(name="m", instance_group=groups)
    first = planned_instances(config, WorkerDevices.of([0, 1], 0))
    second = planned_instances(config, WorkerDevices.of([0, 1], 1, has_cpu=False))
    assert [(device.kind, device.device_id) for device, _ in first] == [("KIND_GPU", 0)] * 2 + [("KIND_CPU", 0)]
    assert [(device.kind, device.device_id) for device, _ in second] == [("KIND_GPU", 1)] * 2
    assert used_gpus(first) == [0]
    assert WorkerDevices.of([0, 1], None).own_gpus == (0, 1)
    with pytest.raises(WeirError, match="there is no GPU 2: this host has GPUs 0, 1"):
        WorkerDevices.of([0, 1], 2)
    with pytest.raises(WeirError, match="there is no GPU 0: this host has none"):
        WorkerDevices.of([], 0)
