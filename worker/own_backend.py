"""`OwnBackend`: a backend that a user has written, the class `Backend` of one file.

The file is imported by its path, under a name of its own, and nothing comes onto Python's path. It runs in the worker's
process and is trusted like the worker's own code. What it raises at import, or while it loads a model, fails that load and
nothing else, and says where it was raised.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from repository.completion import DescribedModel, DescribedTensor
from schemas.errors import WeirError, internal
from schemas.model_config import ModelConfig
from worker.backend import Availability, Instance, InstanceDevice, LoadedModel, ModelVersion
from worker.devices import WorkerDevices
from worker.own_instance import OwnInstance

logger = logging.getLogger("weir.worker")

CLASS = "Backend"
"""The name by which a file's backend is found."""


class OwnBackend:
    """See the module, and `worker.backend.Backend`. `name` is that in configurations.

    `file` is the class's, and `find` gives that of each version of a model, which may have one of its own.

    Of the class, `load` alone is needed: without `describe` configurations are not completed, and without `availability`
    it counts as running on the CPU.
    """

    def __init__(
        self, name: str, file: Path, files: BackendFiles, find: Callable[[ModelVersion], Path] | None = None
    ) -> None:
        self._name = name
        self._file = file
        self._files = files
        self._find = find or (lambda model: file)

    def availability(self, devices: WorkerDevices) -> Availability:
        """What the class says of itself, or why it can't be had."""
        try:
            backend = self._backend(self._file)
            if not hasattr(backend, "availability"):
                return Availability(("KIND_CPU",))
            with _told(self._name, self._file):
                available = Availability(*backend.availability(devices))
            lists = (available.runs_on, available.formats, available.problems)
            if not all(map(_are_texts, lists)) or not isinstance(available.version, str):
                raise internal(f"backend '{self._name}': 'availability' must return an Availability, all of it text")
            return available
        except WeirError as error:
            return Availability((), problems=(error.message,))

    def code_file(self, model: ModelVersion) -> Path:
        """The file whose class serves this model. Raises WeirError where there is none."""
        return self._find(model)

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """What the class's `describe` says, None where it has none. Raises WeirError with whatever it raised."""
        file = self._find(model)
        backend = self._backend(file)
        if not hasattr(backend, "describe"):
            return None
        with _told(self._name, file):
            described: DescribedModel | ModelConfig | None = backend.describe(model)
        rows = [*described.inputs, *described.outputs] if isinstance(described, DescribedModel) else ()
        if not isinstance(described, (DescribedModel, ModelConfig, NoneType)) or not all(
            isinstance(row, DescribedTensor) for row in rows
        ):
            raise internal(
                f"backend '{self._name}': 'describe' must return a DescribedModel, with DescribedTensors, a ModelConfig, "
                "or None"
            )
        return described

    def load(self, model: ModelVersion) -> LoadedModel:
        """What the class's `load` makes. Raises WeirError with whatever it raised."""
        file = self._find(model)
        backend = self._backend(file)
        with _told(self._name, file):
            loaded = backend.load(model)
        _check_methods(self._name, "load", loaded, "a loaded model", ("create_instance", "unload"))
        return _OwnModel(self._name, file, loaded)

    def _backend(self, file: Path) -> Any:
        with _told(self._name, file):
            kind = self._files.imported(self._name, file)
            if not isinstance(kind, type) or not callable(getattr(kind, "load", None)):
                hint = "; a TritonPythonModel belongs into a model.py" if kind is None else ""
                raise internal(f"backend '{self._name}': {file.name} has no class '{CLASS}' with a method 'load'{hint}")
            return kind()


class _OwnModel:
    """A model that a user's backend has loaded: its failures are told as the backend's."""

    def __init__(self, name: str, file: Path, loaded: LoadedModel) -> None:
        self._name = name
        self._file = file
        self._loaded = loaded

    def create_instance(self, device: InstanceDevice) -> Instance:
        with _told(self._name, self._file):
            instance = self._loaded.create_instance(device)
        _check_methods(self._name, "create_instance", instance, "an instance", ("execute", "close"))
        return OwnInstance(self._name, instance)

    def unload(self) -> None:
        try:
            self._loaded.unload()
        except BaseException:  # the model goes all the same, and nobody waits for what its backend says of that
            logger.exception("backend '%s': unloading a model failed", self._name)


def _are_texts(values: object) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values)


def _check_methods(backend: str, method: str, made: object, what: str, names: Sequence[str]) -> None:
    missing = next((name for name in names if not hasattr(made, name)), None)
    if missing is not None:
        raise internal(
            f"backend '{backend}': what '{method}' returned has no method '{missing}', which {what} must have"
        )


class _Imported(NamedTuple):
    """A file's class as of one look at the file."""

    module: str
    look: tuple[int, int]
    kind: Any


class BackendFiles:
    """The files that were imported, each once for all models, and again when it has changed since. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._imported: dict[Path, _Imported] = {}

    def imported(self, name: str, file: Path) -> Any:
        """What the file calls `Backend`, None where it calls nothing so. Raises whatever it raises."""
        path = file.resolve()
        with self._lock:
            status = path.stat()
            look = (status.st_mtime_ns, status.st_size)
            known = self._imported.get(path)
            if known is not None and known.look == look:
                return known.kind
            module = _import(name, path)
            if known is not None:
                # Whoever runs its code keeps it; nobody else finds it any more.
                sys.modules.pop(known.module, None)
            self._forget_removed_files()
            kind = getattr(module, CLASS, None)
            self._imported[path] = _Imported(module.__name__, look, kind)
            return kind

    def _forget_removed_files(self) -> None:
        # Files that come with load requests lie in a folder of their own each time.
        for path in [path for path in self._imported if not path.exists()]:
            sys.modules.pop(self._imported.pop(path).module, None)


class _SourceAlone(importlib.machinery.SourceFileLoader):
    """Neither reads nor writes compiled files: they would appear in model repositories, and may be out of date."""

    def path_stats(self, path: str) -> Any:
        raise OSError

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


_numbers = count(1)


def _import(name: str, path: Path) -> Any:
    # Dataclasses, typing and others look their module up by its name, so it stands among the others under one of its own.
    module_name = f"weir_own_backend_{next(_numbers)}_{name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(module_name, path, loader=_SourceAlone(module_name, str(path)))
    assert spec is not None  # noqa: S101 - a loader was given
    assert spec.loader is not None  # noqa: S101
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@contextmanager
def _told(name: str, file: Path) -> Iterator[None]:
    """What the user's code raises becomes a WeirError that says where, without the paths of this machine."""
    try:
        yield
    except WeirError:
        raise
    except BaseException as error:  # panics of libraries in Rust are no `Exception`, and would end the event loop
        logger.warning("backend '%s' failed", name, exc_info=error)
        text = "".join(traceback.format_exception_only(error)).strip().replace(str(file.resolve()), file.name)
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()
        ]
        calls = "".join(f"  {file.name}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
        raise internal(f"backend '{name}': {text}" + (f"\n\nAt:\n{calls}" if calls else "")) from error
