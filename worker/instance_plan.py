"""The instances that a model's configuration asks for: where each runs, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schemas.errors import ErrorCode, WeirError
from schemas.execution_config import InstanceGroup
from schemas.model_config import ModelConfig
from worker.backend import InstanceDevice
from worker.devices import CPU_ONLY, WorkerDevices


class PlannedInstance(NamedTuple):
    """One instance of `group`."""

    device: InstanceDevice
    group: InstanceGroup


def planned_instances(config: ModelConfig, devices: WorkerDevices = CPU_ONLY) -> list[PlannedInstance]:
    """One for each instance that `instance_group` asks for on `devices`, named as in Triton (`<group>_<number>`).

    Empty where all are meant for other workers. Those of passive groups, which are made but given nothing to do, come last,
    so that the others are numbered as if there were none.
    """
    plan: list[PlannedInstance] = []
    for group in sorted(config.instance_group, key=lambda group: group.passive):
        is_on_gpu = group.kind == "KIND_GPU"
        if not is_on_gpu and not devices.has_cpu:
            continue
        for place in [gpu for gpu in group.gpus if gpu in devices.own_gpus] if is_on_gpu else [0]:
            for _ in range(max(1, group.count)):
                device = InstanceDevice(group.kind, place, f"{group.name}_{len(plan)}", tuple(group.profile))
                plan.append(PlannedInstance(device, group))
    if config.instance_group:
        return plan
    return [PlannedInstance(InstanceDevice("KIND_CPU", 0, f"{config.name}_0"), InstanceGroup())]


def used_gpus(plan: Sequence[PlannedInstance]) -> list[int]:
    """The GPUs that these instances run on."""
    return sorted({device.device_id for device, _ in plan if device.kind == "KIND_GPU"})


def is_for_others(config: ModelConfig, devices: WorkerDevices) -> bool:
    """Whether every instance is meant for a device that this worker does not have: then the model is not its to load.

    Also right of a configuration that has not been completed: without `gpus`, KIND_GPU means all GPUs there are.
    """
    return bool(config.instance_group) and not any(_is_here(group, devices) for group in config.instance_group)


class MeantForOthers(WeirError):
    """All instances of a model are meant for devices that this worker does not have."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)


def check_devices(config: ModelConfig, devices: WorkerDevices) -> None:
    """Raises MeantForOthers, in Triton's words, for a model all of whose instances are meant for devices of others."""
    if not is_for_others(config, devices):
        return
    group = config.instance_group[0]
    subject = f"instance group {group.name or f'{config.name}_0'} of model {config.name}"
    if not _is_on_gpu(group):
        raise MeantForOthers(f"{subject} has kind {group.kind} but this worker is for GPUs alone")
    if not devices.own_gpus:
        raise MeantForOthers(f"{subject} has kind KIND_GPU but no GPUs are available")
    known = ", ".join(map(str, devices.own_gpus))
    raise MeantForOthers(
        f"{subject} specifies invalid or unsupported gpu id {group.gpus[0]}. GPUs available are: {known}"
    )


def _is_here(group: InstanceGroup, devices: WorkerDevices) -> bool:
    if not _is_on_gpu(group):
        return devices.has_cpu or (group.kind == "KIND_AUTO" and bool(devices.own_gpus))
    return any(gpu in devices.own_gpus for gpu in group.gpus or devices.own_gpus)


def _is_on_gpu(group: InstanceGroup) -> bool:
    return group.kind == "KIND_GPU" or (group.kind == "KIND_AUTO" and bool(group.gpus))
