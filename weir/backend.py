"""The API for custom backends; `docs/backends.md` is the guide.

    from weir.backend import ArrayBackend, ModelVersion

A backend file runs in a worker process, where Weir's packages take precedence over all others. A program that imports this
module needs them too; it gets an ImportError if one of its own modules has the name of one of Weir's packages.
"""

from __future__ import annotations

from weir.own_packages import check_own_packages

try:
    from repository.completion import DescribedModel, DescribedTensor
    from schemas.config.model_config import ModelConfig
    from schemas.core.errors import ErrorCode, WeirError
    from schemas.core.requests import InferRequest
    from schemas.core.tensors import Tensor
    from worker.backend_api.interface import (
        RESCHEDULED,
        Availability,
        Backend,
        DeviceLost,
        DeviceRunner,
        DeviceTensor,
        Execution,
        ExecutionHandle,
        Instance,
        InstanceDevice,
        InstanceDied,
        InstanceStream,
        LoadedModel,
        ModelVersion,
        Result,
    )
    from worker.backends.array import ArrayBackend, ArrayFunction, ArrayInstance, ArrayRunner
    from worker.backends.instance_backend import Device, InstanceBackend
    from worker.cuda.arrays import DeviceArray
    from worker.cuda.device_instance import DeviceInstance
    from worker.devices.gpus import WorkerDevices
    from worker.execution.batch_tensors import NamedDatatype, TensorDeclarations
except ImportError:
    check_own_packages(__name__)
    raise

__all__ = [
    "RESCHEDULED",
    "ArrayBackend",
    "ArrayFunction",
    "ArrayInstance",
    "ArrayRunner",
    "Availability",
    "Backend",
    "DescribedModel",
    "DescribedTensor",
    "Device",
    "DeviceArray",
    "DeviceInstance",
    "DeviceLost",
    "DeviceRunner",
    "DeviceTensor",
    "ErrorCode",
    "Execution",
    "ExecutionHandle",
    "InferRequest",
    "Instance",
    "InstanceBackend",
    "InstanceDevice",
    "InstanceDied",
    "InstanceStream",
    "LoadedModel",
    "ModelConfig",
    "ModelVersion",
    "NamedDatatype",
    "Result",
    "Tensor",
    "TensorDeclarations",
    "WeirError",
    "WorkerDevices",
]
