"""`InstanceBackend`: an object for each instance, with its device, state, streams of responses, and arrays on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.fakes.cuda_device import fake_cuda_runtime
from weir.bus.payloads.arena import PayloadReader
from weir.repository.config_text import config_from_dict
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import (
    DeviceLost,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDevice,
    ModelVersion,
    Result,
)
from weir.worker.backends.array import ArrayBackend, ArrayFunction
from weir.worker.backends.instance_backend import Device, InstanceBackend
from weir.worker.devices.gpus import CPU_ONLY, WorkerDevices

CONFIG = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
}
STREAMS = {"model_transaction_policy": {"decoupled": True}}
CPU, GPU = InstanceDevice("KIND_CPU", 0, "m_0"), InstanceDevice("KIND_GPU", 0, "m_0")


@pytest.fixture
def cuda() -> Iterator[Any]:
    gc.collect()
    with fake_cuda_runtime() as runtime:
        yield runtime


def instance(kind: type[InstanceBackend] | type[ArrayBackend], device: InstanceDevice = CPU, **fields: Any) -> Instance:
    model = ModelVersion("m", 1, Path("models/m"), config_from_dict(CONFIG | fields))
    return kind().load(model).create_instance(device)


def request(*rows: list[float]) -> InferRequest:
    return InferRequest("m", inputs=[Tensor.from_numpy("X", np.array(rows, np.float32), "FP32")])


class Recording(Execution):
    """The responses of a batch by request: arrays, the texts of errors, and None at the end."""

    def __init__(self) -> None:
        super().__init__(PayloadReader())
        self.responses: list[tuple[int, Any]] = []
        self.cancelled: set[int] = set()

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        if result is None:
            self.responses.append((position, None))
        elif result.error is not None:
            assert is_final
            self.responses.append((position, result.error.message))
        else:
            assert not is_final
            self.responses.append((position, result.outputs[0].to_numpy().tolist()))

    def is_cancelled(self, position: int) -> bool:
        return position in self.cancelled


def run(made: Instance, *requests: InferRequest) -> list[Any]:
    results = made.execute(requests, Recording())
    if isinstance(results, ExecutionHandle):
        results = results.results()
    return [result.outputs[0].to_numpy().tolist() for result in results if result]


class Counting(InstanceBackend):
    """Adds to its inputs how often it ran."""

    events: ClassVar[list[Any]] = []

    def setup(self, model: ModelVersion, device: Device) -> None:
        self.runs = 0
        self.events.append((model.name, device.kind, device.is_gpu, device.stream))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.runs += 1
        return {"Y": inputs["X"] + np.float32(self.runs)}

    def close(self) -> None:
        self.events.append("closed")


def test_each_instance_has_an_object_of_its_own() -> None:
    Counting.events.clear()
    model = ModelVersion("m", 1, Path("models/m"), config_from_dict(CONFIG))
    loaded = Counting().load(model)
    first, second = loaded.create_instance(CPU), loaded.create_instance(CPU)
    assert run(first, request([0, 1]), request([5, 5])) == [[[1, 2]], [[6, 6]]]
    assert run(first, request([0, 1])) == [[[2, 3]]]
    assert run(second, request([0, 1])) == [[[1, 2]]]
    first.close()
    assert Counting.events == [("m", "KIND_CPU", False, 0)] * 2 + ["closed"]


def test_wrong_outputs_are_errors() -> None:
    class Wrong(Counting):
        def run(self, inputs: Mapping[str, Any]) -> Any:
            return self.returned

    for returned, message in (
        ([1], "expected a dictionary of outputs, found type 'list'"),
        (iter([{}]), "found type 'list_iterator': only decoupled models yield"),
        ({}, "output 'Y' is missing"),
        ({"Y": np.zeros((1, 2))}, "output 'Y' is of type FP64, but the configuration specifies FP32"),
    ):
        Wrong.returned = returned  # type: ignore[attr-defined]
        with pytest.raises(WeirError, match=message):
            run(instance(Wrong), request([1, 2]))


class Repeating(InstanceBackend):
    """Responds as often as its first number says, with the number of the response; -1 fails at once, 3 in the middle."""

    closed: ClassVar[list[int]] = []
    kinds = ("KIND_CPU", "KIND_GPU")

    def setup(self, model: ModelVersion, device: Device) -> None:
        self.device = device

    def run(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        x = inputs["X"]
        count = int(x[0, 0])
        if count < 0:
            raise ValueError("less than nothing")
        try:
            for number in range(count):
                if number == 2 and count == 3:
                    raise KeyError("two")
                yield {"Y": np.full((1, 2), number, np.float32)}
        finally:
            self.closed.append(count)


def test_requests_of_a_decoupled_model_take_turns_and_fail_alone() -> None:
    made, execution = instance(Repeating, **STREAMS), Recording()
    Repeating.closed.clear()
    counts = (2, 0, 3, -1, 1)
    assert made.execute([request([count, 0]) for count in counts], execution) == [None] * 5
    by_request = {at: [value for where, value in execution.responses if where == at] for at in range(5)}
    assert by_request == {
        0: [[[0, 0]], [[1, 1]], None],
        1: [None],
        2: [[[0, 0]], [[1, 1]], "KeyError: 'two'"],
        3: ["ValueError: less than nothing"],
        4: [[[0, 0]], None],
    }
    firsts = [at for at, value in execution.responses if value == [[0, 0]]]
    assert firsts == [0, 2, 4], "no request waits for the last response of another"
    assert sorted(Repeating.closed) == [0, 1, 2, 3]


def test_a_cancelled_request_ends_at_its_next_turn() -> None:
    made, execution = instance(Repeating, **STREAMS), Recording()
    Repeating.closed.clear()
    execution.cancelled = {0}
    made.execute([request([1000, 0]), request([1, 0])], execution)
    assert execution.responses == [(0, None), (1, [[0, 0]]), (1, None)]


def test_a_decoupled_model_may_return_one_response() -> None:
    execution = Recording()
    instance(Counting, **STREAMS).execute([request([1, 2])], execution)
    assert execution.responses == [(0, [[2, 3]]), (0, None)]


class Kernels(InstanceBackend):
    """Doubles on a GPU, with kernels of the fake runtime on memory that it allocates."""

    kinds = ("KIND_CPU", "KIND_GPU")
    can_capture = True
    cuda: Any = None

    def setup(self, model: ModelVersion, device: Device) -> None:
        self.device = device

    def doubled(self, x: Any, plus: int) -> Any:
        y = self.device.empty(x.shape, "FP32")
        source, target = x.__cuda_array_interface__, y.__cuda_array_interface__

        def kernel() -> None:
            values = self.cuda.array_at(source["data"][0], "<f4", source["shape"])
            self.cuda.array_at(target["data"][0], "<f4", target["shape"])[:] = values * 2 + plus

        assert not self.cuda.launch(self.device.stream, kernel)[0]
        return y

    def run(self, inputs: Mapping[str, Any]) -> Any:
        return {"Y": self.doubled(inputs["X"], 0)}


@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu_batches_overlap_and_stay_there(cuda: Any, graphs: bool) -> None:
    Kernels.cuda = cuda
    made = instance(Kernels, GPU, optimization={"cuda": {"graphs": graphs}})
    under_way: list[tuple[int, Any]] = []
    for number in range(8):
        under_way.append((number, made.execute([request([number, 1])], Recording())))
        if len(under_way) == 2:
            wanted, handle = under_way.pop(0)
            assert [result.outputs[0].to_numpy().tolist() for result in handle.results()] == [[[2 * wanted, 2]]]
    under_way[0][1].results()
    assert bool(cuda.DEVICE.calls["cudaGraphLaunch"]) == graphs
    made.close()
    del under_way, handle, made
    gc.collect()
    for stream in cuda.DEVICE.streams.values():
        cuda.DEVICE.finish(stream)
    assert cuda.DEVICE.used_bytes == 0


def test_a_decoupled_model_on_a_gpu(cuda: Any) -> None:
    class Streaming(Kernels):
        def run(self, inputs: Mapping[str, Any]) -> Any:
            for plus in range(2):
                yield {"Y": self.doubled(inputs["X"], plus)}

    Kernels.cuda = cuda
    cuda.DEVICE.reuses_memory = True
    made = instance(Streaming, GPU, **STREAMS)
    for _ in range(3):
        execution = Recording()
        made.execute([request([1, 2]), request([3, 4])], execution)
        assert execution.responses == [
            (0, [[2, 4]]),
            (1, [[6, 8]]),
            (0, [[3, 5]]),
            (1, [[7, 9]]),
            (0, None),
            (1, None),
        ]
    made.close()


def test_a_gpu_that_breaks_is_lost_whatever_the_backend_raises(cuda: Any) -> None:
    class Breaking(InstanceBackend):
        kinds = ("KIND_GPU",)

        def run(self, inputs: Mapping[str, Any]) -> Any:
            cuda.DEVICE.break_down()
            raise RuntimeError("a library's error")

    for fields in ({}, STREAMS):
        made = instance(Breaking, GPU, **fields)
        with pytest.raises(DeviceLost):
            run(made, request([1, 2]))
        cuda.DEVICE.broken.clear()


def test_pinned_and_device_memory_of_a_backend(cuda: Any) -> None:
    seen: list[Any] = []

    class Allocating(InstanceBackend):
        kinds = ("KIND_CPU", "KIND_GPU")

        def setup(self, model: ModelVersion, device: Device) -> None:
            pinned = device.pinned((2, 3), "INT64")
            seen.append(
                (pinned.shape, pinned.dtype, len(cuda.DEVICE.pinned), type(device.empty((1,), "FP16")).__name__)
            )
            device.synchronize()

    for device in (CPU, GPU):
        instance(Allocating, device)
    assert seen == [((2, 3), np.int64, 0, "ndarray"), ((2, 3), np.int64, 1, "DeviceArray")]


def test_where_a_backend_can_run(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = WorkerDevices((0,), (0,))
    assert Kernels().availability(gpus).runs_on == ["KIND_CPU", "KIND_GPU"]
    assert Kernels().availability(CPU_ONLY)[0::3] == (["KIND_CPU"], ["KIND_GPU: this machine has no GPU"])
    monkeypatch.setattr(Kernels, "requires_on_gpus", ("no_such_module",))
    assert Kernels().availability(gpus)[0::3] == (
        ["KIND_CPU"],
        ["KIND_GPU: the module no_such_module is not installed"],
    )
    monkeypatch.setattr(Kernels, "requires", ("numpy", "no_such.module"))
    assert Kernels().availability(gpus)[0::3] == ((), ["the module no_such.module is not installed"])


def test_open_of_an_array_backend_gets_the_device_if_it_takes_one() -> None:
    opened: list[str] = []

    class PerInstance(ArrayBackend):
        kinds = ("KIND_CPU", "KIND_GPU")

        def open(self, model: ModelVersion, device: InstanceDevice) -> ArrayFunction:
            opened.append(f"{model.name} on {device.kind} {device.device_id}")
            return lambda inputs: {"Y": inputs["X"] * np.float32(len(opened))}

    model = ModelVersion("m", 1, Path("models/m"), config_from_dict(CONFIG))
    loaded = PerInstance().load(model)
    assert opened == []
    assert run(loaded.create_instance(CPU), request([1, 2])) == [[[1, 2]]]
    assert run(loaded.create_instance(InstanceDevice("KIND_GPU", 3, "m_1")), request([1, 2])) == [[[2, 4]]]
    assert opened == ["m on KIND_CPU 0", "m on KIND_GPU 3"]
    assert PerInstance().availability(CPU_ONLY).runs_on == ("KIND_CPU",)
    assert PerInstance().availability(WorkerDevices((0,), (0,))).runs_on == ("KIND_CPU", "KIND_GPU")
