"""Which models run in processes of their own: what their configuration says, or what their backend would have."""

from __future__ import annotations

from typing import Protocol, TypeVar, cast, runtime_checkable

from schemas.errors import invalid
from schemas.model_config import ModelConfig
from worker.backend import Backend, ModelVersion, VersionLoader
from worker.backends.python import PythonBackend
from worker.isolation.backend import IsolatedBackend

ISOLATION = "isolation"
"""The parameter that says it: "process" or "thread"."""


@runtime_checkable
class PrefersProcess(Protocol):
    """A backend some of whose models are better off in processes of their own."""

    def prefers_process(self, model: ModelVersion) -> bool:
        """Whether instances of this model are to run so where its configuration doesn't say. Raises WeirError."""


AnyBackend = TypeVar("AnyBackend", bound=VersionLoader)


def placed(backend: AnyBackend, model: ModelVersion) -> AnyBackend | IsolatedBackend:
    """What loads this model: its backend, or that in processes of their own.

    Models of Python run in one anyway, and ensembles don't run. Raises WeirError (INVALID_ARG) for a parameter of another
    value.
    """
    if isinstance(backend, PythonBackend) or model.config.is_ensemble:
        return backend
    wanted = _wanted(model.config)
    if wanted == "process" or (not wanted and isinstance(backend, PrefersProcess) and backend.prefers_process(model)):
        return IsolatedBackend(cast(Backend, backend))
    return backend


def _wanted(config: ModelConfig) -> str:
    wanted = config.parameter(ISOLATION)
    if wanted not in ("", "process", "thread"):
        raise invalid(
            f"parameter '{ISOLATION}' of model '{config.name}' must be \"process\" or \"thread\", found '{wanted}'"
        )
    return wanted
