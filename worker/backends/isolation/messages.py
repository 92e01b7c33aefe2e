"""What a worker and the process of an isolated instance exchange: names, and which backend to load.

The names contain characters that names of users' configurations and models can't contain.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from weir.schemas.core.errors import internal
from weir.worker.backend_api.interface import Backend, ModelVersion
from weir.worker.backends.custom import import_file

MODEL_PARAMETER = "weir_isolated"
"""The parameter that contains, in JSON, what the process loads."""

DESCRIPTION_PARAMETER = "weir_described"
"""The parameter in which the process returns the description of the model, in JSON."""

STATE_PREFIX = "\x00state "
"""Precedes the name of an output that is a state."""


@runtime_checkable
class HasCodeFile(Protocol):
    """A backend that is the class `Backend` of a user's file."""

    def code_file(self, model: ModelVersion) -> Path:
        """The file whose class serves this model."""


def locate_backend(backend: Backend, model: ModelVersion) -> dict[str, str]:
    """Where the backend's class is defined, for `import_backend`. Raises WeirError for a class that can't be imported."""
    if isinstance(backend, HasCodeFile):
        return {"file": str(backend.code_file(model).resolve()), "class": "Backend"}
    kind = type(backend)
    if "." in kind.__qualname__:
        raise internal(f"backend {kind.__qualname__} is not at the top level of a module, so no process can import it")
    if kind.__module__.startswith("weir.worker."):  # that of a user's file has a name of its own
        return {"module": kind.__module__, "class": kind.__qualname__}
    return {"file": str(Path(inspect.getfile(kind)).resolve()), "class": kind.__qualname__}


def import_backend(location: dict[str, str]) -> Backend:
    """The backend at this location, in the process that runs it."""
    if "module" in location:
        module: Any = importlib.import_module(location["module"])
    else:
        module = import_file(Path(location["file"]), "isolated_backend")
    return cast(Backend, getattr(module, location["class"])())
