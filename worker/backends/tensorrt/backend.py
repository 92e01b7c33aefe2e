"""TensorRT: plans, which run on GPUs only, in one execution context for each instance.

All instances of a version on one GPU share one engine, which holds the weights; no context is used by two threads. TensorRT
crashes a process without a driver, so none of it is used before a GPU is found. Versions 10 and 11 are supported, whose
inference calls are the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
import threading
from typing import Any

from weir.repository.completion import DescribedModel
from weir.repository.paths import path_inside
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid
from weir.worker.backend_api.interface import (
    Availability,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    installed_version,
)
from weir.worker.backends.declarations import TensorDeclarations
from weir.worker.backends.tensorrt.engine import RunnerOptions, TensorRtEngine, TensorRtRunner
from weir.worker.devices.gpus import WorkerDevices, cuda_obstacle, find_gpus

logger = logging.getLogger("weir.tensorrt")

_MODULES = ("tensorrt", "tensorrt_lean")
_PACKAGES = ("tensorrt-cu13", "tensorrt-cu12", "tensorrt", "tensorrt-lean-cu13", "tensorrt-lean-cu12")
_FORMATS = ("model.plan",)

NOT_INSTALLED = "the tensorrt package is not installed: install weir-serve[tensorrt]"


class TensorRtBackend:
    """Describes and loads TensorRT plans (`weir.worker.backend_api.interface.Backend`)."""

    def availability(self, devices: WorkerDevices) -> Availability:
        """Requires the package `tensorrt` and a GPU."""
        if not any(map(importlib.util.find_spec, _MODULES)):
            return Availability((), _FORMATS, "", (NOT_INSTALLED,))
        if not devices.host_gpus:
            return Availability(
                (), _FORMATS, installed_version(*_PACKAGES), ("it runs on GPUs only, and this machine has none",)
            )
        if obstacle := cuda_obstacle():
            return Availability((), _FORMATS, installed_version(*_PACKAGES), (obstacle,))
        return Availability(("KIND_GPU",), _FORMATS, installed_version(*_PACKAGES))

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The inputs and outputs of the engine on the worker's first GPU; a variable dimension is -1."""
        gpu = model.own_gpus[0] if model.own_gpus else 0
        return _Engines(model).on(gpu).described()

    def load(self, model: ModelVersion) -> LoadedModel:
        """Prepares a version; the first instance on each GPU deserializes the engine."""
        return _TensorRtModel(model)


class _TensorRtModel:
    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self._engines = _Engines(model)

    def create_instance(self, device: InstanceDevice) -> Instance:
        config = self._model.config
        if device.kind != "KIND_GPU":
            raise invalid(f"instance {device.name} is of kind {device.kind}, but TensorRT runs on KIND_GPU only")
        engine = self._engines.on(device.device_id)
        declared = TensorDeclarations(
            {tensor.name: tensor.shape for tensor in engine.inputs},
            {tensor.name: tensor.data_type for tensor in engine.outputs},
        )
        declared.check_inputs(config)
        _check_types(config, engine)
        outputs, states = declared.outputs(config), declared.states(config)
        names = [tensor.name for tensor in dict.fromkeys([*outputs, *states])]
        strategy = config.parameter("execution_context_allocation_strategy")
        options = RunnerOptions(device.profiles, strategy)

        def open_runner(stream: Any) -> TensorRtRunner:
            return TensorRtRunner(engine, stream, names, config.name, options)

        from weir.worker.cuda.device_instance import DeviceInstance

        return DeviceInstance(open_runner, device, config, outputs, states)

    def unload(self) -> None:
        self._engines.close()


def _check_types(config: ModelConfig, engine: TensorRtEngine) -> None:
    # The configuration may have been completed by another version, or not at all.
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
        """The engine on this GPU, which becomes the current GPU of the calling thread."""
        capability = _capability(gpu)
        trt = _import_tensorrt()
        _set_device(gpu)
        with self._lock:  # TensorRT deserializes one engine at a time
            engine = self._engines.get(gpu)
            if engine is None:
                settings = self._model.settings
                _load_plugins(settings.get("plugins", ""))
                compatible = settings.get("version-compatible", "").lower() == "true"
                plan = _plan(self._model, capability)
                logger = _logger(trt)
                _register_plugins(trt, logger)
                engine = self._engines[gpu] = TensorRtEngine(trt, plan, logger, compatible)
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


def _import_tensorrt() -> Any:
    for name in _MODULES:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise WeirError(ErrorCode.UNAVAILABLE, NOT_INSTALLED)


def _capability(gpu: int) -> str:
    """The compute capability of a GPU ("9.0") from the driver. Raises WeirError if there is no such GPU."""
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


@functools.cache
def _register_plugins(trt: Any, logger: Any) -> None:
    """Registers the plugins that are part of TensorRT, once in the process: engines that use them can't be read before.

    The lean runtime has none.
    """
    register = getattr(trt, "init_libnvinfer_plugins", None)
    if register is not None and not register(logger, ""):
        raise internal("TensorRT could not register its plugins, see the worker's log")


@functools.cache
def _logger(trt: Any) -> Any:
    """The process's logger, which writes TensorRT's messages to the worker's log.

    TensorRT keeps a pointer to the first logger it gets, and uses it for all engines.
    """
    levels = {"INTERNAL_ERROR": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, msg: str) -> None:
            logger.log(levels.get(severity.name, logging.DEBUG), "%s", msg)

    return Log()
