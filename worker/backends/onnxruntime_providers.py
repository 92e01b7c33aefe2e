"""Which execution providers a session gets, in order of preference, and what they are told.

Source: `optimization.execution_accelerators` as Triton's ONNX Runtime backend reads it, and the parameters that it still
reads from before there was an accelerator called `cuda`.
"""

from __future__ import annotations

from typing import Any

from schemas.errors import invalid, unavailable
from schemas.execution_config import Accelerator, ExecutionAccelerators
from schemas.model_config import ModelConfig
from worker.backends.onnxruntime_options import boolean, integer

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

Provider = tuple[str, dict[str, str]]
"""A provider's name, and its options."""

NO_TENSORRT = (
    "Execution Accelerator 'tensorrt' is not available: ONNX Runtime's provider for it needs the libraries of TensorRT 10, "
    "and TensorRT 11 is what is installed with Weir"
)

_FLAGS = {
    "cudnn_conv1d_pad_to_nc1d",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
    "enable_cuda_graph",
    "enable_skip_layer_norm_strict_mode",
    "fuse_conv_bias",
    "prefer_nhwc",
    "tunable_op_enable",
    "tunable_op_tuning_enable",
    "use_ep_level_unified_stream",
    "use_tf32",
}
_NUMBERS = {"gpu_mem_limit", "sdpa_kernel", "tunable_op_max_tuning_duration_ms"}
_CHOICES = {
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
}
"""By the numbers that stand for them in parameters of the configuration itself."""

_OURS = {"device_id", "has_user_compute_stream", "user_compute_stream"}

CUDA_OPTIONS = frozenset(_FLAGS | _NUMBERS | _CHOICES.keys() | _OURS)
"""The options of the CUDA provider that are ever set."""


def cpu_providers(library: Any, config: ModelConfig) -> list[Provider]:
    """Those that run on the host: the configuration's, then the CPU's own. Raises WeirError for one that isn't there."""
    named = dict(_named(library, one) for one in _accelerators(config).cpu_execution_accelerator)
    return [*named.items(), (CPU, {})]


def gpu_providers(library: Any, config: ModelConfig, device_id: int, stream: int | None) -> list[Provider]:
    """The CUDA provider on a GPU, on the `cudaStream_t` if given one, and behind it those of the host.

    Raises WeirError for an accelerator that isn't there, and for options that make no sense.
    """
    for accelerator in _accelerators(config).gpu_execution_accelerator:
        if accelerator.name == "tensorrt":
            raise unavailable(NO_TENSORRT)
        if accelerator.name != "cuda":
            raise _unknown(accelerator.name)
    if CUDA not in library.get_available_providers():
        raise unavailable("the installed onnxruntime has no CUDA provider")
    options = {**cuda_options(config), "device_id": str(device_id)}
    if stream is not None:
        options |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    return [(CUDA, options), *cpu_providers(library, config)]


def cuda_options(config: ModelConfig) -> dict[str, str]:
    """What the configuration says to the CUDA provider. Raises WeirError for what makes no sense."""
    options: dict[str, str] = {}
    for accelerator in _accelerators(config).gpu_execution_accelerator:
        if accelerator.name == "cuda":
            options |= {key: _cuda_option(key, value) for key, value in accelerator.parameters.items()}
    for key in ("gpu_mem_limit", "do_copy_in_default_stream"):
        if text := config.parameter(key):
            options[key] = _cuda_option(key, text)
    for key, choices in _CHOICES.items():
        if text := config.parameter(key):
            number = integer(text)
            if not 0 <= number < len(choices):
                raise invalid(f"unsupported {key} value '{number}' is requested")
            options[key] = choices[number]
    if config.optimization and config.optimization.cuda and config.optimization.cuda.graphs:
        options["enable_cuda_graph"] = "1"
    return options


def captures_graphs(config: ModelConfig) -> bool:
    """Whether runs on a GPU are to be captured as CUDA graphs."""
    return cuda_options(config).get("enable_cuda_graph") == "1"


def without_graphs(config: ModelConfig) -> ModelConfig:
    """The configuration for those who would record runs as graphs themselves, which is ONNX Runtime's to do."""
    optimization = config.optimization
    if optimization is None or optimization.cuda is None or not optimization.cuda.graphs:
        return config
    cuda = optimization.cuda.replace(graphs=False)
    return config.replace(optimization=optimization.replace(cuda=cuda))


def _cuda_option(key: str, value: str) -> str:
    if key in _FLAGS:
        return str(int(boolean(value)))
    if key in _NUMBERS:
        return str(integer(value))
    if key in _CHOICES and value not in _CHOICES[key]:
        raise invalid(f"unsupported {key} value '{value}' is requested")
    if key not in CUDA_OPTIONS:
        raise invalid(f"unknown parameter '{key}' is provided for CUDA Execution Accelerator")
    return value


def _named(library: Any, accelerator: Accelerator) -> Provider:
    known = {name.removesuffix("ExecutionProvider").lower(): name for name in library.get_all_providers()}
    name = known.get(accelerator.name.lower())
    if name is None or name == CPU:
        raise _unknown(accelerator.name)
    available = library.get_available_providers()
    if name not in available:
        raise unavailable(
            f"Execution Accelerator '{accelerator.name}' is not available: the installed onnxruntime was built without "
            f"{name}, and has {', '.join(available)}"
        )
    return name, dict(accelerator.parameters)


def _unknown(name: str) -> Exception:
    return invalid(f"unknown Execution Accelerator '{name}' is requested")


def _accelerators(config: ModelConfig) -> ExecutionAccelerators:
    optimization = config.optimization
    return (optimization.execution_accelerators if optimization else None) or ExecutionAccelerators()
