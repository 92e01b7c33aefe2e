"""The instances that a model's configuration asks for: where each runs, and what it is called."""

from __future__ import annotations

from typing import NamedTuple

from schemas.execution_config import InstanceGroup
from schemas.model_config import ModelConfig
from worker.backend import InstanceDevice


class PlannedInstance(NamedTuple):
    """One instance of `group`."""

    device: InstanceDevice
    group: InstanceGroup


def planned_instances(config: ModelConfig) -> list[PlannedInstance]:
    """One for each instance that `instance_group` asks for, named as in Triton (`<group>_<number>`).

    Those of passive groups, which are made but given nothing to do, come last, so that the others are numbered as if
    there were none.
    """
    plan: list[PlannedInstance] = []
    for group in sorted(config.instance_group, key=lambda group: group.passive):
        places = group.gpus if group.kind == "KIND_GPU" else [0]
        for place in places:
            for _ in range(max(1, group.count)):
                device = InstanceDevice(group.kind, place, f"{group.name}_{len(plan)}")
                plan.append(PlannedInstance(device, group))
    return plan or [PlannedInstance(InstanceDevice("KIND_CPU", 0, f"{config.name}_0"), InstanceGroup())]
