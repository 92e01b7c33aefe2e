"""TensorRT: plans, run by one execution context for each instance; on GPUs alone.

One engine serves all instances of a version on one GPU and holds the weights; no context is used by two threads. TensorRT
crashes a process that has no driver, so nothing of it is touched before a GPU has been seen. Served are the versions whose
loop of inference is the same: 10 and 11.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import threading
from importlib import metadata
from typing import Any

from repository.completion import DescribedModel
from repository.paths import path_inside
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_config import ModelConfig
from worker.backend import Availability, Instance, InstanceDevice, LoadedModel, ModelVersion
from worker.backends.tensorrt_engine import TensorRtEngine
from worker.backends.tensorrt_runner import TensorRtRunner
from worker.devices import WorkerDevices
from worker.gpus import find_gpus
from worker.tensor_declarations import TensorDeclarations

logger = logging.getLogger("weir.tensorrt")

_MODULES = ("tensorrt", "tensorrt_lean")
_PACKAGES = ("tensorrt-cu13", "tensorrt-cu12", "tensorrt", "tensorrt-lean-cu13", "tensorrt-lean-cu12")
_FORMATS = ("model.plan",)

NOT_INSTALLED = "the tensorrt package is not installed: install weir-serve[tensorrt]"


class TensorRtBackend:
    """See `worker.backend.Backend`."""

    def availability(self, devices: WorkerDevices) -> Availability:
        """With the package `tensorrt` and a GPU."""
        if not any(map(importlib.util.find_spec, _MODULES)):
            return Availability((), _FORMATS, "", (NOT_INSTALLED,))
        if not devices.host_gpus:
            return Availability((), _FORMATS, _version(), ("it runs on GPUs alone, and there is none",))
        return Availability(("KIND_GPU",), _FORMATS, _version())

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The engine's inputs and outputs; a dimension that varies is -1."""
        return _Engines(model).on(0).described()

    def load(self, model: ModelVersion) -> LoadedModel:
        """Engines are made with the first instance on each GPU. Raises WeirError without one."""
        return _TensorRtModel(model)


class _TensorRtModel:
    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self._engines = _Engines(model)

    def create_instance(self, device: InstanceDevice) -> Instance:
        config = self._model.config
        if device.kind != "KIND_GPU":
            raise invalid(f"instance {device.name} is of kind {device.kind}, but TensorRT runs on KIND_GPU alone")
        engine = self._engines.on(device.device_id)
        declared = TensorDeclarations(
            {tensor.name: tensor.shape for tensor in engine.inputs},
            {tensor.name: tensor.data_type for tensor in engine.outputs},
        )
        declared.check_inputs(config)
        _check_types(config, engine)
        outputs, states = declared.outputs(config), declared.states(config)
        names = [tensor.name for tensor in dict.fromkeys([*outputs, *states])]
        strategy = _parameter(config, "execution_context_allocation_strategy")

        def open_runner(stream: Any) -> TensorRtRunner:
            return TensorRtRunner(engine, stream, names, config.name, device.profiles, strategy)

        from worker.cuda.device_instance import DeviceInstance

        return DeviceInstance(open_runner, device, config, outputs, states)

    def unload(self) -> None:
        self._engines.close()


def _check_types(config: ModelConfig, engine: TensorRtEngine) -> None:
    # Of a version that is not the one by which the configuration was completed, or of none.
    for tensor in engine.inputs:
        written = next((row.data_type for row in config.input if row.name == tensor.name), tensor.data_type)
        if written != tensor.data_type:
            raise invalid(
                f"model '{config.name}', tensor '{tensor.name}': the model expects {tensor.data_type}, but the "
                f"configuration specifies {written}"
            )


class _Engines:
    """The engines of one model version, by GPU."""

    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._engines: dict[int, TensorRtEngine] = {}

    def on(self, gpu: int) -> TensorRtEngine:
        """The engine on this GPU, which is the calling thread's current one afterwards."""
        capability = _capability(gpu)
        trt = _imported()
        _set_device(gpu)
        with self._lock:  # TensorRT deserializes one engine at a time
            engine = self._engines.get(gpu)
            if engine is None:
                settings = self._model.settings
                _load_plugins(settings.get("plugins", ""))
                compatible = settings.get("version-compatible", "").lower() == "true"
                plan = _plan(self._model, capability)
                engine = self._engines[gpu] = TensorRtEngine(trt, plan, _log(trt), compatible)
            return engine

    def close(self) -> None:
        self._engines.clear()


def _plan(model: ModelVersion, capability: str) -> bytes:
    config = model.config
    filename = config.cc_model_filenames.get(capability) or config.default_model_filename or _FORMATS[0]
    try:
        return path_inside(model.directory, filename).read_bytes()
    except OSError as error:
        raise WeirError(
            ErrorCode.UNAVAILABLE, f"unable to find '{filename}' for model '{config.name}', version {model.version}"
        ) from error


def _imported() -> Any:
    for name in _MODULES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise WeirError(ErrorCode.UNAVAILABLE, NOT_INSTALLED)


def _version() -> str:
    for package in _PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _capability(gpu: int) -> str:
    """The compute capability of a GPU ("9.0"), by the driver alone. Raises WeirError where there is no such GPU."""
    host = find_gpus()
    found = next((one for one in host.gpus if one.ordinal == gpu), None)
    if found is None:
        raise WeirError(ErrorCode.UNAVAILABLE, f"TensorRT needs a GPU: {host.problem or f'there is no GPU {gpu}'}")
    return ".".join(map(str, found.compute_capability))


def _set_device(gpu: int) -> None:
    from cuda.bindings import runtime

    (status,) = runtime.cudaSetDevice(gpu)
    if int(status):
        raise WeirError(ErrorCode.UNAVAILABLE, f"GPU {gpu} can't be used: {getattr(status, 'name', status)}")


_plugins: set[str] = set()


def _load_plugins(paths: str) -> None:
    """Loads the libraries of `--backend-config=tensorrt,plugins=A;B`, each once. Raises WeirError."""
    for path in filter(None, paths.split(";")):
        if path not in _plugins:
            try:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise invalid(f"TensorRT plugin library '{path}' can't be loaded: {error}") from error
            _plugins.add(path)


def _log(trt: Any) -> Any:
    """TensorRT's messages in the worker's log."""
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, msg: str) -> None:
            logger.log(levels.get(severity.name, logging.DEBUG), "%s", msg)

    return Log()


def _parameter(config: ModelConfig, key: str) -> str:
    parameter = config.parameters.get(key)
    return "" if parameter is None else parameter.string_value
