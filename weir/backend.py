"""The API for custom backends; `docs/backends.md` is the guide.

    from weir.backend import ArrayBackend, ModelVersion

A backend file runs in a worker process. A program that tests one may import this module too.
"""

from __future__ import annotations

from weir.repository.completion import DescribedModel, DescribedTensor
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import (
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
from weir.worker.backends.array import ArrayBackend, ArrayFunction, ArrayInstance, ArrayRunner
from weir.worker.backends.declarations import TensorDeclarations
from weir.worker.backends.instance_backend import Device, InstanceBackend
from weir.worker.cuda.arrays import DeviceArray
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.execution.batch_tensors import NamedDatatype

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
