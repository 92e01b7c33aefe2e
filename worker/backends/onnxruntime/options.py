"""The options of sessions, runs and execution providers in a model's configuration.

`OnnxOptions` reads the parameters of Triton's ONNX Runtime backend, with its error messages. Values that Triton
accepts, and that then make every request fail, are rejected at load. Two defaults are Weir's: one thread for each
session, because more waste a third to a half of the CPU when cores are scarce, and no spinning where there are more
threads.

The functions below it choose the execution providers of a session and their options. Source:
`optimization.execution_accelerators` as Triton's ONNX Runtime backend reads it, and the older parameters that it still
reads in place of the accelerator `cuda`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.repository.paths import path_inside
from weir.runtime.limits.process_limits import computing_threads
from weir.schemas.config.model_config import Accelerator, ExecutionAccelerators, ModelConfig
from weir.schemas.core.errors import internal, invalid, unavailable
from weir.worker.backend_api.interface import ModelVersion

logger = logging.getLogger("weir.worker")

ENTRY_PREFIXES = ("session.", "optimization.", "ep.")
"""Parameters with these prefixes are entries of ONNX Runtime's session configuration."""

SHRINKAGE = "memory.enable_memory_arena_shrinkage"

_INTRA_OP_SPINNING = "session.intra_op.allow_spinning"
_INTER_OP_SPINNING = "session.inter_op.allow_spinning"
_FLAG_ENTRIES = {
    _INTRA_OP_SPINNING,
    _INTER_OP_SPINNING,
    "session.force_spinning_stop",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
    "session.set_denormal_as_zero",
    "session.disable_prepacking",
}

_pool_lock = threading.Lock()
_pool_created = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptions:
    """The options of one model version. `shares_session`: the instances on one GPU share one session.

    `global_threads` are the (intra-op, inter-op) threads of the pool that all sessions of the process share; 0 is one
    thread for each core. With None sessions have their own threads, `intra_op_threads` and `inter_op_threads`.
    """

    graph_level: int = 0
    is_parallel: bool = False
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    global_threads: tuple[int, int] | None = None
    cpu_arena: bool = True
    memory_pattern: bool = True
    entries: Mapping[str, str]
    shrinkage: str = ""
    op_libraries: tuple[Path, ...] = ()
    shares_session: bool = False

    @classmethod
    def of(cls, model: ModelVersion) -> OnnxOptions:
        """Reads the options of a model version. Raises WeirError for invalid values."""
        config = model.config
        optimization = config.optimization
        parallel = integer(config.parameter("execution_mode", "0"))
        if parallel not in (0, 1):
            raise invalid(
                "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got "
                f"{parallel} ."
            )
        return cls(
            graph_level=optimization.graph.level if optimization and optimization.graph else 0,
            is_parallel=parallel == 1,
            intra_op_threads=_threads("intra_op_thread_count", config.parameter("intra_op_thread_count", "1")),
            inter_op_threads=_threads("inter_op_thread_count", config.parameter("inter_op_thread_count", "1")),
            global_threads=_global_threads(model.settings),
            cpu_arena=boolean(config.parameter("enable_mem_arena", "1")),
            memory_pattern=boolean(config.parameter("enable_mem_pattern", "1")),
            entries=_entries(config),
            shrinkage=config.parameter(SHRINKAGE),
            op_libraries=_op_libraries(model),
            shares_session=boolean(config.parameter("share_session_between_instances", "0")),
        )

    def session_options(self, library: Any, *, describing: bool = False) -> Any:
        """`SessionOptions` of the module `library`; a `describing` session is never run and skips all optimization.

        Raises WeirError for a library of custom operations that can't be loaded.
        """
        options = library.SessionOptions()
        options.log_severity_level = 3
        self._set_threads(library, options)
        levels = library.GraphOptimizationLevel
        options.graph_optimization_level = {
            -1: levels.ORT_ENABLE_BASIC,
            1: levels.ORT_ENABLE_EXTENDED,
            2: levels.ORT_DISABLE_ALL,
        }.get(2 if describing else self.graph_level, levels.ORT_ENABLE_ALL)
        options.enable_cpu_mem_arena = self.cpu_arena and not describing
        options.enable_mem_pattern = self.memory_pattern
        entries = {**self.entries, "session.disable_prepacking": "1"} if describing else self.entries
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        for path in self.op_libraries:
            try:
                options.register_custom_ops_library(str(path))
            except Exception as error:
                reason = str(error).replace(str(path), path.name)
                raise internal(f"onnx runtime error: {reason}") from error
        return options

    def run_options(self, library: Any, device_id: int | None = None) -> Any:
        """`RunOptions` for runs on a GPU, or on the CPU (`device_id` None); None for the defaults. Raises WeirError."""
        if not self.shrinkage:
            return None
        self._check_shrinkage(device_id)
        options = library.RunOptions()
        options.add_run_config_entry(SHRINKAGE, self.shrinkage)
        return options

    def _set_threads(self, library: Any, options: Any) -> None:
        if self.is_parallel:
            options.execution_mode = library.ExecutionMode.ORT_PARALLEL
        if self.global_threads is not None:
            intra_op, inter_op = self.global_threads
            _create_pool(library, (_usable(intra_op), _usable(inter_op)))
            options.use_per_session_threads = False
            return
        options.intra_op_num_threads = _usable(self.intra_op_threads)
        options.inter_op_num_threads = _usable(self.inter_op_threads)
        for key, threads in ((_INTRA_OP_SPINNING, self.intra_op_threads), (_INTER_OP_SPINNING, self.inter_op_threads)):
            if threads != 1 and key not in self.entries:
                options.add_session_config_entry(key, "0")

    def _check_shrinkage(self, device_id: int | None) -> None:
        # ONNX Runtime checks the list only in each run, which then fails.
        for entry in self.shrinkage.split(";"):
            device, _, number = entry.partition(":")
            if device not in ("cpu", "gpu"):
                raise invalid(f"Unsupported device specified in the memory arena shrink list: {device}")
            if number and not (number.isascii() and number.isdigit()):
                raise invalid(f"Unsupported device id in the memory arena shrink list: {number}")
            has_arena = self.cpu_arena if device == "cpu" else device_id is not None
            if not has_arena or int(number or 0) != (device_id if device == "gpu" else 0):
                raise invalid(
                    "Did not find an arena based allocator registered for device-id combination in the memory arena "
                    f"shrink list: {entry}"
                )


def integer(text: str) -> int:
    """`text` as an integer. Raises WeirError in Triton's words."""
    try:
        return int(text)
    except ValueError as error:
        raise invalid(f"failed to convert '{text}' to integral number") from error


def boolean(text: str) -> bool:
    """`text` as a boolean, as Triton reads it. Raises WeirError in Triton's words."""
    lowered = text.lower()
    if lowered in ("true", "on", "1"):
        return True
    if lowered in ("false", "off", "0"):
        return False
    raise invalid(f"failed to convert '{text}' to boolean")


def _threads(name: str, text: str) -> int:
    number = integer(text)
    if number < 0:
        raise invalid(
            f"Invalid configuration value provided. Expected values for {name} are 0 or more but got {number} ."
        )
    return number


def _global_threads(settings: Mapping[str, str]) -> tuple[int, int] | None:
    if not boolean(settings.get("enable-global-threadpool", "0")):
        return None
    intra, inter = (
        _threads(name, settings.get(name, "0")) for name in ("intra_op_thread_count", "inter_op_thread_count")
    )
    return intra, inter


def _usable(threads: int) -> int:
    """The number of threads to ask for: for 0, one for each processor that this process may use if it may not use all.

    With 0 ONNX Runtime binds a thread to each core of the machine, also to those that the affinity mask leaves to others,
    and beyond the CPU quota of the container, which would then be used up in the first part of each period.
    """
    if threads:
        return threads
    usable = computing_threads()
    return 0 if usable == os.cpu_count() else usable


def _create_pool(library: Any, threads: tuple[int, int]) -> None:
    # Once in a process, before its first session. All models of the backend have the same settings.
    global _pool_created
    with _pool_lock:
        if _pool_created:
            return
        try:
            library.set_global_thread_pool_sizes(*threads)
        except Exception as error:
            raise internal(f"onnx runtime error: {error}") from error
        _pool_created = True


def _entries(config: ModelConfig) -> dict[str, str]:
    entries: dict[str, str] = {}
    for key, parameter in config.parameters.items():
        if key.startswith(ENTRY_PREFIXES):
            value = parameter.string_value
            # ONNX Runtime silently reads any value but "1" as false.
            entries[key] = str(int(boolean(value))) if key in _FLAG_ENTRIES else value
    return entries


def _op_libraries(model: ModelVersion) -> tuple[Path, ...]:
    operations = model.config.model_operations
    if operations is None:
        return ()
    field = "model_operations.op_library_filename"
    found: list[Path] = []
    for filename in operations.op_library_filename:
        path = path_inside(model.model_directory, filename, field)
        if not path.is_file():
            raise invalid(f"unable to find '{filename}' (field '{field}') in the folder of model '{model.name}'")
        found.append(path)
    return tuple(found)


CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

Provider = tuple[str, dict[str, str]]
"""A provider's name, and its options."""

NO_TENSORRT = (
    "Execution Accelerator 'tensorrt' is not available: ONNX Runtime's provider for it needs the libraries of TensorRT 10, "
    "and TensorRT 11 is what is installed with Weir"
)

NO_GRAPHS = "while ONNX Runtime captures one, CUDA refuses allocations of all threads, so other models would fail"
"""Why `enable_cuda_graph` is never passed on: ONNX Runtime captures in cudaStreamCaptureModeGlobal."""

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
"""Their indices are the numbers in parameters of the configuration itself."""

_RESERVED_OPTIONS = {"device_id", "has_user_compute_stream", "user_compute_stream"}

CUDA_OPTIONS = frozenset(_FLAGS | _NUMBERS | _CHOICES.keys() | _RESERVED_OPTIONS)
"""All options of the CUDA provider that can be set."""


def cpu_providers(library: Any, config: ModelConfig) -> list[Provider]:
    """The providers on the host: those of the configuration, then the CPU's. Raises WeirError for one that is missing."""
    named = dict(_accelerator_provider(library, one) for one in _accelerators(config).cpu_execution_accelerator)
    return [*named.items(), (CPU, {})]


def gpu_providers(library: Any, config: ModelConfig, device_id: int, stream: int | None) -> list[Provider]:
    """The CUDA provider on a GPU, on the given `cudaStream_t` if any, followed by the providers on the host.

    Raises WeirError for an accelerator that is missing, and for invalid options.
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
    """The options of the CUDA provider in the configuration. Raises WeirError for invalid ones."""
    # The provider's own default measures all algorithms of each convolution, for seconds, at each new batch size.
    options = {"cudnn_conv_algo_search": "HEURISTIC"}
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
    if options.pop("enable_cuda_graph", "0") == "1":
        logger.warning("model '%s' runs without CUDA graphs: %s", config.name, NO_GRAPHS)
    return options


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


def _accelerator_provider(library: Any, accelerator: Accelerator) -> Provider:
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
