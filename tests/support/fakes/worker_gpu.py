"""Gives the worker that runs in this process a fake GPU (`tests/support/fakes/gpu_worker`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tests.support.fakes.cuda_device import KernelRunner
from weir.schemas.config.model_config import ModelConfig
from weir.worker.backend_api.interface import Availability, Instance, InstanceDevice, InstanceStream, ModelVersion
from weir.worker.backends.registry import BackendRegistry
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.execution.batch_tensors import NamedDatatype
from weir.worker.execution.instance import ModelEnvironment


class MadeUpBackend:
    """A backend that runs on the fake GPU."""

    def availability(self, devices: WorkerDevices) -> Availability:
        return Availability(("KIND_GPU",))

    def describe(self, model: ModelVersion) -> None:
        return None

    def load(self, model: ModelVersion) -> MadeUpModel:
        return MadeUpModel(model.config)


class MadeUpModel:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def create_instance(self, device: InstanceDevice) -> Instance:
        assert device.kind == "KIND_GPU"
        return DeviceInstance(self._opened, device, self._config, [NamedDatatype("OUT", "FP32")])

    def _opened(self, stream: InstanceStream) -> KernelRunner:
        runtime = importlib.import_module("cuda.bindings.runtime")

        def function(arrays: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
            is_fault = bool((arrays["IN"] == 666).any())
            with suppress(FileNotFoundError):
                os.unlink(os.environ["MADE_UP_GPU_FAULT"])
                is_fault = True
            if is_fault:
                runtime.array_at(8, np.float32, (1,))
            return [arrays["IN"] * 2 + 1]

        return KernelRunner(runtime, stream, function, lambda inputs: [("FP32", tuple(inputs["IN"].shape))])

    def unload(self) -> None:
        pass


def install() -> None:
    """Makes all backends of this process run on the fake GPU."""
    make, of = ModelEnvironment.__init__, BackendRegistry.of

    def with_gpu(self: ModelEnvironment, **fields: Any) -> None:
        make(self, **{**fields, "devices": WorkerDevices((0,), (0,))})

    def with_backend(self: BackendRegistry, config: ModelConfig, *more: Any) -> Any:
        return MadeUpBackend() if config.backend == "made_up" else of(self, config, *more)

    ModelEnvironment.__init__ = with_gpu  # type: ignore[method-assign]
    BackendRegistry.of = with_backend  # type: ignore[method-assign]
