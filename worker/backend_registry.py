"""`BackendRegistry`: the backends of a worker, by their names in configurations."""

from __future__ import annotations

import importlib
from typing import cast

from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_config import ModelConfig
from worker.backend import Backend

BACKENDS = {
    "onnxruntime": "worker.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "worker.backends.python:PythonBackend",
}
"""Where the class of each is; imported when a model first needs it."""


class BackendRegistry:
    """See the module."""

    def of(self, config: ModelConfig) -> Backend:
        """The backend that `config` names. Raises WeirError when there is none of that name, or it can't run here."""
        target = BACKENDS.get(config.backend)
        if target is None:
            raise invalid(f"unable to find backend '{config.backend or config.platform}' for model '{config.name}'")
        module, _, name = target.partition(":")
        try:
            return cast(Backend, getattr(importlib.import_module(module), name)())
        except ImportError as error:
            raise WeirError(ErrorCode.UNAVAILABLE, f"backend '{config.backend}' can't run here: {error}") from error
