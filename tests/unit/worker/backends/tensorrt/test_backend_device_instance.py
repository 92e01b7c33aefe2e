"""Engines of TensorRT under `DeviceInstance`, on fakes of both that share the memory of one fake GPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.fakes import tensorrt_module as fake_tensorrt
from tests.support.fakes.cuda_device import execution, fake_cuda_runtime, run, values
from tests.support.fakes.tensorrt_module import plan
from weir.repository.config_text import parse_config
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import DeviceLost, Instance, InstanceDevice, ModelVersion
from weir.worker.backends.tensorrt import backend as tensorrt
from weir.worker.backends.tensorrt.backend import TensorRtBackend
from weir.worker.devices.gpus import Gpu, HostGpus

CONFIG = """
name: "net" backend: "tensorrt" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [4] }
output { name: "OUT" data_type: TYPE_FP32 dims: [4] }
instance_group [{ kind: KIND_GPU gpus: [0] }]
"""
NONZERO = CONFIG.replace("max_batch_size: 8", "max_batch_size: 0").replace("dims: [4]", "dims: [-1]")
FILL = """
name: "net" backend: "tensorrt"
input { name: "SHAPE" data_type: TYPE_INT64 dims: [2] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1, -1] }
"""


class DeviceContext(fake_tensorrt.Context):
    """Runs on the stream, when that comes to it. What has been released by then, or not yet arrived, is read as it is."""

    runtime: Any = None

    def execute_async_v3(self, stream: int) -> bool:
        self._check_thread()
        runtime, operation = self.runtime, self.engine.plan["operation"]
        addresses, shapes = dict(self.addresses), dict(self.shapes)
        if operation == "nonzero":
            # It waits for what says how much there is.
            status = runtime.cudaStreamSynchronize(stream)[0]
            if status:
                return False
            found = runtime.array_at(addresses["IN"], np.float32, shapes["IN"])
            result = found[found != 0]
            address = self.allocators["OUT"].reallocate_output_async("OUT", 0, result.nbytes, 256, stream)
            if not address:
                return False
            self.allocators["OUT"].notify_shape("OUT", result.shape)
            runtime.launch(stream, lambda: _write(runtime, address, result))
        elif operation == "fill":
            size = tuple(int(number) for number in self._read("SHAPE"))

            def fill() -> None:
                now = fake_tensorrt._view(addresses["SHAPE"], shapes["SHAPE"], np.int64)
                _write(runtime, addresses["OUT"], np.full(size, now.sum(), np.float32))

            runtime.launch(stream, fill)
        else:

            def double() -> None:
                result = runtime.array_at(addresses["IN"], np.float32, shapes["IN"]) * 2
                _write(runtime, addresses["OUT"], result)

            runtime.launch(stream, double)
        return True


def _write(runtime: Any, address: int, array: np.ndarray) -> None:
    if array.size:
        runtime.array_at(address, array.dtype, array.shape)[...] = array


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_cuda_runtime() as runtime:
        monkeypatch.setattr(DeviceContext, "runtime", runtime)
        monkeypatch.setattr(fake_tensorrt, "Context", DeviceContext)
        monkeypatch.setattr(fake_tensorrt, "__spec__", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
        found = HostGpus((Gpu(0, "GPU-0", "made up", 1 << 30, (9, 0)),))
        monkeypatch.setattr(tensorrt, "find_gpus", lambda: found)
        yield runtime


def instance(root: Path, content: bytes, config: str = CONFIG, profiles: tuple[str, ...] = ()) -> Instance:
    folder = root / "net" / "1"
    folder.mkdir(parents=True)
    (folder / "model.plan").write_bytes(content)
    model = ModelVersion("net", 1, root / "net", parse_config(config.encode(), "net/config.pbtxt"))
    return TensorRtBackend().load(model).create_instance(InstanceDevice("KIND_GPU", 0, "net_0", profiles=profiles))


def asked(array: np.ndarray, name: str = "IN", datatype: str = "FP32") -> InferRequest:
    return InferRequest("net", inputs=[Tensor.from_numpy(name, array, datatype)])


def rows(count: int, value: float) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


@pytest.mark.parametrize(
    "more", ["", "graphs: true", "output_copy_stream: true", "graphs: true output_copy_stream: true"]
)
@pytest.mark.parametrize("seed", [None, 1])
def test_each_request_gets_its_own_rows(cuda: Any, tmp_path: Path, more: str, seed: int | None) -> None:
    made = instance(tmp_path, plan(), f"{CONFIG} optimization {{ cuda {{ {more} }} }}")
    cuda.DEVICE.hurry = random.Random(seed) if seed else None
    under_way: list[tuple[int, Any]] = []
    for number in range(24):
        size = 1 + number // 2 % 3
        under_way.append((number, made.execute([asked(rows(size, number)), asked(rows(1, -number))], execution())))
        if len(under_way) == 2:
            wanted, pending = under_way.pop(0)
            first, second = pending.results()
            assert first.outputs[0].to_numpy().tolist() == rows(1 + wanted // 2 % 3, 2 * wanted).tolist()
            assert second.outputs[0].to_numpy().tolist() == rows(1, -2 * wanted).tolist()
    under_way[0][1].results()
    assert cuda.DEVICE.calls["cudaGraphLaunch"] == (12 if "graphs" in more else 0)
    made.close()


def test_profiles_change_while_batches_are_under_way(cuda: Any, tmp_path: Path) -> None:
    profiles = [{"IN": [[1, 4], [1, 4], [2, 4]]}, {"IN": [[3, 4], [4, 4], [8, 4]]}]
    made = instance(tmp_path, plan(profiles=profiles), profiles=("0", "1"))
    pending = [made.execute([asked(rows(1, 1))], execution())]
    with pytest.raises(WeirError, match="dimension 0 to be between 1 and 2 but received 9"):
        made.execute([asked(rows(9, 0))], execution())
    pending.append(made.execute([asked(rows(5, 5))], execution()))
    assert [values(one.results()) for one in pending] == [[rows(1, 2).tolist()], [rows(5, 10).tolist()]]  # type: ignore[union-attr]


def test_outputs_whose_size_depends_on_the_content(cuda: Any, tmp_path: Path) -> None:
    made = instance(tmp_path, plan("nonzero"), NONZERO)
    given = [[1, 0, 2], [0, 0], [3, 4, 5, 6]]
    for first, second in pairwise(given):
        pending = [made.execute([asked(np.array(row, np.float32))], execution()) for row in (first, second)]
        reported = [values(one.results()) for one in pending]  # type: ignore[union-attr]
        assert reported == [[[value for value in row if value]] for row in (first, second)]


def test_missing_memory_for_such_an_output_is_an_error(cuda: Any, tmp_path: Path) -> None:
    made = instance(tmp_path, plan("nonzero"), NONZERO)
    one = np.ones(3, np.float32)
    assert values(run(made, asked(one))) == [[1, 1, 1]]  # type: ignore[arg-type]
    run(made, asked(one))  # type: ignore[arg-type]  # now both sets of buffers have their memory
    cuda.DEVICE.fail("cudaMallocAsync", "cudaErrorMemoryAllocation", times=2)
    with pytest.raises(WeirError, match="GPU 0 has no memory for 12 bytes more") as reported:
        run(made, asked(one))  # type: ignore[arg-type]
    assert reported.value.code is ErrorCode.UNAVAILABLE
    assert values(run(made, asked(one))) == [[1, 1, 1]]  # type: ignore[arg-type]
    cuda.DEVICE.fail("cudaMallocAsync", "cudaErrorIllegalAddress")
    with pytest.raises(DeviceLost):
        run(made, asked(one))  # type: ignore[arg-type]


def test_shapes_on_the_host_are_read_when_the_engine_runs(cuda: Any, tmp_path: Path) -> None:
    made = instance(tmp_path, plan("fill"), FILL)
    sizes = [np.array(size, np.int64) for size in ([1, 2], [3, 1])]
    pending = [made.execute([asked(size, "SHAPE", "INT64")], execution()) for size in sizes]
    assert [values(one.results()) for one in pending] == [[[[3, 3]]], [[[4], [4], [4]]]]  # type: ignore[union-attr]


def test_an_input_of_another_type_never_reaches_the_engine(cuda: Any, tmp_path: Path) -> None:
    made = instance(tmp_path, plan())
    with pytest.raises(WeirError, match="input 'IN' of model 'net' is INT8, but its engine takes FP32"):
        run(made, asked(rows(1, 1).astype(np.int8), datatype="INT8"))  # type: ignore[arg-type]


def test_a_configured_type_must_match_the_model(cuda: Any, tmp_path: Path) -> None:
    config = CONFIG.replace("TYPE_FP32", "TYPE_INT8", 1)
    reported = "model 'net', tensor 'IN': the model expects TYPE_FP32, but the configuration specifies TYPE_INT8"
    with pytest.raises(WeirError, match=reported):
        instance(tmp_path, plan(), config)


def test_errors_name_a_missing_input(cuda: Any, tmp_path: Path) -> None:
    made = instance(tmp_path, plan())
    with pytest.raises(WeirError, match="the engine of model 'net' requires input 'IN'"):
        run(made, InferRequest("net"))  # type: ignore[arg-type]
