"""What a backend of one's own is written with; `docs/backends.md` tells how.

    from weir.backend import ArrayBackend, ModelVersion

The file of a backend runs in a worker's process, where our packages are found before all others. A program that imports
this needs them too, and gets an ImportError that says so where a module of its own has one of their names.
"""

from __future__ import annotations

from weir.own_packages import check_own_packages

try:
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
except ImportError:
    check_own_packages(__name__)
    raise

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
