"""ONNX Runtime on a real GPU: on the instance's stream, with tensors that stay on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.onnx_files import output_of, parameters, run_instance, version
from weir.worker.backend_api.interface import DeviceTensor, InstanceDevice
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend
from weir.worker.backends.onnxruntime.gpu_runner import open_device_runner
from weir.worker.backends.onnxruntime.options import OnnxOptions
from weir.worker.backends.onnxruntime.session import library

pytestmark = pytest.mark.gpu

GROUP = "instance_group [{ kind: KIND_GPU gpus: [0] }]"


class Memory:
    """Device memory for as long as it is referred to."""

    def __init__(self, stream: Stream, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._stream = stream
        self.pointer = stream.call("cudaMallocAsync", max(1, size_bytes), stream.handle)

    def __del__(self) -> None:
        self._stream.call("cudaFreeAsync", self.pointer, self._stream.handle)


class Stream:
    """See `weir.worker.backend_api.interface.InstanceStream`."""

    device_id = 0

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        self.call("cudaSetDevice", 0)
        self.handle = int(self.call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))

    def call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._runtime, name)(*arguments)
        assert int(status) == 0, f"{name}: {status}"
        return values[0] if values else None

    def allocate(self, size_bytes: int) -> Memory:
        return Memory(self, size_bytes)

    def put(self, array: np.ndarray) -> DeviceTensor:
        memory = self.allocate(array.nbytes)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", memory.pointer, array.ctypes.data, array.nbytes, kind, self.handle)
        return DeviceTensor("FP32", array.shape, int(memory.pointer), memory)

    def get(self, tensor: DeviceTensor) -> np.ndarray:
        array = np.empty(tensor.shape, np.float32)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        size = math.prod(tensor.shape) * 4
        self.call("cudaMemcpyAsync", array.ctypes.data, tensor.pointer, size, kind, self.handle)
        self.call("cudaStreamSynchronize", self.handle)
        return array


@pytest.fixture
def stream() -> Iterator[Stream]:
    opened = Stream()
    yield opened
    opened.call("cudaStreamSynchronize", opened.handle)


def test_batches_run_on_the_stream_they_are_given(stream: Stream, tmp_path: Path) -> None:
    model = version(tmp_path, GROUP)
    runner = open_device_runner(library(), model, OnnxOptions.of(model), ["OUT"], stream)
    generator = np.random.default_rng(7)
    arrays = [generator.random((rows, 1000), np.float32) for rows in (1, 8, 1, 8, 1, 8, 64)]
    outputs = [runner.enqueue({"IN": stream.put(array)})[0] for array in arrays]
    for array, output in zip(arrays, outputs, strict=True):
        np.testing.assert_array_equal(stream.get(output), -array)  # type: ignore[arg-type]
    runner.close()


def test_instances_that_share_a_session_respond(tmp_path: Path) -> None:
    model = version(tmp_path, GROUP + parameters(share_session_between_instances="1"))
    loaded = OnnxRuntimeBackend().load(model)
    instance = loaded.create_instance(InstanceDevice("KIND_GPU", 0, "net_0"))
    array = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(run_instance(instance, array), -array)
    np.testing.assert_array_equal(output_of(version(tmp_path / "cpu"), array), -array)
