"""CUDA graphs: which runs are captured and when; results do not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.cuda_device import (
    GPU,
    OUT,
    KernelRunner,
    config,
    execution,
    fake_cuda_runtime,
    numbers,
    request,
    run,
    values,
)
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import DeviceLost
from weir.worker.cuda.device_instance import DeviceInstance
from weir.worker.cuda.graphs import MAX_GRAPHS_WITH_RUNNERS, specified_shapes
from weir.worker.execution.batch_tensors import Reshaper
from weir.worker.execution.sequences import SequenceControls

GRAPHS = {"cuda": {"graphs": True, "output_copy_stream": True}}


@pytest.fixture
def cuda() -> Iterator[Any]:
    with fake_cuda_runtime() as runtime:
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
    def counts(self) -> tuple[int, int]:
        """(calls of the runner, launches of graphs)."""
        return self.runners[0].enqueued, self.cuda.DEVICE.calls["cudaGraphLaunch"]


def test_a_repeated_shape_is_captured_for_each_set_of_buffers(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    for number in range(8):
        model.doubles(number, 1)
    # Four times as it is, and twice once more while it is recorded; the rest are launches.
    assert model.counts == (6, 4)
    model.doubles(1, 2, 3)
    assert model.counts == (7, 4)


@pytest.mark.parametrize("reuses", [False, True])
def test_two_batches_on_the_device_use_different_memory(cuda: Any, reuses: bool) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    cuda.DEVICE.hurry, cuda.DEVICE.reuses_memory = random.Random(1), reuses
    under_way: list[Any] = []
    for number in range(40):
        under_way.append((number, model.instance.execute([numbers([number] * 5)], execution())))
        if len(under_way) == 2:
            wanted, pending = under_way.pop(0)
            assert values(pending.results()) == [[[2 * wanted + 1] * 5]]
    assert model.counts == (6, 36)


def test_only_specified_shapes_are_captured_at_load(cuda: Any) -> None:
    spec = [{"batch_size": size, "input": {"IN": {"dim": [3]}}} for size in (1, 2)]
    model = Model(cuda, config(optimization={"cuda": {"graphs": True, "graph_spec": spec}}))
    recorded = model.counts[0]
    assert recorded == 8  # of each shape, in each set: once as it is and once recorded
    model.doubles(1, 2, 3)
    model.doubles(4, 5, 6)
    assert model.counts == (recorded, 2)
    for _ in range(4):
        model.doubles(7)
    assert model.counts == (recorded + 4, 2)


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"batch_size": 0}, "a graph_spec has batch size 0, while max_batch_size is 64"),
        ({"batch_size": 65}, "a graph_spec has batch size 65, while max_batch_size is 64"),
        ({"batch_size": 1}, "a graph_spec has no complete shape for input 'IN'"),
    ],
)
def test_invalid_graph_specs_are_rejected(cuda: Any, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(WeirError, match=message):
        Model(cuda, config(optimization={"cuda": {"graphs": True, "graph_spec": [spec]}}))


def test_a_graph_spec_has_the_shapes_that_the_model_gets(cuda: Any) -> None:
    """Reshaped inputs, controls, states and batch inputs are part of what is captured, so the first batch is a launch."""
    settings = config(
        input=[{"name": "IN", "data_type": "TYPE_FP32", "dims": [4], "reshape": {"shape": [2, 2]}}],
        batch_input=[
            {
                "kind": "BATCH_ELEMENT_COUNT",
                "target_name": ["COUNTS"],
                "data_type": "TYPE_INT32",
                "source_input": ["IN"],
            }
        ],
        sequence_batching={
            "control_input": [
                {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}]},
                {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_UINT64"}]},
            ],
            "state": [{"input_name": "S", "output_name": "S2", "data_type": "TYPE_FP16", "dims": [3]}],
        },
        optimization={"cuda": {"graphs": True, "graph_spec": [{"batch_size": 2, "input": {"COUNTS": {"dim": [2]}}}]}},
    )
    assert settings.optimization is not None
    assert settings.optimization.cuda is not None
    (shapes,) = specified_shapes(settings, settings.optimization.cuda)
    assert shapes == (
        ("COUNTS", "INT32", (2,)),
        ("ID", "UINT64", (2, 1)),
        ("IN", "FP32", (2, 2, 2)),
        ("S", "FP16", (2, 3)),
        ("START", "INT32", (2, 1)),
    )
    requests = [request(Tensor.from_numpy("IN", np.zeros((1, 4), np.float32), "FP32")) for _ in range(2)]
    SequenceControls(settings).add_to(requests, [True, True])
    for one in requests:
        Reshaper(settings).to_model(one)
        one.inputs.append(Tensor.from_numpy("S", np.zeros((1, 3), np.float16), "FP16"))
    model = Model(cuda, settings)
    before = model.counts
    run(model.instance, *requests)
    assert model.counts == (before[0], before[1] + 1)


def test_a_graph_spec_without_the_shape_of_a_batch_input_is_rejected(cuda: Any) -> None:
    row = {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["COUNTS"], "data_type": "TYPE_INT32", "source_input": ["IN"]}
    spec = [{"batch_size": 1, "input": {"IN": {"dim": [3]}}}]
    with pytest.raises(WeirError, match="a graph_spec has no complete shape for input 'COUNTS'"):
        Model(cuda, config(batch_input=[row], optimization={"cuda": {"graphs": True, "graph_spec": spec}}))


def test_a_model_with_a_text_as_correlation_id_runs_without_graphs(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    control = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}
    Model(
        cuda,
        config(optimization=GRAPHS, sequence_batching={"control_input": [{"name": "ID", "control": [control]}]}),
    )
    assert "input 'ID' stays on the host" in caplog.text


class Unfit(KernelRunner):
    can_capture = False


class Waiting(KernelRunner):
    """Waits for the stream, which can't be captured."""

    def enqueue(self, inputs: Any) -> Any:
        outputs = super().enqueue(inputs)
        status = self._runtime.cudaStreamSynchronize(self._stream.handle)[0]
        if status:
            raise RuntimeError(status.name)
        return outputs


class Answering(KernelRunner):
    """Returns outputs on the host."""

    def enqueue(self, inputs: Any) -> Any:
        super().enqueue(inputs)
        return [np.full(inputs["IN"].shape, 3, np.float32)]


@pytest.mark.parametrize(
    "kind, message",
    [
        (Unfit, "its backend can't be captured"),
        (Waiting, "RuntimeError: cudaErrorStreamCaptureUnsupported"),
        (Answering, "the model has outputs on the host"),
    ],
)
def test_what_can_t_be_captured_runs_without_graphs(
    cuda: Any, kind: type[KernelRunner], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(cuda, config(optimization=GRAPHS), kind)
    for _ in range(6):
        model.doubles(1)
    warnings = {record.getMessage() for record in caplog.records}
    assert warnings == {f"model 'm' runs without CUDA graphs: {message}"}
    assert model.counts[1] == 0


class WithContext(KernelRunner):
    """Its kernels use the shape that it was given last, as an execution context of TensorRT does, also in graphs."""

    closed = 0

    def __init__(self, cuda: Any, stream: Any, *more: Any) -> None:
        self.shape: tuple[int, ...] = ()
        self._opened = (cuda, stream, more)
        super().__init__(cuda, stream, self._doubled, lambda inputs: [("FP32", tuple(inputs["IN"].shape))])

    def _doubled(self, arrays: Any) -> list[np.ndarray]:
        values_of_in = arrays["IN"]
        return [values_of_in * 2 + 1 if values_of_in.shape == self.shape else np.full_like(values_of_in, np.nan)]

    def enqueue(self, inputs: Any) -> Any:
        self.shape = tuple(inputs["IN"].shape)
        return super().enqueue(inputs)

    def for_graph(self) -> WithContext:
        cuda, stream, more = self._opened
        return WithContext(cuda, stream, *more)

    def close(self) -> None:
        super().close()
        WithContext.closed += 1


def test_a_graph_does_not_depend_on_shapes_that_run_after_its_capture(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS), WithContext)
    for _ in range(4):
        model.doubles(1)
    model.doubles(1, 2, 3)
    for _ in range(4):
        model.doubles(5)
    assert model.counts[1] == 4
    for width in range(2, 12):  # no more graphs than there may be runners for them
        for _ in range(6):
            model.doubles(*range(width))
    closed = WithContext.closed
    model.instance.close()
    assert WithContext.closed - closed == 2 * MAX_GRAPHS_WITH_RUNNERS + 1


def test_a_model_with_strings_runs_without_graphs(cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    Model(cuda, config(optimization=GRAPHS, input=[{"name": "IN", "data_type": "TYPE_STRING", "dims": [1]}]))
    assert "input 'IN' stays on the host" in caplog.text


def test_a_device_lost_during_capture_is_reported(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    model.doubles(1)
    model.doubles(1)
    cuda.DEVICE.fail("cudaGraphInstantiate", "cudaErrorLaunchFailure")
    with pytest.raises(DeviceLost):
        model.doubles(1)


def test_graphs_free_their_memory(cuda: Any) -> None:
    model = Model(cuda, config(optimization=GRAPHS))
    for _ in range(6):
        model.doubles(1, 2, 3)
    model.instance.close()
    del model
    for stream in cuda.DEVICE.streams.values():
        cuda.DEVICE.finish(stream)
    assert (cuda.DEVICE.used_bytes, cuda.DEVICE.graphs) == (0, {})
