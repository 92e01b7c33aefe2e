"""`BackendRegistry`: the backends of a worker, by their names in configurations.

Those in `BACKENDS` are part of Weir. Any other is a user's own, one file, looked for as Triton looks for its libraries: in
the version's folder, in the model's, and in those of `--backend-directory` (`<folder>/<backend>/`). The field `runtime`
names the file: `model.py` is Triton's Python-based backend, which lies in a backend directory alone; any other `.py` holds
a class `Backend` of Weir's, by default `backend.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from repository.paths import check_relative, path_inside
from repository.problem import ConfigProblem
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_config import ModelConfig
from worker.backend import Backend, ModelVersion
from worker.backend_settings import BackendSettings
from worker.backends.python import PythonBackend
from worker.config_support import OWN_BACKEND, PYTHON
from worker.own_backend import BackendFiles, OwnBackend
from worker.package_conflicts import conflict_of

BACKENDS = {
    "onnxruntime": "worker.backends.onnxruntime:OnnxRuntimeBackend",
    "python": "worker.backends.python:PythonBackend",
    "pytorch": "worker.backends.pytorch:PyTorchBackend",
    "tensorrt": "worker.backends.tensorrt:TensorRtBackend",
}
"""Where the class of each is; imported when a model first needs it."""

PYTHON_BASED_FILE = "model.py"
"""The file of a Python-based backend, in Triton's words a "Python backend based backend library"."""

OWN_FILE = "backend.py"
"""The file of a backend of Weir's form, where `runtime` names none."""

_MODEL_PY_IS_THEIRS = ("pytorch",)
"""Backends that read `runtime: "model.py"` themselves, for models made of code and weights."""


class DirectoryBackend(NamedTuple):
    """What lies in a backend directory; `backend` is None where it can't be used, and `problem` says why."""

    name: str
    file: Path
    backend: Backend | None
    problem: str = ""


class BackendRegistry:
    """See the module. `backend_config` are the texts of `--backend-config`.

    Raises ValueError for one of another form.
    """

    def __init__(self, backend_config: Iterable[str] = (), backend_directories: Sequence[Path] = ()) -> None:
        self._settings = BackendSettings(backend_config)
        self._directories = backend_directories
        self._files = BackendFiles()

    def of(self, config: ModelConfig, model_directory: Path, version: int = 1) -> Backend:
        """The backend that `config` names, for a model whose folder this is; `version` is one that is to be loaded.

        Raises WeirError when there is none of that name, or it can't run here.
        """
        name, runtime = config.backend, config.runtime
        if runtime == PYTHON_BASED_FILE:
            code = self._in_directories(name, PYTHON_BASED_FILE)
            if code is not None:
                return PythonBackend(code)
            if name not in _MODEL_PY_IS_THEIRS:
                searched = self._shown_directories(name)
                raise invalid(
                    f"unable to find Python backend based backend library '{runtime}' for model '{config.name}', "
                    f"searched: {' '.join(searched) or 'no backend directory'}"
                )
        elif runtime.endswith(".py"):
            return self._own(config, self._own_file(config, model_directory, version, runtime), runtime)
        elif runtime not in ("", f"libtriton_{name}.so"):
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                f"model '{config.name}' can't be served: its runtime '{runtime}' is a shared library of Triton's, which "
                "can't be loaded",
            )
        if name in BACKENDS:
            return built_in(name)
        file = self._find(config, model_directory, version, OWN_FILE)
        if file is not None:
            return self._own(config, file, OWN_FILE)
        code = self._in_directories(name, PYTHON_BASED_FILE)
        if code is not None:
            return PythonBackend(code)
        raise invalid(
            f"unable to find backend library for backend '{name or config.platform}', try specifying runtime on the model "
            "configuration."
        )

    def kind_of(self, backend: object, config: ModelConfig) -> str:
        """What `backend` is to `worker.config_support.check_supported`: its name, PYTHON, or OWN_BACKEND."""
        if isinstance(backend, PythonBackend):
            return PYTHON
        return OWN_BACKEND if isinstance(backend, OwnBackend) else config.backend

    def settings_of(self, name: str, kind: str = "") -> dict[str, str]:
        """The settings of a backend; one of `kind` PYTHON has those of the Python backend too, as in Triton."""
        return self._settings.of(kind, name)

    def default_max_batch_size(self, name: str, kind: str = "") -> int:
        """What `max_batch_size` becomes where a model can batch and its configuration leaves it open."""
        return self._settings.default_max_batch_size(kind, name)

    def in_directories(self) -> list[DirectoryBackend]:
        """What lies in the backend directories, in order of search. Own backends are imported when they are asked."""
        found: dict[str, DirectoryBackend] = {}
        for directory in self._directories:
            for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
                entry = self._in_folder(folder)
                if entry is not None:
                    found.setdefault(entry.name, entry)
        return list(found.values())

    def _in_folder(self, folder: Path) -> DirectoryBackend | None:
        name = folder.name
        own, python_based = folder / OWN_FILE, folder / PYTHON_BASED_FILE
        file = own if own.is_file() else python_based
        if not file.is_file():
            library = next(iter(sorted(folder.glob("libtriton_*.so"))), None)
            if library is None or name in BACKENDS:
                return None
            return DirectoryBackend(name, library, None, "shared libraries of Triton's can't be loaded")
        if name in BACKENDS:
            hidden = f'hidden by Weir\'s backend of that name, except from models with runtime: "{file.name}"'
            return DirectoryBackend(name, file, None, hidden)
        if file is own:
            return DirectoryBackend(name, file, OwnBackend(name, file, self._files))
        return DirectoryBackend(name, file, PythonBackend(file))

    def _own(self, config: ModelConfig, file: Path, filename: str) -> OwnBackend:
        def find(model: ModelVersion) -> Path:
            return self._own_file(model.config, model.model_directory, model.version, filename)

        return OwnBackend(config.backend, file, self._files, find)

    def _own_file(self, config: ModelConfig, model_directory: Path, version: int, filename: str) -> Path:
        file = self._find(config, model_directory, version, filename)
        if file is None:
            model = model_directory.name
            searched = [f"'{model}/{version}'", f"'{model}'", *self._shown_directories(config.backend)]
            raise invalid(
                f"unable to find backend library '{filename}' for model '{config.name}', searched: {' '.join(searched)}"
            )
        return file

    def _find(self, config: ModelConfig, model_directory: Path, version: int, filename: str) -> Path | None:
        check_relative(filename, "runtime")
        for place in (f"{version}/{filename}", filename):
            file = path_inside(model_directory, place, "runtime")
            if file.is_file():
                return file
        return self._in_directories(config.backend, filename)

    def _in_directories(self, name: str, filename: str) -> Path | None:
        # Links are followed wherever they lead: who names a backend directory trusts it.
        if "/" in name:
            raise ConfigProblem("backend", f"'{name}' is no name of a backend")
        check_relative(name, "backend")
        check_relative(filename, "runtime")
        files = (directory / name / filename for directory in self._directories if name)
        return next((file for file in files if file.is_file()), None)

    def _shown_directories(self, name: str) -> list[str]:
        return [f"'{directory.name}/{name}'" for directory in self._directories]


def built_in(name: str) -> Backend:
    """The backend of Weir's of that name. Raises WeirError (UNAVAILABLE) with the reason when it can't run here."""
    problem = conflict_of(name)
    if problem:
        raise WeirError(ErrorCode.UNAVAILABLE, f"backend '{name}' can't run here: {problem}")
    module, _, kind = BACKENDS[name].partition(":")
    try:
        return cast(Backend, getattr(importlib.import_module(module), kind)())
    except ImportError as error:
        raise WeirError(ErrorCode.UNAVAILABLE, f"backend '{name}' can't run here: {error}") from error
