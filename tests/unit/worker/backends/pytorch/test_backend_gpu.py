"""PyTorch models on a real GPU, on the stream of the instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.torch_files import config, export, script, without_warnings
from tests.support.own_process import later
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.interface import DeviceTensor
from weir.worker.backends.pytorch.library import TorchOptions
from weir.worker.backends.pytorch.programs import CompiledProgram, ExportedProgram, ScriptProgram
from weir.worker.backends.pytorch.runner import TorchCall, TorchDeviceRunner
from weir.worker.execution.batch_tensors import NamedDatatype

torch = later("torch")
networks = later("tests.support.models.torch_networks")

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


class Stream:
    """A stream of torch's, seen as `weir.worker.backend_api.interface.InstanceStream`."""

    device_id = 0

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(DEVICE)
        self.handle = self._stream.cuda_stream

    def allocate(self, size_bytes: int) -> Any:
        raise AssertionError("torch allocates by itself")


def runner(program: Any, outputs: str = "y:FP32:4 best:INT64:1") -> TorchDeviceRunner:
    made = config(outputs=outputs)
    wanted = [NamedDatatype(output.name, output.data_type.removeprefix("TYPE_")) for output in made.output]
    return TorchDeviceRunner(torch, TorchCall(torch, program, made, wanted), TorchOptions(), wanted, Stream())


def on_gpu(array: np.ndarray, datatype: str = "FP32") -> DeviceTensor:
    owner = torch.from_numpy(array).to(DEVICE)
    torch.cuda.synchronize()
    return DeviceTensor(datatype, array.shape, owner.data_ptr(), owner)


def from_gpu(tensor: Any) -> np.ndarray:
    torch.cuda.synchronize()
    array: np.ndarray = tensor.owner.cpu().numpy()
    return array


@pytest.mark.timeout(300)  # the first compilation on a machine compiles torch's headers too
@pytest.mark.parametrize("kind", ["script", "exported", "compiled"])
def test_a_model_responds_as_on_the_cpu(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    net = networks.Best().eval()
    program: Any
    if kind == "script":
        script(tmp_path, net)
        with without_warnings():
            program = ScriptProgram(torch, tmp_path / "1" / "model.pt", DEVICE)
    elif kind == "exported":
        export(tmp_path, net, (torch.ones(2, 4),))
        with without_warnings():  # some releases of torch warn that they read the file's bytes in place
            program = ExportedProgram(torch, tmp_path / "1" / "model.pt2", DEVICE)
    else:
        batch = torch.export.Dim("batch", min=1, max=16)
        on_device = networks.Best().to(DEVICE).eval()
        on_device.load_state_dict(net.state_dict())
        exported = torch.export.export(on_device, (torch.ones(2, 4, device=DEVICE),), dynamic_shapes=({0: batch},))
        with without_warnings():
            path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
            program = CompiledProgram(torch, Path(path), DEVICE, 1, True)
    made = runner(program)
    for rows in (1, 3, 16):
        array = np.random.default_rng(rows).random((rows, 4), np.float32)
        y, best = made.enqueue({"x": on_gpu(array)})
        expected = net(torch.from_numpy(array))
        np.testing.assert_allclose(from_gpu(y), expected[0].detach().numpy(), rtol=1e-3, atol=1e-4)
        assert from_gpu(best).tolist() == expected[1].tolist()
    made.close()


def test_an_input_is_read_where_it_lies(tmp_path: Path) -> None:
    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    script(tmp_path, Same())
    with without_warnings():
        made = runner(ScriptProgram(torch, tmp_path / "1" / "model.pt", DEVICE), "y:FP32:4")
    given = on_gpu(np.ones((2, 4), np.float32))
    (output,) = made.enqueue({"x": given})
    assert isinstance(output, DeviceTensor)
    assert output.pointer == given.pointer
    made.close()


def test_full_memory_ends_no_process(tmp_path: Path) -> None:
    class Wants(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.empty([int(x[0, 0].item()), 1 << 30], device=x.device)[:1, :4] + x if x[0, 0] > 0 else x

    script(tmp_path, Wants())
    with without_warnings():
        made = runner(ScriptProgram(torch, tmp_path / "1" / "model.pt", DEVICE), "y:FP32:4")
    with pytest.raises(WeirError) as raised:
        made.enqueue({"x": on_gpu(np.full((1, 4), 10_000, np.float32))})
    assert raised.value.code is ErrorCode.UNAVAILABLE
    (output,) = made.enqueue({"x": on_gpu(np.zeros((1, 4), np.float32))})
    assert from_gpu(output).tolist() == [[0, 0, 0, 0]]
    made.close()
