"""PyTorch under `DeviceInstance`, on a fake GPU whose memory is that of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.cuda_device import execution, fake_cuda_runtime, numbers, run, values
from tests.support.fakes.torch_cuda import FakeTorch
from tests.support.models.torch_files import config, request, script, without_warnings
from tests.support.own_process import later
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.interface import InstanceDevice
from weir.worker.backends.pytorch.library import TorchOptions
from weir.worker.backends.pytorch.programs import ScriptProgram
from weir.worker.backends.pytorch.runner import TorchCall, TorchDeviceRunner
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.execution.batch_tensors import NamedDatatype

torch = later("torch")
networks = later("tests.support.models.torch_networks")

pytestmark = pytest.mark.torch


class TorchOnMadeUpCuda(FakeTorch):
    """Computes at once what has arrived by then on the stream that is entered."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(torch)
        entered = self.cuda.entered

        class OnDevice(torch.Tensor):  # type: ignore[misc]
            is_cuda = True

            def data_ptr(self) -> int:
                content = self.as_subclass(torch.Tensor).numpy().copy().reshape(-1).view(np.uint8)
                status, pointer = runtime.cudaMallocAsync(max(1, content.size), stream())
                assert not status
                runtime.array_at(pointer, np.uint8, content.shape)[...] = content
                return int(pointer)

        def stream() -> int:
            return int(entered[-1].split()[1])

        def as_tensor(memory: Any, device: str) -> Any:
            runtime.cudaStreamSynchronize(stream())
            reported = memory.__cuda_array_interface__
            array = runtime.array_at(reported["data"][0], np.dtype(reported["typestr"]), reported["shape"])
            return torch.from_numpy(array).as_subclass(OnDevice)

        self.as_tensor = as_tensor


@pytest.fixture
def cuda() -> Iterator[Any]:
    with fake_cuda_runtime() as runtime:
        yield runtime


def instance(cuda: Any, folder: Path, module: Any, outputs: str = "OUT:FP32:-1", **fields: Any) -> DeviceInstance:
    script(folder, module)
    made = config(outputs=outputs, **fields)
    with without_warnings():
        program = ScriptProgram(torch, folder / "1" / "model.pt", "cpu")
    fake = TorchOnMadeUpCuda(cuda)
    wanted = [
        NamedDatatype(row.name, row.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")) for row in made.output
    ]

    def opened(stream: Any) -> TorchDeviceRunner:
        return TorchDeviceRunner(fake, TorchCall(fake, program, made, wanted), TorchOptions(), wanted, stream)

    return DeviceInstance(opened, InstanceDevice("KIND_GPU", 0, "m_0"), made, wanted)


@pytest.mark.parametrize("own_stream", [False, True])
def test_each_request_gets_its_own_rows(cuda: Any, tmp_path: Path, own_stream: bool) -> None:
    optimization = {"cuda": {"output_copy_stream": own_stream, "graphs": True}}  # torch runs without graphs
    made = instance(cuda, tmp_path, networks.Doubles(), inputs="IN:FP32:-1", optimization=optimization)
    pending: list[Any] = []
    for number in range(6):
        pending.append((number, made.execute([numbers([number, 1]), numbers([number + 100, 2])], execution())))
        if len(pending) == 2:
            wanted, first = pending.pop(0)
            assert values(first.results()) == [[[2 * wanted, 2]], [[2 * wanted + 200, 4]]]
    with pytest.raises(WeirError, match=r"PyTorch execute failure: .*shape") as failed:
        made.execute([numbers([-1])], execution())
    assert failed.value.code is ErrorCode.INTERNAL
    assert values(run(made, numbers([3]))) == [[[6]]]
    assert values(run(made, numbers([4]))) == [[[8]]]
    assert values(pending[0][1].results()) == [[[10, 2]], [[210, 4]]]
    made.close()


def test_strings_and_outputs_on_the_host_go_along(cuda: Any, tmp_path: Path) -> None:
    made = instance(
        cuda,
        tmp_path,
        networks.Scales(),
        "OUT:FP32:-1 results:STRING:-1",
        inputs="IN:FP32:-1 words:STRING:-1",
        max_batch_size=0,
    )
    given = [
        request(IN=np.array([number], np.float32), words=np.array([word, b""], np.object_))
        for number, word in ((1, b"a"), (2, b"b"))
    ]
    pending: list[Any] = [made.execute([one], execution()) for one in given]
    reported = [[tensor.to_numpy().tolist() for tensor in one.results()[0].outputs] for one in pending]
    assert reported == [[[2], [b"a", b""]], [[4], [b"b", b""]]]
    made.close()
