"""`BackendRegistry`: finds the backend of a model by its name in the configuration.

The backends in `BACKENDS` are part of Weir. Any other is one file of a user, searched where Triton searches its libraries:
in the version's folder, in the model's folder, and in those of `--backend-directory` (`<folder>/<backend>/`). The field
`runtime` names the file. `model.py` is one of Triton's Python-based backends, which lie in backend directories only; any
other `.py` has a class `Backend` of Weir's interface, by default `backend.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, cast

from weir.repository.paths import check_relative, path_inside
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.worker.backend_api.config_support import OWN_BACKEND, PYTHON
from weir.worker.backend_api.interface import Backend, ModelVersion
from weir.worker.backends.custom import BackendFiles, CustomBackend
from weir.worker.backends.python.backend import PythonBackend
from weir.worker.backends.settings import BackendSettings

BACKENDS = {
    "onnxruntime": "weir.worker.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "weir.worker.backends.python.backend:PythonBackend",
    "pytorch": "weir.worker.backends.pytorch.backend:PyTorchBackend",
    "tensorrt": "weir.worker.backends.tensorrt.backend:TensorRtBackend",
}
"""Module and class of each backend, imported when a model first needs it."""

PYTHON_BASED_FILE = "model.py"
"""The file of a Python-based backend; Triton calls it a "Python backend based backend library"."""

CUSTOM_BACKEND_FILE = "backend.py"
"""The file of a custom backend where `runtime` does not name one."""

_BACKENDS_WITH_MODEL_PY = ("pytorch",)
"""Backends that read `runtime: "model.py"` themselves, for models made of code and weights."""


class DirectoryBackend(NamedTuple):
    """An entry of a backend directory; `backend` is None where it can't be used, and `problem` is the reason."""

    name: str
    file: Path
    backend: Backend | None
    problem: str = ""


class BackendRegistry:
    """Finds backends, with the values of `--backend-config` and `--backend-directory`.

    Raises ValueError for a malformed value of `--backend-config`.
    """

    def __init__(self, backend_config: Iterable[str] = (), backend_directories: Sequence[Path] = ()) -> None:
        self._settings = BackendSettings(backend_config)
        self._directories = backend_directories
        self._files = BackendFiles()

    def of(self, config: ModelConfig, model_directory: Path, version: int = 1) -> Backend:
        """The backend that `config` names; `model_directory` is the model's folder, `version` one of those to be loaded.

        Raises WeirError when no backend has that name, or it can't run here.
        """
        name, runtime = config.backend, config.runtime
        if runtime == PYTHON_BASED_FILE:
            code = self._in_directories(name, PYTHON_BASED_FILE)
            if code is not None:
                return PythonBackend(code)
            if name not in _BACKENDS_WITH_MODEL_PY:
                searched = self._shown_directories(name)
                raise invalid(
                    f"unable to find Python backend based backend library '{runtime}' for model '{config.name}', "
                    f"searched: {' '.join(searched) or 'no backend directory'}"
                )
        elif runtime.endswith(".py"):
            return self._custom(config, self._custom_file(config, model_directory, version, runtime), runtime)
        elif runtime not in ("", f"libtriton_{name}.so"):
            raise WeirError(
                ErrorCode.UNSUPPORTED,
                f"model '{config.name}' can't be served: its runtime '{runtime}' is a shared library of Triton's, which "
                "can't be loaded",
            )
        if name in BACKENDS:
            return built_in(name)
        file = self._find(config, model_directory, version, CUSTOM_BACKEND_FILE)
        if file is not None:
            return self._custom(config, file, CUSTOM_BACKEND_FILE)
        code = self._in_directories(name, PYTHON_BASED_FILE)
        if code is not None:
            return PythonBackend(code)
        asked = name or config.platform
        raise invalid(
            f"unable to find backend library for backend '{asked}', try specifying runtime on the model configuration. "
            f"{self._known(asked)}"
        )

    def kind_of(self, backend: object, config: ModelConfig) -> str:
        """The kind of `backend` for `config_support.check_supported`: its name, PYTHON, or OWN_BACKEND."""
        if isinstance(backend, PythonBackend):
            return PYTHON
        return OWN_BACKEND if isinstance(backend, CustomBackend) else config.backend

    def settings_of(self, name: str, kind: str = "") -> dict[str, str]:
        """The settings of a backend; those of `kind` PYTHON also have the settings of the Python backend, as in Triton."""
        return self._settings.of(kind, name)

    def default_max_batch_size(self, name: str, kind: str = "") -> int:
        """The `max_batch_size` of models that can batch and whose configuration does not set it."""
        return self._settings.default_max_batch_size(kind, name)

    def in_directories(self) -> list[DirectoryBackend]:
        """The entries of the backend directories, in the order of search. This imports none of them."""
        found: dict[str, DirectoryBackend] = {}
        for directory in self._directories:
            folders = directory.iterdir() if directory.is_dir() else ()
            for folder in sorted(path for path in folders if path.is_dir()):
                entry = self._in_folder(folder)
                if entry is not None:
                    found.setdefault(entry.name, entry)
        return list(found.values())

    def _in_folder(self, folder: Path) -> DirectoryBackend | None:
        name = folder.name
        custom, python_based = folder / CUSTOM_BACKEND_FILE, folder / PYTHON_BASED_FILE
        file = custom if custom.is_file() else python_based
        if not file.is_file():
            library = next(iter(sorted(folder.glob("libtriton_*.so"))), None)
            if library is None or name in BACKENDS:
                return None
            return DirectoryBackend(name, library, None, "shared libraries of Triton's can't be loaded")
        if name in BACKENDS:
            hidden = f'hidden by Weir\'s backend of that name, except from models with runtime: "{file.name}"'
            return DirectoryBackend(name, file, None, hidden)
        if file is custom:
            return DirectoryBackend(name, file, CustomBackend(name, file, self._files))
        return DirectoryBackend(name, file, PythonBackend(file))

    def _custom(self, config: ModelConfig, file: Path, filename: str) -> CustomBackend:
        def find(model: ModelVersion) -> Path:
            return self._custom_file(model.config, model.model_directory, model.version, filename)

        return CustomBackend(config.backend, file, self._files, find)

    def _custom_file(self, config: ModelConfig, model_directory: Path, version: int, filename: str) -> Path:
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
        # Links are followed wherever they lead: backend directories are trusted.
        if "/" in name:
            raise ConfigProblem("backend", f"'{name}' is not a valid backend name")
        check_relative(name, "backend")
        check_relative(filename, "runtime")
        files = (directory / name / filename for directory in self._directories if name)
        return next((file for file in files if file.is_file()), None)

    def _known(self, asked: str) -> str:
        """What a model that asks for an unknown backend can have instead."""
        names = sorted({*BACKENDS, *(entry.name for entry in self.in_directories() if entry.backend is not None)})
        near = get_close_matches(asked, names, 1)
        meant = f"did you mean '{near[0]}'? " if near else ""
        return f"{meant}There are {', '.join(names)} (weir backends); others can be written (docs/backends.md)."

    def _shown_directories(self, name: str) -> list[str]:
        return [f"'{directory.name}/{name}'" for directory in self._directories]


def built_in(name: str) -> Backend:
    """The backend of this name in `BACKENDS`. Raises WeirError (UNAVAILABLE) with the reason when it can't run here."""
    problem = conflict_of(name)
    if problem:
        raise WeirError(ErrorCode.UNAVAILABLE, f"backend '{name}' can't run here: {problem}")
    module, _, kind = BACKENDS[name].partition(":")
    try:
        return cast(Backend, getattr(importlib.import_module(module), kind)())
    except ImportError as error:
        raise WeirError(ErrorCode.UNAVAILABLE, f"backend '{name}' can't run here: {error}") from error


_CONFLICTS = {
    "onnxruntime": (
        ("onnxruntime", "onnxruntime-gpu"),
        "the packages onnxruntime and onnxruntime-gpu are both installed, and own the same files: "
        "uninstall both (pip uninstall onnxruntime onnxruntime-gpu), then install one (weir-serve[cpu] or weir-serve[gpu])",
    ),
}
"""By backend: packages that must not be installed in one folder, and the message if they are."""


def conflict_of(backend: str) -> str:
    """Why the installed packages of `backend` can't work, and what to do about it; "" where they can.

    Imports none of them. Packages in different folders don't conflict.
    """
    if backend not in _CONFLICTS:
        return ""
    packages, problem = _CONFLICTS[backend]
    try:
        folders = {str(metadata.distribution(package).locate_file("")) for package in packages}
    except metadata.PackageNotFoundError:
        return ""
    return problem if len(folders) == 1 else ""
