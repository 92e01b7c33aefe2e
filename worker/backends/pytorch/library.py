"""The torch library, and the options of a model for it.

The import takes seconds and 200 MB, so only a worker that loads a PyTorch model imports it, in the thread that loads.
`TorchOptions` are the parameters of Triton's PyTorch backend, read from a model's configuration.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import invalid, unavailable

_NOT_INSTALLED = "the torch package is not installed: install weir-serve[torch]"

lock = threading.RLock()
"""Held while torch is imported and while a model is loaded: AOTInductor's loader is not thread-safe, and the filters of
warnings are process-wide."""

_imported: Any = None


def built_for_cuda() -> str:
    """The CUDA version torch was built for, "" for a build without. Imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    found = re.search(r"^cuda\b.*= *'([^']+)'", text, re.MULTILINE)
    return found[1] if found else ""


def torch_library() -> Any:
    """The module `torch`, set up for serving. Raises WeirError (UNAVAILABLE) where it can't be imported."""
    global _imported
    with lock:
        if _imported is None:
            # Compiled packages read beyond their inputs if these have other shapes than the packages were compiled for.
            # They check that only with this variable, which must be set before they are loaded.
            os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
            try:
                import torch
            except ImportError as error:
                text = _NOT_INSTALLED if error.name == "torch" else f"torch can't be imported: {error}"
                raise unavailable(text) from error
            torch.set_num_threads(1)
            _trigger_warning(torch)
            _imported = torch
    return _imported


@contextmanager
def without_deprecations_of_jit() -> Iterator[None]:
    """Suppresses the deprecation warnings of TorchScript, also for its use by torch itself. Enter it with `lock` held."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield


def _trigger_warning(torch: Any) -> None:
    # Requests lie in read-only memory, and torch warns once in a process that it has no read-only tensors. This
    # triggers the warning without showing it: models that could write to their inputs get copies (`TensorConverter`).
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(bytes(4), np.int32))


_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


class TorchOptions(NamedTuple):
    """The options of one model; None keeps torch's default.

    `intra_op_threads` apply to each instance; `inter_op_threads` and the options of the JIT apply to the whole process.
    """

    intra_op_threads: int = 1
    inter_op_threads: int | None = None
    optimized_execution: bool = True
    inference_mode: bool = True
    cudnn: bool = True
    shares_weights: bool | None = None
    cleans_cache: bool = False
    jit_profiling: bool | None = None
    jit_executor: bool | None = None
    tensor_fuser: bool | None = None
    compile_arguments: dict[str, Any] | None = None
    """Arguments for `torch.compile`, which compiles a module only where they are given."""

    @classmethod
    def of(cls, config: ModelConfig) -> TorchOptions:
        """Reads the options of a configuration. Raises WeirError for an invalid value."""
        defaults = cls()
        intra = _number(config, "INTRA_OP_THREAD_COUNT") or _number(config, "NUM_THREADS")
        return cls(
            intra_op_threads=intra or defaults.intra_op_threads,
            inter_op_threads=_number(config, "INTER_OP_THREAD_COUNT") or _number(config, "NUM_INTEROP_THREADS"),
            optimized_execution=not _flag(config, "DISABLE_OPTIMIZED_EXECUTION", False),
            inference_mode=bool(_flag(config, "INFERENCE_MODE", True)),
            cudnn=not _flag(config, "DISABLE_CUDNN", False),
            shares_weights=_flag(config, "ENABLE_WEIGHT_SHARING", None),
            cleans_cache=bool(_flag(config, "ENABLE_CACHE_CLEANING", False)),
            jit_profiling=_flag(config, "ENABLE_JIT_PROFILING", None),
            jit_executor=_flag(config, "ENABLE_JIT_EXECUTOR", None),
            tensor_fuser=_flag(config, "ENABLE_TENSOR_FUSER", None),
            compile_arguments=_dictionary(config, "TORCH_COMPILE_OPTIONAL_PARAMETERS"),
        )


def _flag(config: ModelConfig, key: str, default: bool | None) -> bool | None:
    text = config.parameter(key).lower()
    if text and text not in _TRUE + _FALSE:
        raise invalid(f"failed to convert '{text}' to boolean (parameter '{key}' of model '{config.name}')")
    return text in _TRUE if text else default


def _number(config: ModelConfig, key: str) -> int | None:
    text = config.parameter(key)
    try:
        value = int(text) if text else 0
    except ValueError as error:
        raise invalid(f"failed to convert '{text}' to integer (parameter '{key}' of '{config.name}')") from error
    return value if value > 0 else None  # as in Triton, other values keep the default


def _dictionary(config: ModelConfig, key: str) -> dict[str, Any] | None:
    text = config.parameter(key)
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or "model" in value:
        raise invalid(f"parameter '{key}' of model '{config.name}' must be a JSON object without 'model'")
    return value
