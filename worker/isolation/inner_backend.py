"""How a process learns which backend it is to run: by where the code of its class is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from schemas.errors import internal
from worker.backend import Backend, ModelVersion

_HOUSE = Path(__file__).parents[2]


@runtime_checkable
class HasCodeFile(Protocol):
    """A backend of a user's own: the class `Backend` of a file."""

    def code_file(self, model: ModelVersion) -> Path:
        """The file whose class serves this model."""


def source_of(backend: Backend, model: ModelVersion) -> dict[str, str]:
    """Where the backend's class is, as text that another process can make one of. Raises WeirError for one without."""
    if isinstance(backend, HasCodeFile):
        return {"file": str(backend.code_file(model).resolve()), "class": "Backend"}
    kind = type(backend)
    file = Path(inspect.getfile(kind)).resolve()
    if "." in kind.__qualname__:
        raise internal(f"backend {kind.__qualname__} is no class of a module, so no other process can make one")
    if file.is_relative_to(_HOUSE) and kind.__module__.startswith("worker."):
        return {"module": kind.__module__, "class": kind.__qualname__}
    return {"file": str(file), "class": kind.__qualname__}


def backend_from(source: dict[str, str]) -> Backend:
    """The backend, in the process that is to run it."""
    if "module" in source:
        module: Any = importlib.import_module(source["module"])
    else:
        spec = importlib.util.spec_from_file_location("weir_isolated_backend", source["file"])
        if spec is None or spec.loader is None:
            raise internal(f"'{Path(source['file']).name}' can't be imported")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return cast(Backend, getattr(module, source["class"])())
