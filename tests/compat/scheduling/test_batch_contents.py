"""The contents and the timing of batches: ragged and optional inputs, warm-up, the rate limiter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, load, save
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs
from tests.support.models.zoo import Tensors, write_graph, write_model, write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.schemas.core.tensors import pack_bytes

FULL = "dynamic_batching { max_queue_delay_microseconds: 5000000 }"
"""Batches wait until they are full, which they will be."""

KINDS = {
    "BATCH_ELEMENT_COUNT": ("INT32", [4, 4, 2]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": ("FP32", [4, 8, 10]),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": ("INT32", [0, 4, 8, 10]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": ("FP32", None),
    "BATCH_ITEM_SHAPE_FLATTEN": ("INT32", [4, 1, 1, 2, 1, 2, 2, 1]),
}
"""Batch inputs by their kind: the datatype, and what each request is to hear of the batch."""
SHAPES = [[1, 4, 1], [2, 1, 2], [1, 2, 1]]

ONE_CPU = "instance_group [{ count: 1 kind: KIND_CPU }]"
TOLD: Tensors = {"TOLD": ("BYTES", [1])}


def write_ragged(root: Path) -> None:
    """Tells each row of a batch all that the model was told of it."""
    inputs: Tensors = {"IN": ("FP32", [-1])}
    outputs: Tensors = {"ALL": ("FP32", [-1, -1])}
    rows = [
        'batch_input { kind: BATCH_ITEM_SHAPE target_name: "ITEMS" data_type: TYPE_FP32 source_input: "IN" }',
        'input { name: "IN" data_type: TYPE_FP32 dims: [-1, -1] allow_ragged_batch: true }',
        'output { name: "ALL" data_type: TYPE_FP32 dims: [-1] }',
        'output { name: "ITEMS_OUT" data_type: TYPE_FP32 dims: [2] }',
    ]
    nodes = [
        helper.make_node("Constant", [], ["FIRST"], value_ints=[0]),
        helper.make_node("Constant", [], ["ONE"], value_ints=[1]),
        helper.make_node("Identity", ["ITEMS"], ["ITEMS_OUT"]),
        helper.make_node("Shape", ["ITEMS"], ["LENGTH"], start=0, end=1),
        helper.make_node("Concat", ["LENGTH", "ONE"], ["REPEATS"], axis=0),
        *_repeated("IN", "ALL"),
    ]
    inputs["ITEMS"], outputs["ITEMS_OUT"] = ("FP32", [-1, 2]), ("FP32", [-1, 2])
    for kind, (datatype, _) in KINDS.items():
        inputs[kind], outputs[f"{kind}_OUT"] = (datatype, [-1]), (datatype, [-1, -1])
        nodes += _repeated(kind, f"{kind}_OUT")
        rows.append(
            f'batch_input {{ kind: {kind} target_name: "{kind}" data_type: TYPE_{datatype} source_input: "IN" }}'
        )
        rows.append(f'output {{ name: "{kind}_OUT" data_type: TYPE_{datatype} dims: [-1] }}')
    config = "\n".join(['name: "ragged" backend: "onnxruntime" max_batch_size: 4', *rows, FULL, ONE_CPU])
    write_graph(write_model(root, "ragged", config) / "1" / "model.onnx", nodes, inputs, outputs)


def _repeated(name: str, output: str) -> list[Any]:
    row = f"{name}_ROW"
    return [
        helper.make_node("Unsqueeze", [name, "FIRST"], [row]),
        helper.make_node("Tile", [row, "REPEATS"], [output]),
    ]


def write_scattered(root: Path) -> None:
    config = f"""
name: "scattered" backend: "onnxruntime" max_batch_size: 4
input {{ name: "IN" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }}
batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUT" source_input: "IN" }}
{FULL} {ONE_CPU}
"""
    node = helper.make_node("Neg", ["IN"], ["OUT"])
    path = write_model(root, "scattered", config) / "1" / "model.onnx"
    write_graph(path, [node], {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])})


def write_optional(root: Path) -> None:
    """Adds B, or 10 where it is absent."""
    config = f"""
name: "optional" backend: "onnxruntime" max_batch_size: 2
input {{ name: "A" data_type: TYPE_FP32 dims: [1] }}
input {{ name: "B" data_type: TYPE_FP32 dims: [1] optional: true }}
output {{ name: "SUM" data_type: TYPE_FP32 dims: [1] }}
{FULL} {ONE_CPU}
"""
    path = write_model(root, "optional", config) / "1" / "model.onnx"
    inputs: Tensors = {"A": ("FP32", [-1, 1]), "B": ("FP32", [-1, 1])}
    write_graph(path, [helper.make_node("Add", ["A", "B"], ["SUM"])], inputs, {"SUM": ("FP32", [-1, 1])})
    graph = load(path)
    graph.graph.initializer.append(helper.make_tensor("B", TensorProto.FLOAT, [1, 1], [10.0]))
    save(graph, path)


def write_diary(root: Path, name: str, diary: Path, more: str, batch: int = 0, delay_ms: float = 0) -> None:
    parameters = f"""
parameters {{ key: "DIARY" value {{ string_value: "{diary}" }} }}
parameters {{ key: "DELAY_MS" value {{ string_value: "{delay_ms}" }} }}
"""
    write_python_model(root, name, "diary", {"A": ("FP32", [1])}, TOLD, batch, parameters + more)


def warm_up(name: str, input: str, source: str, datatype: str, size: int, count: int = 1) -> str:
    return f"""
model_warmup {{
  name: "{name}" batch_size: {size} count: {count}
  inputs {{ key: "{input}" value {{ data_type: TYPE_{datatype} dims: 1 {source} }} }}
}}
"""


def limited(resource: str, priority: int, count: int = 1) -> str:
    return f"""
instance_group [{{
  count: 1 kind: KIND_CPU rate_limiter {{ resources [{{ name: "{resource}" count: {count} }}] priority: {priority} }}
}}]
"""


class Models:
    """A running server, a client, and what its Python models have written down."""

    def __init__(self, server: Server, diaries: Path) -> None:
        self.server = server
        self.client = server.grpc()
        self._diaries = diaries
        self._pool = ThreadPoolExecutor(64)
        self.before = {name: (self.diary(name), *self._counted(name)) for name in ("told", "streams")}
        """Of models with a warm-up: what they had done, and what was counted of it, before anybody asked them."""

    def close(self) -> None:
        """Ends the client."""
        self._pool.shutdown()
        self.client.close()

    def send(self, model: str, arrays: dict[str, Any]) -> Future[Any]:
        """A request that goes off at once."""
        return self._pool.submit(self.client.infer, model, grpc_inputs(arrays))

    def infer_all(self, model: str, *requests: dict[str, Any]) -> list[Any]:
        """The answers to requests that are all sent at once."""
        return [sent.result() for sent in [self.send(model, arrays) for arrays in requests]]

    def stats(self, model: str) -> Any:
        """What the server tells of the model's executions."""
        return self.client.get_inference_statistics(model).model_stats[0]

    def _counted(self, model: str) -> tuple[int, int]:
        reply = self.stats(model)
        return reply.execution_count, reply.inference_stats.success.count

    def executions(self, model: str) -> list[int]:
        """The batch sizes of what the model has executed, in ascending order, each as often as it occurred."""
        return [row.batch_size for row in self.stats(model).batch_stats for _ in range(row.compute_infer.count)]

    def diary(self, name: str) -> list[Any]:
        """The lines that were written to this diary."""
        return [json.loads(line) for line in (self._diaries / name).read_text().splitlines()]

    def load_error(self, model: str) -> str:
        """Why a model can't be loaded."""
        with pytest.raises(InferenceServerException) as error:
            self.client.load_model(model)
        return str(error.value)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("contents")
    (root := folder / "models").mkdir()
    (diaries := folder / "diaries").mkdir()
    write_ragged(root)
    write_scattered(root)
    write_optional(root)
    samples = warm_up("first", "A", "zero_data: true", "FP32", 2, 3)
    samples += warm_up("second", "A", "random_data: true", "FP32", 1)
    reply = f"""
input {{ name: "A" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }}
input {{ name: "B" data_type: TYPE_FP32 dims: [-1] optional: true }}
parameters {{ key: "DIARY" value {{ string_value: "{diaries / "told"}" }} }}
instance_group [{{ count: 2 kind: KIND_CPU }}]
"""
    write_python_model(root, "told", "diary", {}, TOLD, 2, reply + samples + FULL)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_diary(root, "streams", diaries / "streams", samples + decoupled + ONE_CPU, 4)
    passive = "instance_group [{ passive: true kind: KIND_CPU count: 1 }]"
    write_diary(root, "often", diaries / "limited", limited("R", 1) + passive, delay_ms=4)
    write_diary(root, "seldom", diaries / "limited", limited("R", 2), delay_ms=4)
    write_diary(root, "greedy", diaries / "greedy", limited("R", 1, 5))
    raising = warm_up("sample", "WHAT", 'input_data_file: "raise"', "STRING", 2)
    cold = write_python_model(root, "cold", "faulty", {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}, 4, raising)
    (cold / "warmup").mkdir()
    (cold / "warmup" / "raise").write_bytes(pack_bytes([b"raise"]))
    options = ("--model-control-mode=explicit", "--rate-limit=execution_count", "--rate-limit-resource=R:1")
    wanted = ("ragged", "scattered", "optional", "told", "streams", "often", "seldom")
    started = Server(folder, root, *options, *(f"--load-model={name}" for name in wanted))
    models = Models(started, diaries)
    try:
        yield models
        models.close()
        assert started.stop() == 0
    finally:
        started.close()


def of_shape(shape: list[int], start: int) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def test_a_model_learns_how_its_batch_was_put_together(models: Models) -> None:
    arrays = [of_shape(shape, 10 * number) for number, shape in enumerate(SHAPES)]
    sent = []
    for number, array in enumerate(arrays, start=1):
        # Each is sent when the one before waits for it, so that their order is known; the last fills the batch.
        sent.append(models.send("ragged", {"IN": array}))
        if number < len(arrays):
            wait_until(lambda: models.server.metrics()["nv_inference_pending_request_count", "ragged"] == number)  # noqa: B023
    answers = [one.result() for one in sent]
    assert models.executions("ragged") == [4]
    everything = np.concatenate([array.ravel() for array in arrays])
    for shape, answer in zip(SHAPES, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("ALL"), [everything] * shape[0])
        np.testing.assert_array_equal(answer.as_numpy("ITEMS_OUT"), [shape[1:]] * shape[0])
        for kind, (_, expected) in KINDS.items():
            reply = answer.as_numpy(f"{kind}_OUT")
            if expected is None:
                assert reply.shape == (shape[0], 4)
            else:
                np.testing.assert_array_equal(reply, [expected] * shape[0])


def test_outputs_in_one_piece_go_to_whom_they_belong(models: Models) -> None:
    arrays = [of_shape([1, length], 10 * length) for length in (2, 4, 1, 3)]
    answers = models.infer_all("scattered", *({"IN": array} for array in arrays))
    assert models.executions("scattered") == [4]
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUT"), -array)


def test_only_requests_with_the_same_inputs_share_a_batch(models: Models) -> None:
    one, two = np.full((1, 1), 1, np.float32), np.full((1, 1), 2, np.float32)
    answers = models.infer_all("optional", {"A": one}, {"A": two})
    answers += models.infer_all("optional", {"A": one, "B": two}, {"B": two, "A": two})
    assert [answer.as_numpy("SUM").item() for answer in answers] == [11, 12, 3, 4]
    assert models.executions("optional") == [2, 2]


def test_python_models_get_ragged_and_optional_inputs_as_they_came(models: Models) -> None:
    a, longer = of_shape([1, 2], 0), of_shape([1, 3], 0)
    reply = [answer.as_numpy("TOLD").item() for answer in models.infer_all("told", {"A": a}, {"A": longer})]
    assert reply == [b"2: A[1, 2]", b"2: A[1, 3]"]
    both = models.infer_all("told", {"A": a, "B": a}, {"A": longer, "B": a})
    assert [answer.as_numpy("TOLD").item() for answer in both] == [b"2: A[1, 2] B[1, 2]", b"2: A[1, 3] B[1, 2]"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            ["B"],
            "expected number of inputs between 1 and 2 but got 1 inputs for model 'told'. Got input(s) ['B'], but missing "
            "required input(s) ['A']. Please provide all required input(s).",
        ),
        (["A", "C"], "unexpected inference input 'C' for model 'told'"),
    ],
)
def test_what_is_not_optional_is_asked_for(models: Models, given: list[str], text: str) -> None:
    with pytest.raises(InferenceServerException) as error:
        models.infer_all("told", {name: of_shape([1, 2], 0) for name in given})
    assert text in str(error.value)


def test_each_instance_has_run_each_sample_before_it_was_ready(models: Models) -> None:
    samples = [["A[1, 1]"] * 2] * 3 + [["A[1, 1]"]]
    for model, instances in {"told": ("told_0_0", "told_0_1"), "streams": ("streams_0_0",)}.items():
        lines, executions, requests = models.before[model]
        for instance in instances:
            assert [line[3] for line in lines if line[0] == instance] == samples
        assert len(lines) == len(samples) * len(instances)
        assert (executions, requests) == (0, 0), "nothing is counted"


def test_a_warm_up_that_fails_fails_the_load(models: Models) -> None:
    error = models.load_error("cold")
    assert "load failed for model 'cold': version 1 is at UNAVAILABLE state: Invalid argument: " in error
    assert (
        "failed to run warmup sample 'sample': Failed to process the request(s) for model 'cold_0', message: " in error
    )
    assert not models.client.is_model_ready("cold")


def test_instances_that_share_a_resource_take_turns_by_priority(models: Models) -> None:
    request = {"A": np.zeros(1, np.float32)}
    for sent in [models.send(name, request) for _ in range(30) for name in ("often", "seldom")]:
        sent.result()
    lines = sorted(models.diary("limited"), key=lambda line: line[1])
    assert len(lines) == 60
    for (_, _, end_ns, _), (_, begin_ns, _, _) in pairwise(lines):
        assert end_ns <= begin_ns
    assert {line[0] for line in lines} == {"often_0_0", "seldom_0_0"}, "passive instances do nothing"
    # While both have something to do: the first few came before the other's, and in the end one is alone.
    names = [line[0].partition("_")[0] for line in lines]
    contended = names[6 : max(index for index, name in enumerate(names) if name == "often") - 2]
    assert len(contended) >= 30
    share = contended.count("often") / len(contended)
    assert 0.6 <= share <= 0.73, "".join(name[0] for name in names)


def test_a_model_that_could_never_run_is_not_loaded(models: Models) -> None:
    assert (
        'Resource count for "R" is limited to 1 which will prevent scheduling of one or more model instances, the minimum '
        "required count is 5" in models.load_error("greedy")
    )
