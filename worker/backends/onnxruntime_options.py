"""`OnnxOptions`: what a configuration says of ONNX Runtime's sessions and runs.

The parameters are those of Triton's ONNX Runtime backend, with its texts for values that it can't read; what it would let
pass and fail every request by is refused at load. Two defaults are ours: one thread for each session, since more waste a
third to a half of the CPU when cores are scarce, and threads that don't spin where there are more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repository.paths import path_inside
from schemas.errors import internal, invalid
from schemas.model_config import ModelConfig
from worker.backend import ModelVersion

ENTRY_PREFIXES = ("session.", "optimization.", "ep.")
"""Parameters that begin so are entries of the session's own configuration, which ONNX Runtime names."""

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
_pool_made = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptions:
    """See the module. `shares_session`: the instances on one GPU have one session in common.

    `global_threads` are (intra-op, inter-op) threads of the pool that all sessions of the process use, 0 for one for each
    core; None for sessions with threads of their own, `intra_op_threads` and `inter_op_threads`.
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
        """Those of a model version. Raises WeirError for values that make no sense."""
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
        """`SessionOptions` for the module `library`; `describing`: nothing is run, so nothing needs to be quick.

        Raises WeirError for a library of operations that can't be loaded.
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
        """`RunOptions` for runs on a GPU, or on the CPU (None); None where the defaults do. Raises WeirError."""
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
            _make_pool(library, self.global_threads)
            options.use_per_session_threads = False
            return
        options.intra_op_num_threads = self.intra_op_threads
        options.inter_op_num_threads = self.inter_op_threads
        for key, threads in ((_INTRA_OP_SPINNING, self.intra_op_threads), (_INTER_OP_SPINNING, self.inter_op_threads)):
            if threads != 1 and key not in self.entries:
                options.add_session_config_entry(key, "0")

    def _check_shrinkage(self, device_id: int | None) -> None:
        # ONNX Runtime looks at the list in each run, and then fails it.
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
    """The whole number that `text` is. Raises WeirError in Triton's words."""
    try:
        return int(text)
    except ValueError as error:
        raise invalid(f"failed to convert '{text}' to integral number") from error


def boolean(text: str) -> bool:
    """What `text` says, as Triton reads it. Raises WeirError in its words."""
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


def _make_pool(library: Any, threads: tuple[int, int]) -> None:
    # Once in a process, and before its first session; settings of a backend are the same for all its models.
    global _pool_made
    with _pool_lock:
        if _pool_made:
            return
        try:
            library.set_global_thread_pool_sizes(*threads)
        except Exception as error:
            raise internal(f"onnx runtime error: {error}") from error
        _pool_made = True


def _entries(config: ModelConfig) -> dict[str, str]:
    entries: dict[str, str] = {}
    for key, parameter in config.parameters.items():
        if key.startswith(ENTRY_PREFIXES):
            value = parameter.string_value
            # ONNX Runtime takes whatever isn't "1" for a no, without a word.
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
