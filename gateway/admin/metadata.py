"""Metadata of the server and of models, the same for HTTP and gRPC.

Plain dictionaries in the shape of the KServe v2 JSON bodies. The protobuf messages have the same field names, so gRPC
builds them from the same dictionaries and the two frontends can't disagree.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from weir.schemas.core.tensors import BY_CONFIG_NAME

if TYPE_CHECKING:
    from weir.calls.catalog import ServedModel
    from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""The protocol extensions that are served, by Triton's names and in Triton's order: all of its list."""


def server_version() -> str:
    """The installed version of Weir, "unknown" when it runs from a bare source tree."""
    try:
        return metadata.version("weir-serve")
    except metadata.PackageNotFoundError:
        return "unknown"


def server_metadata(server_id: str) -> dict[str, Any]:
    """Server metadata; `server_id` is the name of the server (Triton's `--id`)."""
    return {"name": server_id, "version": server_version(), "extensions": list(EXTENSIONS)}


def model_metadata(served: ServedModel, version: str) -> dict[str, Any]:
    """Metadata of a model, as asked for with `version` ("" where none was named).

    `versions` lists the READY ones, or just the one that was asked for; shapes have a leading -1 for the batch
    dimension where the model has one.
    """
    config = served.config
    return {
        "name": served.name,
        "versions": [version] if version else [str(ready) for ready in served.versions],
        "platform": config.platform or config.backend,
        "inputs": [_tensor_metadata(tensor, config) for tensor in config.input],
        "outputs": [_tensor_metadata(tensor, config) for tensor in config.output],
    }


def _tensor_metadata(tensor: ModelInput | ModelOutput, config: ModelConfig) -> dict[str, Any]:
    batch = [-1] if config.max_batch_size > 0 else []
    return {
        "name": tensor.name,
        "datatype": BY_CONFIG_NAME[tensor.data_type].name,
        "shape": batch + list(tensor.dims),
    }
