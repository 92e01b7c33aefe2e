"""What a worker and the process of an isolated instance exchange: names, and which backend to load.

The names contain characters that names of users' configurations and models can't contain.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from weir.worker.backend_api.interface import Backend, ModelVersion
from weir.worker.backends.custom import BackendFiles, CustomBackend

MODEL_PARAMETER = "weir_isolated"
"""The parameter that contains, in JSON, what the process loads."""

DESCRIPTION_PARAMETER = "weir_described"
"""The parameter in which the process returns the description of the model, in JSON."""

STATE_PREFIX = "\x00state "
"""Precedes the name of an output that is a state."""


def locate_backend(backend: Backend, model: ModelVersion) -> dict[str, str]:
    """Where the backend of this model is defined, for `import_backend`."""
    if isinstance(backend, CustomBackend):
        return {"name": model.config.backend, "file": str(backend.code_file(model).resolve())}
    return {"module": type(backend).__module__, "class": type(backend).__qualname__}


def import_backend(location: dict[str, str]) -> Backend:
    """The backend at this location, in the process that runs it."""
    if "file" in location:
        return CustomBackend(location["name"], Path(location["file"]), BackendFiles())
    return cast(Backend, getattr(importlib.import_module(location["module"]), location["class"])())
