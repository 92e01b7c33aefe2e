"""The module that Python models import, usually as `pb_utils`: the API of Triton's Python backend.

Names, arguments and messages are those of Triton's documentation of its Python backend.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from _weir_calls import is_model_ready, load_model, unload_model
from _weir_errors import TritonError, TritonModelException
from _weir_inference import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
)
from _weir_logger import Logger
from _weir_metrics import Metric, MetricFamily, MetricKind
from _weir_model_config import ModelConfig
from _weir_response import FINAL, InferenceResponse, InferenceResponseSender
from _weir_response_iterator import ResponseIterator
from _weir_tensor import (
    NAMES,
    NUMBERS,
    SCALARS,
    Tensor,
    deserialize_bytes_tensor,
    name_of_numpy,
    serialize_byte_tensor,
)

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

# The module that a model sees for each class, in messages and in pickles.
for _public in (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Logger,
    Metric,
    MetricFamily,
    MetricKind,
    ModelConfig,
    PreferredMemory,
    ResponseIterator,
    Tensor,
    TritonError,
    TritonModelException,
):
    _public.__module__ = __name__

TRITON_STRING_TO_NUMPY = {f"TYPE_{name}": scalar for name, scalar in SCALARS.items() if name != "BYTES"}
TRITON_STRING_TO_NUMPY["TYPE_STRING"] = np.object_

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input called `name`, or None."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output called `name`, or None; None for an error."""
    if inference_response.has_error():
        return None
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of the input called `name` in a model configuration, or None."""
    return _entry(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of the output called `name` in a model configuration, or None."""
    return _entry(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any] | str) -> bool:
    """Whether a model configuration (a dictionary, or JSON) uses the decoupled transaction policy."""
    config = json.loads(model_config) if isinstance(model_config, str) else model_config
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> type[np.generic]:
    """The numpy type of a configuration's type name ("TYPE_FP32"). Raises KeyError where there is none."""
    name = triton_type_string.removeprefix("TYPE_")
    scalar = SCALARS.get("BYTES" if name == "STRING" else name)
    if scalar is None:
        raise KeyError(triton_type_string)
    return scalar


def triton_to_numpy_type(data_type: int) -> type[np.generic] | None:
    """The numpy type of a type by Triton's number, None where there is none."""
    return SCALARS.get(NAMES[data_type]) if 0 <= data_type < len(NAMES) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Triton's number of a numpy type, None where there is none."""
    name = name_of_numpy(np.dtype(data_type))
    return None if name is None else NUMBERS[name]


def get_model_dir() -> str:
    """The folder of the version that this process serves, "" outside of a server."""
    return ModelDirectory.path


class ModelDirectory:
    """The folder of the model's version, which the stub sets."""

    path = ""


def _entry(model_config: dict[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    for entry in model_config.get(kind, ()):
        if entry["name"] == name:
            return dict(entry)
    return None
