"""The instances that a model's configuration asks for: where each runs, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
