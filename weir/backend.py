"""What a backend of one's own is written with; `docs/backends.md` tells how.

from weir.backend import ArrayBackend, ModelVersion
"""

from __future__ import annotations

from repository.completion import DescribedModel, DescribedTensor
from schemas.errors import ErrorCode, WeirError
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from schemas.tensors import Tensor
from worker.array_backend import ArrayBackend, ArrayFunction
from worker.array_instance import ArrayInstance, ArrayRunner
from worker.backend import (
    Availability,
    Backend,
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    LoadedModel,
    ModelVersion,
    Result,
)
from worker.devices import WorkerDevices
from worker.tensor_declarations import NamedDatatype, TensorDeclarations

__all__ = [
    "ArrayBackend",
    "ArrayFunction",
    "ArrayInstance",
    "ArrayRunner",
    "Availability",
    "Backend",
    "DescribedModel",
    "DescribedTensor",
    "ErrorCode",
    "Execution",
    "InferRequest",
    "Instance",
    "InstanceDevice",
    "InstanceDied",
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
