"""`TorchOptions`: the parameters of Triton's PyTorch backend, read from a model's configuration."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from schemas.errors import invalid
from schemas.model_config import ModelConfig

_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


class TorchOptions(NamedTuple):
    """See the module. None is what stays as torch has it.

    `intra_op_threads` are an instance's own; `inter_op_threads` and what concerns the JIT are the process's.
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
    """Those for `torch.compile`, which runs a module only where they are given."""

    @classmethod
    def of(cls, config: ModelConfig) -> TorchOptions:
        """Those of this configuration. Raises WeirError for a value that makes no sense."""
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
    return value if value > 0 else None  # as in Triton, others leave it as it is


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
