"""Sessions of ONNX Runtime under `DeviceInstance`, on fakes of both that share the memory of one fake GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.onnxruntime_gpu import FakeGpu, FakeOnnxRuntime
from tests.support.models.onnx_files import version
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import InstanceDevice
from weir.worker.backends.onnxruntime.backend import OnnxRuntimeBackend

pytest.importorskip("weir.worker.cuda.device_instance")
fake_cuda_runtime = pytest.importorskip("tests.support.fakes.cuda_device").fake_cuda_runtime
run = pytest.importorskip("tests.support.fakes.cuda_device").run

GROUP = "instance_group [{ kind: KIND_GPU gpus: [0] }]"


class MadeUpGpu(FakeGpu):
    """`FakeGpu` on the made-up CUDA runtime."""

    def __init__(self, runtime: Any) -> None:
        super().__init__()
        self._runtime = runtime

    def allocate(self, size: int) -> int:
        status, pointer = self._runtime.cudaMallocAsync(max(1, size), self._handle)
        assert not status
        self.blocks[int(pointer)] = np.empty(0)
        return int(pointer)

    def at(self, pointer: int, size: int) -> np.ndarray:
        return self._runtime.array_at(pointer, np.uint8, (size,))  # type: ignore[no-any-return]

    def stream(self, handle: int) -> Any:
        self._handle = handle
        return MadeUpStream(self._runtime, handle)

    _handle = 0


class MadeUpStream:
    """`work` that is appended is a kernel."""

    def __init__(self, runtime: Any, handle: int) -> None:
        self.work = self
        self._runtime = runtime
        self._handle = handle

    def append(self, operation: Any) -> None:
        self._runtime.launch(self._handle, operation)

    def synchronize(self) -> None:
        self._runtime.cudaStreamSynchronize(self._handle)


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOnnxRuntime]:
    with fake_cuda_runtime() as runtime:
        fake = FakeOnnxRuntime(MadeUpGpu(runtime))
        monkeypatch.setitem(sys.modules, "onnxruntime", fake)  # type: ignore[arg-type]
        yield fake


@pytest.mark.parametrize("more", ["", "optimization { cuda { graphs: true } }"], ids=["plain", "graphs"])
def test_each_request_gets_its_own_rows(
    ort: FakeOnnxRuntime, tmp_path: Path, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = OnnxRuntimeBackend().load(version(tmp_path, GROUP + more))
    instance = loaded.create_instance(InstanceDevice("KIND_GPU", 0, "net_0"))
    for number in range(6):
        arrays = [np.full((rows, 3), number * 10 + rows, np.float32) for rows in (1, 2)]
        requests = [InferRequest("net", inputs=[Tensor.from_numpy("IN", array, "FP32")]) for array in arrays]
        for result, array in zip(run(instance, *requests), arrays, strict=True):
            np.testing.assert_array_equal(result.outputs[0].to_numpy(), -array)
    instance.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == (["model 'net' runs without CUDA graphs: its backend can't be captured"] if more else [])
