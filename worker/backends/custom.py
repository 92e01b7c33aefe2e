"""`CustomBackend`: a backend that a user has written, the class `Backend` of one file.

The file is imported by its path, under a unique module name, and nothing is added to Python's path. It runs in the worker's
process and is trusted like the worker's own code. An exception that it raises at import, or while it loads a model, fails
that load only, with the place where it was raised.

`CheckedInstance` checks what such a backend returns.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from weir.repository.completion import DescribedModel, DescribedTensor
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import DATATYPES, Tensor, element_count, unpack_bytes
from weir.worker.backend_api.interface import (
    Availability,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    Result,
)
from weir.worker.devices.cuda_shared_memory import MappedRegion
from weir.worker.devices.gpus import WorkerDevices

logger = logging.getLogger("weir.worker")

CLASS = "Backend"
"""The name of the class in a backend's file."""


class CustomBackend:
    """The class in `file`, as a backend (`weir.worker.backend_api.interface.Backend`) with the `name` in configurations.

    `find` returns the file for each version of a model, which may have one of its own; by default it is `file`. Of the
    class only the method `load` is required. Without `describe` configurations are not completed, and without
    `availability` the backend runs on the CPU.
    """

    def __init__(
        self, name: str, file: Path, files: BackendFiles, find: Callable[[ModelVersion], Path] | None = None
    ) -> None:
        self._name = name
        self._file = file
        self._files = files
        self._find = find or (lambda model: file)

    def availability(self, devices: WorkerDevices) -> Availability:
        """What the class returns, or why it can't be imported."""
        try:
            backend = self._backend(self._file)
            if not hasattr(backend, "availability"):
                return Availability(("KIND_CPU",))
            with _attributed_errors(self._name, self._file):
                available = Availability(*backend.availability(devices))
            lists = (available.runs_on, available.formats, available.problems)
            if not all(map(_are_strings, lists)) or not isinstance(available.version, str):
                raise internal(f"backend '{self._name}': 'availability' must return an Availability of strings")
            return available
        except WeirError as error:
            return Availability((), problems=(error.message,))

    def code_file(self, model: ModelVersion) -> Path:
        """The file whose class serves this model. Raises WeirError where there is none."""
        return self._find(model)

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """What the class's `describe` returns, None where it has none. Raises WeirError for whatever that raises."""
        file = self._find(model)
        backend = self._backend(file)
        if not hasattr(backend, "describe"):
            return None
        with _attributed_errors(self._name, file):
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
        """Loads a model by the class's `load`. Raises WeirError for whatever that raises."""
        file = self._find(model)
        backend = self._backend(file)
        with _attributed_errors(self._name, file):
            loaded = backend.load(model)
        _check_methods(self._name, "load", loaded, "a loaded model", ("create_instance", "unload"))
        return _CustomModel(self._name, file, loaded)

    def _backend(self, file: Path) -> Any:
        with _attributed_errors(self._name, file):
            kind = self._files.backend_class(self._name, file)
            if not isinstance(kind, type) or not callable(getattr(kind, "load", None)):
                hint = "; a TritonPythonModel belongs in a model.py" if kind is None else ""
                raise internal(f"backend '{self._name}': {file.name} has no class '{CLASS}' with a method 'load'{hint}")
            return kind()


class _CustomModel:
    """A model that a user's backend has loaded. Its errors name the backend and its file."""

    def __init__(self, name: str, file: Path, loaded: LoadedModel) -> None:
        self._name = name
        self._file = file
        self._loaded = loaded

    def create_instance(self, device: InstanceDevice) -> Instance:
        with _attributed_errors(self._name, self._file):
            instance = self._loaded.create_instance(device)
        _check_methods(self._name, "create_instance", instance, "an instance", ("execute", "close"))
        return CheckedInstance(self._name, instance)

    def unload(self) -> None:
        try:
            self._loaded.unload()
        except BaseException:  # the model is unloaded in any case, and the caller can do nothing about it
            logger.exception("backend '%s': unloading a model failed", self._name)


def _are_strings(values: object) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values)


def _check_methods(backend: str, method: str, returned: object, what: str, names: Sequence[str]) -> None:
    missing = next((name for name in names if not hasattr(returned, name)), None)
    if missing is not None:
        raise internal(
            f"backend '{backend}': the object that '{method}' returned has no method '{missing}', which {what} must have"
        )


class _ImportedFile(NamedTuple):
    """The class in one state of a file; `state` is (time of modification, size)."""

    module: str
    state: tuple[int, int]
    kind: Any


class BackendFiles:
    """Imports the files of backends: each once for all models, and again when it has changed. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._imported: dict[Path, _ImportedFile] = {}

    def backend_class(self, name: str, file: Path) -> Any:
        """The value of `Backend` in the file, None where it has none. Raises whatever the import raises."""
        path = file.resolve()
        with self._lock:
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
            earlier = self._imported.get(path)
            if earlier is not None and earlier.state == state:
                return earlier.kind
            module = import_file(path, f"custom_backend_{name}")
            if earlier is not None:
                # Models that run its code keep the module; new models get the new one.
                sys.modules.pop(earlier.module, None)
            self._forget_removed_files()
            kind = getattr(module, CLASS, None)
            self._imported[path] = _ImportedFile(module.__name__, state, kind)
            return kind

    def _forget_removed_files(self) -> None:
        # The files of each load request lie in a new folder, which is removed later.
        for path in [path for path in self._imported if not path.exists()]:
            sys.modules.pop(self._imported.pop(path).module, None)


class _UncachedSourceLoader(importlib.machinery.SourceFileLoader):
    """Neither reads nor writes compiled files: they would appear in model repositories, and may be out of date."""

    def path_stats(self, path: str) -> Any:
        raise OSError

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


_numbers = count(1)


def import_file(path: Path, name: str) -> Any:
    """Imports a Python file of a user as a new module, with `name` as part of its name. Raises whatever its code raises."""
    # Dataclasses, typing and others look up a class's module in `sys.modules`, so it is there under a unique name.
    module_name = f"weir_{name.replace('.', '_')}_{next(_numbers)}"
    loader = _UncachedSourceLoader(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
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
def _attributed_errors(name: str, file: Path) -> Iterator[None]:
    """Turns exceptions of the user's code into a WeirError with backend and traceback, without absolute paths."""
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


class CheckedInstance:
    """An instance of a user's backend, each of whose results is checked before it is sent.

    A malformed result would make the gateway drop the whole message, with the responses to other requests, and their
    clients would wait until they time out. Here it becomes an error of its own request. `backend` is the backend's name.
    """

    def __init__(self, backend: str, instance: Instance) -> None:
        self._backend = backend
        self._instance = instance
        self.region_gpu: int = getattr(instance, "region_gpu", -1)

    def execute(
        self, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None] | ExecutionHandle:
        """Runs the batch as `weir.worker.backend_api.interface.Instance` describes."""
        results = self._instance.execute(requests, _CheckedExecution(self._backend, len(requests), execution))
        if isinstance(results, ExecutionHandle):
            return _CheckedHandle(self._backend, results)
        return _check_all(self._backend, results)

    def close(self) -> None:
        """Closes the instance."""
        self._instance.close()


class _CheckedHandle(ExecutionHandle):
    def __init__(self, backend: str, handle: ExecutionHandle) -> None:
        self._backend = backend
        self._handle = handle

    def results(self) -> Sequence[Result | None]:
        return _check_all(self._backend, self._handle.results())


class _CheckedExecution(Execution):
    """Passes checked results on to the batch's execution."""

    __slots__ = ("_backend", "_batch", "_count")

    def __init__(self, backend: str, count: int, batch: Execution) -> None:
        super().__init__(batch.reader)
        self.output_regions = batch.output_regions
        self._backend = backend
        self._count = count
        self._batch = batch

    # The times of the phases are those of the batch.
    @property
    def input_end_ns(self) -> int:
        return self._batch.input_end_ns

    @input_end_ns.setter
    def input_end_ns(self, value: int) -> None:
        if hasattr(self, "_batch"):
            self._batch.input_end_ns = value

    @property
    def infer_end_ns(self) -> int:
        return self._batch.infer_end_ns

    @infer_end_ns.setter
    def infer_end_ns(self, value: int) -> None:
        if hasattr(self, "_batch"):
            self._batch.infer_end_ns = value

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        self._batch.respond(self._checked(position), checked(self._backend, result), is_final)

    def fail(self, error: WeirError) -> None:
        failure = checked(self._backend, Result(error=error)) or Result()
        self._batch.fail(failure.error or internal(f"backend '{self._backend}' failed without an error"))

    def is_cancelled(self, position: int) -> bool:
        return self._batch.is_cancelled(self._checked(position))

    @property
    def has_responded(self) -> bool:
        return self._batch.has_responded

    def _checked(self, position: int) -> int:
        if not 0 <= position < self._count:
            raise IndexError(f"there is no request {position} in a batch of {self._count}")
        return position


def _check_all(backend: str, results: Sequence[Result | None]) -> Sequence[Result | None]:
    if not isinstance(results, (list, tuple)):
        raise internal(f"backend '{backend}': expected a list of results, found type '{type(results).__name__}'")
    return [checked(backend, result) for result in results]


def checked(backend: str, result: Result | None) -> Result | None:
    """The result, or an error that says what is wrong with it."""
    problem = "" if result is None else _result_problem(result)
    return Result(error=internal(f"backend '{backend}': {problem}")) if problem else result


def _result_problem(result: Result) -> str:
    if not isinstance(result, Result):
        return f"expected a result, found type '{type(result).__name__}'"
    if result.error is not None:
        return "" if isinstance(result.error, WeirError) else f"an error must be a WeirError, found {result.error!r}"
    parameters = result.parameters
    if parameters is not None and not (
        isinstance(parameters, dict)
        and all(type(key) is str and type(value) in (str, int, float, bool) for key, value in parameters.items())
    ):
        return "response parameters must be a dictionary of strings, numbers or booleans by name"
    for tensors in (result.outputs, result.states):
        if not isinstance(tensors, (list, tuple)):
            return f"outputs must be a list of tensors, found type '{type(tensors).__name__}'"
        for tensor in tensors:
            if problem := _tensor_problem(tensor):
                return problem
    return ""


def _tensor_problem(tensor: Tensor) -> str:
    if not isinstance(tensor, Tensor) or type(tensor.name) is not str:
        return f"outputs must be tensors with names, found {tensor!r:.100}"
    datatype = DATATYPES.get(tensor.datatype) if type(tensor.datatype) is str else None
    if datatype is None:
        return f"output '{tensor.name}' has the unknown datatype {tensor.datatype!r:.100}"
    try:
        tensor.shape = [operator.index(dim) for dim in tensor.shape]
    except TypeError:
        return f"the shape of output '{tensor.name}' must be a list of integers, found {tensor.shape!r:.100}"
    if any(dim < 0 for dim in tensor.shape):
        return f"output '{tensor.name}' has the shape {tensor.shape}, with a negative dimension"
    return _content_problem(tensor, datatype.size_bytes)


def _content_problem(tensor: Tensor, element_bytes: int) -> str:
    data = tensor.data
    if not isinstance(data, (bytes, bytearray, memoryview, tuple, MappedRegion)):
        return f"the content of output '{tensor.name}' must be bytes, found type '{type(data).__name__}'"
    if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1 or not data.c_contiguous):
        if not data.c_contiguous:
            return f"the content of output '{tensor.name}' is not contiguous"
        tensor.data = data = data.cast("B")
    if isinstance(data, MappedRegion):
        return ""
    elements = element_count(tensor.shape)
    if tensor.datatype == "BYTES":
        fills = isinstance(data, tuple) or _string_count(data) == elements
    else:
        fills = tensor.size_bytes == elements * element_bytes
    return "" if fills else f"the content of output '{tensor.name}' does not fill its shape {tensor.shape}"


def _string_count(data: bytes | memoryview) -> int:
    """The number of strings in BYTES content, -1 where it is malformed."""
    try:
        return len(unpack_bytes(data))
    except ValueError:
        return -1
