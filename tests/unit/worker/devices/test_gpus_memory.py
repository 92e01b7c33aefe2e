from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tests.support.fakes.cuda_device import fake_cuda_runtime
from weir.schemas.config.model_config import InstanceGroup, ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.devices.gpus import GpuMemory, WorkerDevices, cuda_obstacle, gpu_limits
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


@pytest.mark.parametrize(
    ("installed", "supported", "obstacle"),
    [
        ("13.5.0", (13, 0), ""),
        ("12.9.4", (13, 0), ""),
        ("12.9.4", (12, 2), ""),
        ("13.5.0", None, ""),  # without a driver there is no GPU anyway
        ("", (12, 8), ""),  # no metadata
        (
            "13.5.0",
            (12, 8),
            "the NVIDIA driver supports CUDA up to 12.8, and cuda-bindings 13.5.0 needs CUDA 13: update the driver to R580 "
            "or newer, or install the packages for CUDA 12",
        ),
    ],
)
def test_a_driver_that_is_too_old_is_named_before_and_at_a_load(
    monkeypatch: pytest.MonkeyPatch, installed: str, supported: tuple[int, int] | None, obstacle: str
) -> None:
    def version(_name: str) -> str:
        if not installed:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr("weir.worker.devices.gpus.has_cuda_bindings", lambda: True)
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("weir.worker.devices.gpus.driver_cuda_version", lambda: supported)
    assert cuda_obstacle() == obstacle
    with fake_cuda_runtime() as runtime:
        runtime.reset()
        runtime.DEVICE.fail("cudaSetDevice", "cudaErrorInsufficientDriver")
        with pytest.raises(WeirError) as raised, GpuMemory().loading("net", [0]):
            pass
    assert raised.value.message == f"GPU 0 can't be used: {obstacle or 'cudaErrorInsufficientDriver'}"
