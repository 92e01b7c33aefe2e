"""The instances that a model's configuration asks for: where each runs, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schemas.errors import ErrorCode, WeirError, invalid
from schemas.execution_config import InstanceGroup
from schemas.model_config import ModelConfig
from schemas.partitions import PARTITIONS, partitions_of
from schemas.registry import MAX_INSTANCES
from worker.backend import InstanceDevice
from worker.devices import CPU_ONLY, WorkerDevices
from worker.host_policy import NO_POLICIES, HostPolicies


class PlannedInstance(NamedTuple):
    """One instance of `group`."""

    device: InstanceDevice
    group: InstanceGroup

    @property
    def signature(self) -> tuple[int, str]:
        """Equal for instances that are as good as each other: what they are called, and how many there are, doesn't matter.

        As in Triton, which compares the lists of GPUs as well; here an instance stays if its own GPU does.
        """
        return self.device.device_id, self.group.replace(name="", count=0, gpus=[]).model_dump_json()


def planned_instances(
    config: ModelConfig, devices: WorkerDevices = CPU_ONLY, policies: HostPolicies = NO_POLICIES
) -> list[PlannedInstance]:
    """One for each instance that `instance_group` asks for on `devices`, named as in Triton (`<group>_<number>`).

    The number is that in the group, so those of one number on several GPUs share a name. Empty where all are meant for
    other workers. Those of passive groups, which are made but given nothing to do, come last, so that the others are
    numbered as if there were none. Raises WeirError where a group's host policy makes no sense, or there would be too many.
    """
    plan: list[PlannedInstance] = []
    for group in sorted(config.instance_group, key=lambda group: group.passive):
        is_on_gpu = group.kind == "KIND_GPU"
        if not is_on_gpu and not devices.has_cpu:
            continue
        places = [gpu for gpu in group.gpus if gpu in devices.own_gpus] if is_on_gpu else [0]
        if len(plan) + group.count * len(places) > MAX_INSTANCES:
            raise invalid(f"model '{config.name}' has more than {MAX_INSTANCES} instances")
        placed = [(place, policies.of(group, place)) for place in places]
        for number in range(max(1, group.count)):
            name = f"{group.name}_{number}"
            plan += [
                PlannedInstance(InstanceDevice(group.kind, place, name, policy, tuple(group.profile)), group)
                for place, policy in placed
            ]
    if config.instance_group:
        return plan
    group = InstanceGroup(kind="KIND_CPU")
    return [PlannedInstance(InstanceDevice("KIND_CPU", 0, f"{config.name}_0", policies.of(group, 0)), group)]


def used_gpus(plan: Sequence[PlannedInstance]) -> list[int]:
    """The GPUs that these instances run on."""
    return sorted({device.device_id for device, _ in plan if device.kind == "KIND_GPU"})


def is_for_others(config: ModelConfig, devices: WorkerDevices) -> bool:
    """Whether every instance is meant for a device that this worker does not have: then the model is not its to load.

    Also right of a configuration that has not been completed: without `gpus`, KIND_GPU means all GPUs there are.
    """
    if config.is_ensemble:
        return False  # it runs on no device, and instance groups are refused
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


def check_partitions(config: ModelConfig, devices: WorkerDevices) -> None:
    """Raises WeirError for a model of sequences that has more partitions than instances here.

    An instance has the sequences of one partition, for two schedulers would give its slots away twice. So there must be one
    for each partition however few workers are left.
    """
    partitions = partitions_of(config)
    if partitions == 1 or config.sequence_batching is None:
        return
    instances = sum(not planned.group.passive for planned in planned_instances(config, devices))
    if instances < partitions:
        raise invalid(
            f"model '{config.name}': parameter '{PARTITIONS}' is {partitions}, but there are only {instances} instances, "
            "and each partition of a model with sequence_batching needs one of its own"
        )


def _is_here(group: InstanceGroup, devices: WorkerDevices) -> bool:
    if not _is_on_gpu(group):
        return devices.has_cpu or (group.kind == "KIND_AUTO" and bool(devices.own_gpus))
    return any(gpu in devices.own_gpus for gpu in group.gpus or devices.own_gpus)


def _is_on_gpu(group: InstanceGroup) -> bool:
    return group.kind == "KIND_GPU" or (group.kind == "KIND_AUTO" and bool(group.gpus))
