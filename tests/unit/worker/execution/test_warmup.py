"""Warm-up samples run before an instance is ready, and leave nothing but a failed load."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, InstanceDied, ModelVersion, Result
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate
from weir.worker.execution.warmup import warm_up_samples

Execute = Callable[[Sequence[InferRequest], Execution], Sequence[Result | None]]

SEQUENCES = {
    "control_input": [
        {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}]},
        {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "int32_false_true": [0, 1]}]},
    ]
}


def sample(batch_size: int = 1, count: int = 0, name: str = "sample", **inputs: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "batch_size": batch_size, "count": count, "inputs": inputs}


def given(data_type: str = "TYPE_FP32", dims: Sequence[int] = (3,), **source: Any) -> dict[str, Any]:
    return {"data_type": data_type, "dims": list(dims), **(source or {"zero_data": True})}


def model(folder: Path, *samples: dict[str, Any], data_type: str = "TYPE_FP32", **fields: Any) -> ModelVersion:
    config = {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": data_type, "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": data_type, "dims": [-1]}],
        "model_warmup": list(samples),
    }
    return ModelVersion("m", 1, folder, ModelConfig.model_validate(config | fields))


class Warmed:
    """An instance that runs the test's function and records its requests."""

    def __init__(self, version: ModelVersion, execute: Execute) -> None:
        self.batches: list[list[dict[str, Tensor]]] = []
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self.statistics = ModelStatistics()
        self.is_closed = False
        outer = self

        class Running:
            def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
                for request in requests:
                    assert len({tensor.name for tensor in request.inputs}) == len(request.inputs)
                outer.batches.append([{tensor.name: tensor for tensor in request.inputs} for request in requests])
                return execute(requests, execution)

            def close(self) -> None:
                outer.is_closed = True

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return Running()

            def unload(self) -> None:
                pass

        instance = ModelInstance(
            Loaded(),
            version,
            InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0"), "test", warm_up=warm_up_samples(version)),
            self.statistics,
            ModelEnvironment(arena_prefix="test", on_update=self.published.put),
        )
        try:
            instance.start()
        except WeirError:
            assert self.is_closed
            raise
        instance.stop()
        assert self.published.empty(), "warm-up responses are not published"
        assert self.statistics.snapshot() == ModelStatistics().snapshot(), "and nothing is counted"


def answered(requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
    return [Result([request.inputs[0]]) for request in requests]


def test_each_sample_runs_as_often_as_configured(tmp_path: Path) -> None:
    version = model(
        tmp_path, sample(2, 3, IN=given()), sample(1, IN=given(dims=[5])), sample(0, IN={"dims": [-1]}, name="none")
    )
    batches = Warmed(version, answered).batches
    assert [[list(request["IN"].shape) for request in batch] for batch in batches] == [[[1, 3]] * 2] * 3 + [[[1, 5]]]


def test_a_sample_for_a_model_without_batching_has_the_written_shape(tmp_path: Path) -> None:
    (batch,) = Warmed(model(tmp_path, sample(IN=given()), max_batch_size=0), answered).batches
    assert list(batch[0]["IN"].shape) == [3]


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=lambda datatype: datatype.name)
@pytest.mark.parametrize("source", [{"zero_data": True}, {"zero_data": False}, {"random_data": True}], ids=str)
def test_content_of_every_datatype_is_generated(tmp_path: Path, datatype: Any, source: dict[str, bool]) -> None:
    data_type = datatype.config_name
    version = model(tmp_path, sample(IN=given(data_type, [400], **source)), data_type=data_type)
    ((request,),) = Warmed(version, answered).batches
    array = request["IN"].to_numpy()
    assert array.shape == (1, 400)
    if datatype.name == "BYTES":
        assert set(array.ravel()) == {b""}
    elif "zero_data" in source:
        assert not array.any()
    else:
        assert len(np.unique(array)) >= min(50, 2 ** (8 * datatype.size_bytes) if datatype.name != "BOOL" else 2)
        assert datatype.numpy.kind != "f" or ((array >= 0) & (array <= 1)).all()


def test_content_comes_from_files(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "numbers").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "warmup" / "strings").write_bytes(b"\3\0\0\x00233\0\0\0\0")
    ((request,),) = Warmed(model(tmp_path, sample(IN=given(input_data_file="numbers"))), answered).batches
    assert request["IN"].to_numpy().tolist() == [[0, 1, 2]]
    strings = given("TYPE_STRING", [2], input_data_file="strings")
    ((request,),) = Warmed(model(tmp_path, sample(IN=strings), data_type="TYPE_STRING"), answered).batches
    assert request["IN"].to_numpy().tolist() == [[b"233", b""]]


@pytest.mark.parametrize(
    ("inputs", "code", "text"),
    [
        ({}, "INVALID_ARG", "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'm'."),
        (
            {"IN": given("TYPE_INT32")},
            "INVALID_ARG",
            "inference input 'IN' data-type is 'INT32', but model 'm' expects",
        ),
        ({"IN": given(dims=[3, 1])}, "INVALID_ARG", "unexpected shape for input 'IN' for model 'm'."),
        (
            {"IN": given(input_data_file="absent")},
            "INTERNAL",
            "failed to open text file for read m/warmup/absent: No such file or directory",
        ),
        (
            {"IN": given(input_data_file="short")},
            "INVALID_ARG",
            "warmup setting expects 12 bytes, but the data provided from short only has 8 bytes",
        ),
        ({"IN": given(input_data_file="link")}, "INVALID_ARG", "must stay within the model's folder"),
    ],
)
def test_an_invalid_sample_fails_the_load(tmp_path: Path, inputs: Any, code: str, text: str) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(bytes(8))
    (tmp_path / "warmup" / "link").symlink_to("/proc/self/environ")
    with pytest.raises(WeirError) as error:
        warm_up_samples(model(tmp_path, sample(**inputs)))
    assert text in error.value.message
    assert error.value.code is ErrorCode[code]


def test_controls_are_generated_unless_the_sample_has_them(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "one").write_bytes(b"\1\0\0\0")
    start = given("TYPE_INT32", [1], input_data_file="one")
    version = model(tmp_path, sample(2, IN=given(), START=start), sequence_batching=SEQUENCES)
    (batch,) = Warmed(version, answered).batches
    assert [list(request) for request in batch] == [["IN", "START", "READY"]] * 2
    assert [request["START"].to_numpy().tolist() for request in batch] == [[[1]]] * 2
    assert [request["READY"].to_numpy().tolist() for request in batch] == [[[0]]] * 2


def raises(error: Exception) -> Execute:
    def execute(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        raise error

    return execute


def says_sorry(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
    error = WeirError(ErrorCode.INTERNAL, "sorry")
    return [Result(error=error, is_model_response=True), Result()]


def streams_sorry(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
    execution.respond(0, Result(error=WeirError(ErrorCode.INTERNAL, "sorry")), True)
    execution.respond(1, None, True)
    return [None, None]


def is_lost(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
    execution.fail(WeirError(ErrorCode.UNAVAILABLE, "lost"))
    return [None, None]


@pytest.mark.parametrize(
    ("execute", "failures"),
    [
        (raises(WeirError(ErrorCode.INTERNAL, "boo")), "boo; boo; "),
        (raises(ValueError("boo")), "ValueError: boo; ValueError: boo; "),
        (raises(InstanceDied("it died")), "it died; it died; "),
        (says_sorry, "sorry; "),
        (streams_sorry, "sorry; "),
        (is_lost, "lost; lost; "),
    ],
    ids=["error", "exception", "death", "response", "stream", "fail"],
)
def test_a_failure_fails_the_load(tmp_path: Path, execute: Execute, failures: str) -> None:
    with pytest.raises(WeirError) as error:
        Warmed(model(tmp_path, sample(2, IN=given()), sample(name="never", IN=given())), execute)
    assert error.value.message == f"failed to run warmup sample 'sample': {failures}"
    assert error.value.code is ErrorCode.INVALID_ARG


def test_responses_of_streams_are_awaited_and_dropped(tmp_path: Path) -> None:
    ended: list[int] = []

    def execute(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        execution.respond(0, Result([Tensor("OUT", "UINT8", [5 << 20], bytes(5 << 20))]), False)
        execution.respond(0, None, True)
        execution.respond(1, Result([requests[1].inputs[0]]), True)
        ended.append(len(requests))
        return [None, None]

    Warmed(model(tmp_path, sample(2, 3, IN=given()), model_transaction_policy={"decoupled": True}), execute)
    assert ended == [2, 2, 2]


def test_a_stream_that_does_not_end_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.execution.warmup.RESPONSES_TIMEOUT_S", 0.05)
    with pytest.raises(
        WeirError, match=r"failed to run warmup sample 'sample': its responses did not end within 0.05 s"
    ):
        Warmed(model(tmp_path, sample(IN=given())), lambda requests, execution: [None] * len(requests))
