"""The fake CUDA runtime of `tests/support/fakes` in this process, and models that run on it."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weir.bus.payloads.arena import PayloadReader
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.worker.backend_api.interface import (
    DeviceTensor,
    Execution,
    ExecutionHandle,
    InstanceDevice,
    InstanceStream,
    Result,
)
from weir.worker.cuda import pinned, stream
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.execution.batch_tensors import NamedDatatype

FAKES = Path(__file__).parent / "site"

GPU = InstanceDevice("KIND_GPU", 0, "m_0_0")

Kernel = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]


@contextmanager
def fake_cuda_runtime() -> Iterator[Any]:
    """The fake runtime, which `weir.worker.cuda` uses within the context."""
    modules = ("runtime", "driver", "utils", "_device")
    ours = ("cuda", "cuda.bindings", *(f"cuda.bindings.{name}" for name in modules))
    with pytest.MonkeyPatch.context() as patch:
        for name in ours:
            patch.delitem(sys.modules, name, raising=False)
        patch.syspath_prepend(str(FAKES))
        runtime = importlib.import_module("cuda.bindings.runtime")
        assert Path(str(runtime.__file__)).is_relative_to(FAKES)
        patch.setattr(stream._MemoryPools, "_pools", {})
        patch.setattr(stream.CudaStream, "_idle", defaultdict(list))
        patch.setattr(pinned.PINNED, "used_bytes", 0)
        patch.setattr(pinned.PINNED, "total_bytes", pinned.LEAST_POOL_BYTES)
        try:
            yield runtime
        finally:
            for name in ours:
                sys.modules.pop(name, None)


class KernelRunner:
    """A `DeviceRunner` of one kernel, which is `function` of the inputs' arrays.

    `shapes(inputs)` returns (datatype, shape) of its outputs. Those in `on_host` are arrays.
    """

    can_capture = True

    def __init__(
        self,
        runtime: Any,
        instance_stream: InstanceStream,
        function: Kernel,
        shapes: Callable[[Mapping[str, Any]], Sequence[tuple[str, tuple[int, ...]]]],
        host_inputs: Sequence[str] = (),
        us: float = 100.0,
    ) -> None:
        self.host_inputs = host_inputs
        self.enqueued = 0
        self.is_closed = False
        self._runtime = runtime
        self._stream = instance_stream
        self._function = function
        self._shapes = shapes
        self._us = us

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> list[DeviceTensor | np.ndarray]:
        self.enqueued += 1
        runtime, outputs = self._runtime, []
        for datatype, shape in self._shapes(inputs):
            memory = self._stream.allocate(int(np.prod(shape)) * DATATYPES[datatype].size_bytes)
            outputs.append(DeviceTensor(datatype, shape, memory.pointer, memory))
        # The captured function refers to addresses only, as a kernel does, and does not keep the memory.
        places = [(output.pointer, DATATYPES[output.datatype].numpy, output.shape) for output in outputs]
        sources = {
            name: value
            if isinstance(value, np.ndarray)
            else (value.pointer, DATATYPES[value.datatype].numpy, value.shape)
            for name, value in inputs.items()
        }
        function = self._function

        def kernel() -> None:
            arrays = {
                name: value if isinstance(value, np.ndarray) else runtime.array_at(*value).copy()
                for name, value in sources.items()
            }
            for place, array in zip(places, function(arrays), strict=True):
                runtime.array_at(*place)[...] = array

        status = runtime.launch(self._stream.handle, kernel, self._us)[0]
        assert not status, status
        return list(outputs)

    def close(self) -> None:
        self.is_closed = True


def doubling(runtime: Any, us: float = 100.0) -> Callable[[InstanceStream], KernelRunner]:
    """A model whose OUT is twice its IN plus one."""

    def opened(instance_stream: InstanceStream) -> KernelRunner:
        return KernelRunner(
            runtime,
            instance_stream,
            lambda arrays: [arrays["IN"] * 2 + 1],
            lambda inputs: [("FP32", tuple(inputs["IN"].shape))],
            us=us,
        )

    return opened


def config(**fields: Any) -> ModelConfig:
    given = {
        "name": "m",
        "max_batch_size": 64,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    return ModelConfig.model_validate(given | fields)


OUT = [NamedDatatype("OUT", "FP32")]


def doubling_instance(runtime: Any, **fields: Any) -> DeviceInstance:
    return DeviceInstance(doubling(runtime), GPU, config(**fields), OUT)


def request(*tensors: Tensor) -> InferRequest:
    return InferRequest("m", inputs=list(tensors))


def numbers(values: Any) -> InferRequest:
    return request(Tensor.from_numpy("IN", np.atleast_2d(np.array(values, np.float32)), "FP32"))


def execution() -> Execution:
    return Execution(PayloadReader())


def run(instance: DeviceInstance, *requests: InferRequest) -> Sequence[Result | None]:
    pending = instance.execute(requests, execution())
    assert isinstance(pending, ExecutionHandle)
    return pending.results()


def values(results: Sequence[Result | None]) -> list[Any]:
    return [result.outputs[0].to_numpy().tolist() for result in results if result is not None]
