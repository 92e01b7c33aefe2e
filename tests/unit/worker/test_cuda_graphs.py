"""Runs that are recorded as CUDA graphs: which are, when, and that nothing but the number of launches changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import GPU, OUT, KernelRunner, config, execution, made_up_cuda, numbers, run, values

from schemas.errors import WeirError
from schemas.model_config import ModelConfig
from worker.backend import DeviceLost
from worker.cuda.device_instance import DeviceInstance

GRAPHS = {"cuda": {"graphs": True, "output_copy_stream": True}}


@pytest.fixture
def cuda() -> Iterator[Any]:
    with made_up_cuda() as runtime:
        yield runtime


class Model:
    """An instance of a model that doubles, and its runner."""

    def __init__(self, cuda: Any, settings: ModelConfig, kind: type[KernelRunner] = KernelRunner) -> None:
        self.runners: list[KernelRunner] = []
        self.cuda = cuda

        def opened(stream: Any) -> KernelRunner:
            runner = kind(
                cuda,
                stream,
                lambda arrays: [arrays["IN"] * 2 + 1],
                lambda inputs: [("FP32", tuple(inputs["IN"].shape))],
            )
            self.runners.append(runner)
            return runner

        self.instance = DeviceInstance(opened, GPU, settings, OUT)

    def doubles(self, *values_of_in: float) -> None:
        assert values(run(self.instance, numbers(values_of_in))) == [[[2 * value + 1 for value in values_of_in]]]

    @property
    def told(self) -> tuple[int, int]:
        """(calls of the runner, launches of graphs)."""
        return self.runners[0].enqueued, self.cuda.DEVICE.calls["cudaGraphLaunch"]


def test_a_shape_that_comes_again_is_recorded_in_each_set_of_buffers(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    for number in range(8):
        model.doubles(number, 1)
    # Four times as it is, and twice once more while it is recorded; the rest are launches.
    assert model.told == (6, 4)
    model.doubles(1, 2, 3)
    assert model.told == (7, 4)


def test_two_batches_under_way_have_their_own_places(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    cuda.DEVICE.hurry = random.Random(1)
    under_way: list[Any] = []
    for number in range(40):
        under_way.append((number, model.instance.execute([numbers([number] * 5)], execution())))
        if len(under_way) == 2:
            wanted, pending = under_way.pop(0)
            assert values(pending.results()) == [[[2 * wanted + 1] * 5]]
    assert model.told == (6, 36)


def test_specified_shapes_are_recorded_at_load_and_no_others(cuda: Any) -> None:
    spec = [{"batch_size": size, "input": {"IN": {"dim": [3]}}} for size in (1, 2)]
    model = Model(cuda, config(optimization={"cuda": {"graphs": True, "graph_spec": spec}}))
    recorded = model.told[0]
    assert recorded == 8  # of each shape, in each set: once as it is and once recorded
    model.doubles(1, 2, 3)
    model.doubles(4, 5, 6)
    assert model.told == (recorded, 2)
    for _ in range(4):
        model.doubles(7)
    assert model.told == (recorded + 4, 2)


@pytest.mark.parametrize(
    "spec, told",
    [
        ({"batch_size": 0}, "a graph_spec has batch size 0, while max_batch_size is 64"),
        ({"batch_size": 65}, "a graph_spec has batch size 65, while max_batch_size is 64"),
        ({"batch_size": 1}, "a graph_spec leaves the shape of input 'IN' open"),
    ],
)
def test_specifications_that_make_no_sense(cuda: Any, spec: dict[str, Any], told: str) -> None:
    with pytest.raises(WeirError, match=told):
        Model(cuda, config(optimization={"cuda": {"graphs": True, "graph_spec": [spec]}}))


class Unfit(KernelRunner):
    can_capture = False


class Waiting(KernelRunner):
    """Waits for the stream, which no graph can hold."""

    def enqueue(self, inputs: Any) -> Any:
        outputs = super().enqueue(inputs)
        status = self._runtime.cudaStreamSynchronize(self._stream.handle)[0]
        if status:
            raise RuntimeError(status.name)
        return outputs


class Answering(KernelRunner):
    """Has its outputs on the host."""

    def enqueue(self, inputs: Any) -> Any:
        super().enqueue(inputs)
        return [np.full(inputs["IN"].shape, 3, np.float32)]


@pytest.mark.parametrize(
    "kind, told",
    [
        (Unfit, "its backend can't be recorded"),
        (Waiting, "RuntimeError: cudaErrorStreamCaptureUnsupported"),
        (Answering, "it has outputs on the host"),
    ],
)
def test_what_can_t_be_recorded_runs_without(
    cuda: Any, kind: type[KernelRunner], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(cuda, config(optimization=GRAPHS), kind)
    for _ in range(6):
        model.doubles(1)
    warnings = {record.getMessage() for record in caplog.records}
    assert warnings == {f"model 'm' runs without CUDA graphs: {told}"}
    assert model.told[1] == 0


def test_a_model_with_strings_runs_without(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    Model(cuda, config(optimization=GRAPHS, input=[{"name": "IN", "data_type": "TYPE_STRING", "dims": [1]}]))
    assert "input 'IN' stays on the host" in caplog.text


def test_a_device_that_is_lost_meanwhile_is_lost(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    model.doubles(1)
    model.doubles(1)
    cuda.DEVICE.fail("cudaGraphInstantiate", "cudaErrorLaunchFailure")
    with pytest.raises(DeviceLost):
        model.doubles(1)


def test_graphs_leave_nothing(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    for _ in range(6):
        model.doubles(1, 2, 3)
    model.instance.close()
    del model
    for stream in cuda.DEVICE.streams.values():
        cuda.DEVICE.finish(stream)
    assert (cuda.DEVICE.used_bytes, cuda.DEVICE.graphs) == (0, {})
