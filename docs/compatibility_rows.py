"""The rows of `compatibility.md`: what of Triton is the same here, what is different, and what is absent.

Rows about endpoints, methods and metrics are asked of a running server by `tests/compat/test_compatibility_page.py`,
those about configuration fields follow from the table by which a worker refuses them, those about options from the
command line's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel

from weir.schemas.config.model_config import ModelConfig
from weir.worker.backend_api.config_support import LIMITS, REFUSED, SILENT, FieldLimit

SAME = "same"
DIFFERENT = "different"
ABSENT = "absent"


class Row(NamedTuple):
    """One thing that Triton has: its name, SAME, DIFFERENT or ABSENT, and how it differs or why it is not there."""

    name: str
    state: str = SAME
    how: str = ""


ENDPOINTS = (
    Row("GET /v2"),
    Row("GET /v2/health/live"),
    Row("GET /v2/health/ready"),
    Row("GET /v2/models/{m}[/versions/{v}]"),
    Row("GET /v2/models/{m}[/versions/{v}]/ready", SAME, "as the released versions; newer sources answer 404 and 503"),
    Row("GET /v2/models/{m}[/versions/{v}]/config"),
    Row("GET /v2/models/{m}[/versions/{v}]/stats"),
    Row("GET /v2/models/stats"),
    Row("POST /v2/models/{m}[/versions/{v}]/infer"),
    Row("POST /v2/models/{m}[/versions/{v}]/generate"),
    Row("POST /v2/models/{m}[/versions/{v}]/generate_stream"),
    Row("GET /v2/trace/setting"),
    Row("POST /v2/trace/setting"),
    Row("GET /v2/models/{m}/trace/setting"),
    Row("POST /v2/models/{m}/trace/setting"),
    Row("GET /v2/logging"),
    Row("POST /v2/logging"),
    Row("POST /v2/repository/index"),
    Row("POST /v2/repository/models/{m}/load"),
    Row("POST /v2/repository/models/{m}/unload"),
    Row("GET /v2/systemsharedmemory[/region/{r}]/status"),
    Row("POST /v2/systemsharedmemory/region/{r}/register"),
    Row("POST /v2/systemsharedmemory[/region/{r}]/unregister"),
    Row("GET /v2/cudasharedmemory[/region/{r}]/status"),
    Row("POST /v2/cudasharedmemory/region/{r}/register"),
    Row("POST /v2/cudasharedmemory[/region/{r}]/unregister"),
)
"""HTTP endpoints; a part in brackets may be left out."""

METHODS = (
    *(
        Row(name)
        for name in (
            "ServerLive",
            "ServerReady",
            "ModelReady",
            "ServerMetadata",
            "ModelMetadata",
            "ModelInfer",
            "ModelStreamInfer",
            "ModelConfig",
            "ModelStatistics",
            "RepositoryIndex",
            "RepositoryModelLoad",
            "RepositoryModelUnload",
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "CudaSharedMemoryStatus",
            "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
            "TraceSetting",
            "LogSettings",
        )
    ),
)
"""Methods of `inference.GRPCInferenceService`."""

_SUMMARY = "quantiles over the last 60 s of all workers together, each within 1 % of the true value"

_PINNED = "the sum over workers; 0 while no instance on a GPU is loaded"

METRICS = (
    Row("nv_inference_request_success"),
    Row(
        "nv_inference_request_failure",
        DIFFERENT,
        "`reason` is REJECTED, CANCELED, BACKEND or OTHER; a failed request of an ensemble counts once, in Triton twice",
    ),
    Row("nv_inference_count"),
    Row("nv_inference_exec_count"),
    Row("nv_inference_request_duration_us"),
    Row("nv_inference_queue_duration_us"),
    Row("nv_inference_compute_input_duration_us"),
    Row("nv_inference_compute_infer_duration_us"),
    Row("nv_inference_compute_output_duration_us"),
    Row("nv_inference_pending_request_count"),
    Row("nv_model_load_duration_secs"),
    Row("nv_inference_first_response_histogram_ms"),
    Row("nv_inference_request_summary_us", DIFFERENT, _SUMMARY),
    Row("nv_inference_queue_summary_us", DIFFERENT, _SUMMARY),
    Row("nv_inference_compute_input_summary_us", DIFFERENT, _SUMMARY),
    Row("nv_inference_compute_infer_summary_us", DIFFERENT, _SUMMARY),
    Row("nv_inference_compute_output_summary_us", DIFFERENT, _SUMMARY),
    Row("nv_cache_num_hits_per_model"),
    Row("nv_cache_num_misses_per_model"),
    Row("nv_cache_hit_duration_per_model"),
    Row("nv_cache_miss_duration_per_model"),
    Row("nv_cache_hit_summary_per_model", DIFFERENT, _SUMMARY),
    Row("nv_cache_miss_summary_per_model", DIFFERENT, _SUMMARY),
    Row("nv_gpu_utilization"),
    Row("nv_gpu_memory_total_bytes"),
    Row("nv_gpu_memory_used_bytes"),
    Row("nv_gpu_power_usage"),
    Row("nv_gpu_power_limit"),
    Row("nv_energy_consumption"),
    Row("nv_cpu_utilization"),
    Row("nv_cpu_memory_total_bytes"),
    Row("nv_cpu_memory_used_bytes"),
    Row("nv_pinned_memory_pool_total_bytes", DIFFERENT, _PINNED),
    Row("nv_pinned_memory_pool_used_bytes", DIFFERENT, _PINNED),
)
"""Metric families."""


_DIFFERENT_FIELDS = {
    "runtime": (
        "model.py as in Triton; any other .py file holds a class Backend of Weir's; of shared libraries only the backend's "
        "own name is taken, and means Weir's backend"
    ),
    "input.optional": "ONNX models that batch may have such inputs too, where the graph has a value for them",
    "batch_input.target_name": "no effect on Python models, as in Triton; it may not be left out",
    "model_warmup.batch_size": "one above that of the model is found at the check of the configuration, not by running it",
    "model_warmup.inputs.random_data": "fractions lie between 0 and 1, instead of being made of any bytes",
    "model_warmup.count": "these runs are not counted in the statistics; Triton 2.51 counts those of Python models",
    "instance_group.rate_limiter.resources.global": "global means all devices of one worker",
    "instance_group.rate_limiter.priority": "who is loaded late begins level with the others, not with no turns at all",
    "input.is_shape_tensor": "for models without a batch dimension; with one it is a load error",
    "output.is_shape_tensor": "for models without a batch dimension; with one it is a load error",
    "instance_group.count": "more than 4096 instances of a version on one worker are a load error",
    "instance_group.gpus": "a worker for each GPU; a model none of whose GPUs a worker has is not that worker's",
    "model_operations.op_library_filename": "relative to the model's folder, and must lie in it",
    "optimization.cuda.graphs": "any backend that can be recorded; without graph_spec, shapes that come twice",
    "optimization.execution_accelerators.gpu_execution_accelerator.name": (
        "ONNX Runtime: cuda; tensorrt is a load error, for ONNX Runtime's provider needs TensorRT 10"
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator.name": "any provider of the installed ONNX Runtime",
    "dynamic_batching.default_queue_policy.max_queue_size": "0 is 10 000, not unlimited",
    "sequence_batching.max_sequence_idle_microseconds": (
        "counted from the last request or its answer, whichever is later; Triton counts from the request"
    ),
}


def config_fields() -> list[Row]:
    """Every field of `config.pbtxt`; those of a message that is limited as a whole share a row."""
    return _fields_of(ModelConfig, "")


def _fields_of(message: type[BaseModel], prefix: str) -> list[Row]:
    rows: list[Row] = []
    for name, field in message.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        limit = next((limit for limit in LIMITS if limit.path == f"{prefix}{name}"), None)
        inner = _message_in(field.annotation)
        if limit is not None:
            rows.append(_limited(path, limit))
        elif inner is not None and inner.model_fields:
            rows += _fields_of(inner, f"{path}.")
        elif path in _DIFFERENT_FIELDS:
            rows.append(Row(path, DIFFERENT, _DIFFERENT_FIELDS[path]))
        else:
            rows.append(Row(path))
    return rows


def _limited(path: str, limit: FieldLimit) -> Row:
    if limit.effect == SILENT:
        return Row(path, SAME, limit.why)
    effect = "load error" if limit.effect == REFUSED else "no effect, and a warning at load"
    return Row(path, ABSENT, f"{effect}: {limit.why}")


def _message_in(annotation: Any) -> type[BaseModel] | None:
    """The message type inside an annotation such as `list[ModelInput]` or `Reshape | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _message_in(argument)
        if found is not None:
            return found
    return None
