"""The instances of a model by its configuration: their devices and names, and checks against the worker's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weir.schemas.config.model_config import InstanceGroup, ModelConfig
from weir.schemas.config.parameters import PARTITIONS, partitions_of
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.wire.registry import MAX_INSTANCES
from weir.worker.backend_api.interface import InstanceDevice
from weir.worker.devices.gpus import CPU_ONLY, WorkerDevices
from weir.worker.devices.host_policy import NO_POLICIES, HostPolicies


class PlannedInstance(NamedTuple):
    """One instance of an instance group."""

    device: InstanceDevice
    group: InstanceGroup

    @property
    def signature(self) -> tuple[int, str]:
        """Equal for instances that can replace each other after a reload, whatever their names and numbers.

        Unlike in Triton, an instance stays when its group's list of GPUs changes, as long as its own GPU is in it.
        """
        return self.device.device_id, self.group.replace(name="", count=0, gpus=[]).model_dump_json()


def planned_instances(
    config: ModelConfig, devices: WorkerDevices = CPU_ONLY, policies: HostPolicies = NO_POLICIES
) -> list[PlannedInstance]:
    """The instances of `instance_group` on `devices`, named as in Triton (`<group>_<number>`).

    Instances of a group with the same number on several GPUs share a name. Instances of passive groups, which are created
    but get no batches, come last and do not affect the numbers of the others. The list is empty if all instances are for
    other workers. Raises WeirError for an invalid host policy, or if there are too many instances.
    """
    plan: list[PlannedInstance] = []
    for group in sorted(config.instance_group, key=lambda group: group.passive):
        is_on_gpu = group.kind == "KIND_GPU"
        if not is_on_gpu and not devices.has_cpu:
            continue
        device_ids = [gpu for gpu in group.gpus if gpu in devices.own_gpus] if is_on_gpu else [0]
        if len(plan) + group.count * len(device_ids) > MAX_INSTANCES:
            raise invalid(f"model '{config.name}' has more than {MAX_INSTANCES} instances")
        placed = [(device_id, policies.of(group, device_id)) for device_id in device_ids]
        for number in range(max(1, group.count)):
            name = f"{group.name}_{number}"
            plan += [
                PlannedInstance(InstanceDevice(group.kind, device_id, name, policy, tuple(group.profile)), group)
                for device_id, policy in placed
            ]
    if config.instance_group:
        return plan
    group = InstanceGroup(kind="KIND_CPU")
    return [PlannedInstance(InstanceDevice("KIND_CPU", 0, f"{config.name}_0", policies.of(group, 0)), group)]


def used_gpus(plan: Sequence[PlannedInstance]) -> list[int]:
    """The GPUs of these instances."""
    return sorted({device.device_id for device, _ in plan if device.kind == "KIND_GPU"})


def runs_elsewhere(config: ModelConfig, devices: WorkerDevices) -> bool:
    """Whether every instance is for a device that this worker does not have, so that other workers load the model.

    Also correct for a configuration before its completion: without `gpus`, KIND_GPU means all GPUs.
    """
    if config.is_ensemble:
        return False  # it runs on no device, and must not have instance groups
    return bool(config.instance_group) and not any(_is_here(group, devices) for group in config.instance_group)


class NotPlacedHere(WeirError):
    """All instances of a model are for devices that this worker does not have."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)


def check_devices(config: ModelConfig, devices: WorkerDevices) -> None:
    """Raises NotPlacedHere, in Triton's words, for a model whose instances are all for other workers' devices."""
    if not runs_elsewhere(config, devices):
        return
    group = config.instance_group[0]
    subject = f"instance group {group.name or f'{config.name}_0'} of model {config.name}"
    if not _is_on_gpu(group):
        raise NotPlacedHere(f"{subject} has kind {group.kind} but this worker runs instances on GPUs only")
    if not devices.own_gpus:
        raise NotPlacedHere(f"{subject} has kind KIND_GPU but no GPUs are available")
    gpus = ", ".join(map(str, devices.own_gpus))
    raise NotPlacedHere(
        f"{subject} specifies invalid or unsupported gpu id {group.gpus[0]}. GPUs available are: {gpus}"
    )


def check_partitions(config: ModelConfig, devices: WorkerDevices) -> None:
    """Raises WeirError for a sequence model that has more partitions than instances on this worker.

    An instance serves the sequences of one partition only: schedulers of two partitions would assign its slots twice. So
    each worker needs an instance for each partition, because it may be the only worker left.
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
