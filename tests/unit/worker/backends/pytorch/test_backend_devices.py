"""PyTorch models on a GPU: tensors by their pointers, the instance's stream, and CUDA errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.torch_cuda import FakeTorch, from_device, on_device
from tests.support.models.torch_files import config, export, script, without_warnings
from tests.support.own_process import later
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES
from weir.worker.backend_api.interface import DeviceLost, DeviceTensor, InstanceDevice, ModelVersion, installed_version
from weir.worker.backends.pytorch import backend as pytorch_backend
from weir.worker.backends.pytorch import library as pytorch_library
from weir.worker.backends.pytorch.backend import PyTorchBackend
from weir.worker.backends.pytorch.library import TorchOptions
from weir.worker.backends.pytorch.programs import ExportedProgram, ScriptProgram
from weir.worker.backends.pytorch.runner import TorchCall, TorchDeviceRunner
from weir.worker.backends.pytorch.signature import Argument, Signature
from weir.worker.devices.gpus import NO_CUDA_BINDINGS, WorkerDevices
from weir.worker.execution.batch_tensors import NamedDatatype

torch = later("torch")

pytestmark = pytest.mark.torch


class Stream:
    """The stream of an instance, as `weir.worker.backend_api.interface.InstanceStream` has it."""

    device_id = 3
    handle = 77

    def allocate(self, size_bytes: int) -> Any:
        raise AssertionError("torch allocates by itself")


class Program:
    """A program of a test's own; see `weir.worker.backends.pytorch.programs.Program`."""

    writes_inputs = keeps_state = False

    def __init__(self, error: Exception | None = None, result: Any = None) -> None:
        self.signature = Signature((Argument("x"),))
        self.error = error
        self.result = result

    def __call__(self, arguments: Sequence[Any]) -> Any:
        if self.error is not None:
            raise self.error
        return arguments[0] if self.result is None else self.result

    def input_error(self, error: Exception) -> str:
        return ""


def runner(
    fake: Any, program: Any, outputs: str = "y:FP32:4", cleans: bool = False, **fields: Any
) -> TorchDeviceRunner:
    made = config(outputs=outputs, **fields)
    wanted = [NamedDatatype(output.name, BY_CONFIG_NAME[output.data_type].name) for output in made.output]
    call = TorchCall(fake, program, made, wanted)
    return TorchDeviceRunner(fake, call, TorchOptions(cleans_cache=cleans), wanted, Stream())


@pytest.fixture
def fake() -> FakeTorch:
    return FakeTorch(torch)


def test_a_program_runs_on_the_memory_it_is_given_on_the_instances_stream(fake: FakeTorch, tmp_path: Path) -> None:
    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.t().contiguous().t() * 2, x.sum(1, keepdim=True).to(torch.int64)

    export(tmp_path, Sums(), (torch.ones(2, 4),))
    program = ExportedProgram(torch, tmp_path / "1" / "model.pt2", "cpu")
    made = runner(fake, program, "double:FP32:4 sum:INT64:1", cleans=True)
    assert fake.cuda.entered == ["device 3", "stream 77 of cuda:3"]
    assert torch.is_inference_mode_enabled()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    double, total = made.enqueue({"x": on_device(array, "FP32")})
    assert isinstance(double, DeviceTensor)
    assert isinstance(total, DeviceTensor)
    assert (double.datatype, double.shape, total.datatype, total.shape) == ("FP32", (3, 4), "INT64", (3, 1))
    np.testing.assert_array_equal(from_device(double), array * 2)  # contiguous, whatever the model left
    assert from_device(total).tolist() == [[6], [22], [38]]
    assert fake.cuda.emptied == 1
    made.close()
    assert fake.cuda.entered == []
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("datatype", ["BOOL", "UINT16", "INT8", "FP16", "BF16", "FP64"])
def test_an_input_is_not_copied(fake: FakeTorch, datatype: str) -> None:
    made = runner(fake, Program(), f"y:{datatype}:4")
    array = np.ones((1, 4), DATATYPES[datatype].numpy)
    given = on_device(array, datatype)
    (output,) = made.enqueue({"x": given})
    made.close()
    assert isinstance(output, DeviceTensor)
    assert (output.datatype, output.shape, output.pointer) == (datatype, (1, 4), given.pointer)


def test_strings_stay_on_the_host_both_ways(fake: FakeTorch, tmp_path: Path) -> None:
    class Words(torch.nn.Module):
        def forward(self, x: torch.Tensor, words: list[str]) -> tuple[torch.Tensor, list[str]]:
            return x, words

    script(tmp_path, Words())
    with without_warnings():
        program = ScriptProgram(torch, tmp_path / "1" / "model.pt", "cpu")
    made = runner(fake, program, "y:FP32:1 results:STRING:1", inputs="x:FP32:1 words:STRING:1", max_batch_size=0)
    assert made.host_inputs == {"words"}
    numbers = np.ones(1, np.float32)
    words = np.array([b"a"], np.object_)
    _, results = made.enqueue({"x": on_device(numbers, "FP32"), "words": words})
    made.close()
    assert isinstance(results, np.ndarray)
    assert results.tolist() == [b"a"]


@pytest.mark.parametrize(
    ("error", "is_lost", "code"),
    [
        (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False, ErrorCode.UNAVAILABLE),
        # Of TorchScript
        (lambda: RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), False, ErrorCode.UNAVAILABLE),
        (lambda: RuntimeError("CUDA error: invalid configuration argument"), False, ErrorCode.INTERNAL),
        (lambda: RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), True, None),
        (lambda: ValueError("of its own"), True, ErrorCode.INTERNAL),
    ],
)
def test_errors_of_cuda(fake: FakeTorch, error: Callable[[], Exception], is_lost: bool, code: ErrorCode | None) -> None:
    fake.cuda.is_lost = is_lost
    made = runner(fake, Program(error()))
    given = {"x": on_device(np.ones((1, 4), np.float32), "FP32")}
    if code is None:
        with pytest.raises(DeviceLost, match=r"an illegal memory access was encountered$"):
            made.enqueue(given)
    else:
        with pytest.raises(WeirError) as raised:
            made.enqueue(given)
        assert raised.value.code is code
    made.close()


@pytest.mark.parametrize(("kind", "emptied"), [("KIND_GPU", 1), ("KIND_CPU", 0)])
def test_an_unloaded_model_returns_torch_s_memory_to_the_gpu(
    fake: FakeTorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, emptied: int
) -> None:
    export(tmp_path, torch.nn.Identity(), (torch.ones(2, 4),))
    monkeypatch.setattr(pytorch_backend, "_torch_device", lambda torch, device: "cpu")
    monkeypatch.setattr("weir.worker.cuda.device_instance.DeviceInstance", lambda *_: None)
    made = config(inputs="x:FP32:4", outputs="OUTPUT__0:FP32:4")
    loaded = PyTorchBackend().load(ModelVersion("m", 1, tmp_path, made))
    loaded._torch = fake  # type: ignore[attr-defined]
    loaded.create_instance(InstanceDevice(kind, 0, "m_0"))
    loaded.unload()
    assert fake.cuda.emptied == emptied


@pytest.mark.parametrize(("place", "runs"), [("cuda:0", 6), ("cuda:1", 4), ("cuda:7", 2), ("cpu", 5), (None, 5)])
def test_a_package_has_runners_for_all_batches_on_its_device(place: str | None, runs: int) -> None:
    groups = [
        {"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]},
        {"kind": "KIND_GPU", "count": 1, "gpus": [0]},
        {"kind": "KIND_CPU", "count": 5},
    ]
    assert (
        pytorch_backend.runs_at_once(ModelConfig.model_validate({"name": "m", "instance_group": groups}), place) == runs
    )


def test_availability_is_determined_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, gpu = PyTorchBackend(), WorkerDevices((0,), (0,))
    monkeypatch.setattr(pytorch_backend, "installed_version", lambda package: "2.13.0")
    monkeypatch.setattr(pytorch_library, "built_for_cuda", lambda: "")
    found = backend.availability(gpu)
    assert (found.runs_on, found.problems) == (
        ("KIND_CPU", "KIND_MODEL"),
        ("torch 2.13.0 is built without CUDA, so it can't run on GPUs",),
    )
    monkeypatch.setattr(pytorch_library, "built_for_cuda", lambda: "13.0")
    monkeypatch.setattr(pytorch_backend, "cuda_obstacle", lambda: NO_CUDA_BINDINGS)
    assert "install weir-serve[cuda]" in backend.availability(gpu).problems[0]
    monkeypatch.setattr(pytorch_backend, "cuda_obstacle", lambda: "")
    assert backend.availability(gpu).runs_on == ("KIND_CPU", "KIND_MODEL", "KIND_GPU")
    assert backend.availability(WorkerDevices()).problems == ("this machine has no GPU",)
    monkeypatch.setattr(pytorch_backend, "installed_version", lambda package: "")
    assert backend.availability(gpu).problems == ("the torch package is not installed: install weir-serve[torch]",)


def test_the_build_is_read_from_its_files() -> None:
    assert installed_version("torch") == torch.version.__version__
    assert installed_version("no-such-package", "numpy") == np.__version__
    assert installed_version("no-such-package") == ""
    assert pytorch_library.built_for_cuda() == (torch.version.cuda or "")
