"""Malformed results of custom backends: each fails its own request only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.cuda_device import execution, numbers
from tests.unit.worker.execution.test_instance import Served
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import Tensor, pack_bytes
from weir.schemas.wire.batches import BatchEnded
from weir.worker.backend_api.interface import RESCHEDULED, Execution, ExecutionHandle, Result
from weir.worker.backends.custom import BackendFiles, CheckedInstance, CustomBackend
from weir.worker.devices.gpus import CPU_ONLY

GOOD = Result([Tensor.from_numpy("OUT", np.ones((1, 1), np.float32), "FP32")], {"a": 1})


class Panic(BaseException):
    """As libraries in Rust raise."""


class Fixed:
    """Returns these results for every batch, or raises them."""

    def __init__(self, outcomes: Any) -> None:
        self.outcomes = outcomes

    def execute(self, requests: Any, problem: Execution) -> Any:
        if isinstance(self.outcomes, BaseException):
            raise self.outcomes
        return self.outcomes

    def close(self) -> None:
        raise Panic("closing")


def only(**fields: Any) -> Result:
    given = {"name": "OUT", "datatype": "FP32", "shape": [1], "data": b"1234"} | fields
    return Result([Tensor(**given)])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("text", "expected a result, found type 'str'"),
        (Result(error="bad"), "an error must be a WeirError, found 'bad'"),  # type: ignore[arg-type]
        (
            Result(parameters={"a": object()}),
            "response parameters must be a dictionary of strings, numbers or booleans by name",
        ),
        (Result(parameters={1: "a"}), "response parameters must be a dictionary"),  # type: ignore[dict-item]
        (Result(None), "outputs must be a list of tensors, found type 'NoneType'"),  # type: ignore[arg-type]
        (Result([np.ones(1)]), "outputs must be tensors with names, found array"),  # type: ignore[list-item]
        (only(name=None), "outputs must be tensors with names"),
        (only(datatype="FLOAT"), "output 'OUT' has the unknown datatype 'FLOAT'"),
        (only(datatype=["FP32"]), "output 'OUT' has the unknown datatype"),
        (only(shape=["a"]), r"the shape of output 'OUT' must be a list of integers, found \['a'\]"),
        (only(shape=[-1]), r"output 'OUT' has the shape \[-1\]"),
        (only(shape=[5]), r"the content of output 'OUT' does not fill its shape \[5\]"),
        (only(data="1234"), "the content of output 'OUT' must be bytes, found type 'str'"),
        (only(data=memoryview(b"12345678")[::2]), "the content of output 'OUT' is not contiguous"),
        (only(datatype="BYTES", data=pack_bytes([b"a", b"b"])), "does not fill its shape"),
        (only(datatype="BYTES", data=b"\xff\xff\xff\xff"), "does not fill its shape"),
    ],
)
def test_a_malformed_result_is_an_error_of_its_request(wrong: Any, problem: str) -> None:
    outcomes = CheckedInstance("mine", Fixed([GOOD, wrong, None])).execute([numbers([1])] * 3, execution())
    assert not isinstance(outcomes, ExecutionHandle)
    good, bad, later = outcomes
    assert (good, later) == (GOOD, None)
    assert bad is not None
    assert bad.error is not None
    with pytest.raises(WeirError, match=f"^INTERNAL: backend 'mine': .*{problem}"):
        raise bad.error


def test_valid_results_are_unchanged() -> None:
    strings = only(datatype="BYTES", shape=(np.int64(2),), data=pack_bytes([b"a", b"bc"]))
    numpy_s = only(data=memoryview(np.ones(1, np.float32)))
    given = [GOOD, strings, numpy_s, RESCHEDULED, Result(error=WeirError(3, "no"))]  # type: ignore[arg-type]

    class Run(ExecutionHandle):
        def results(self) -> Any:
            return given

    pending = CheckedInstance("mine", Fixed(Run())).execute([numbers([1])] * 5, execution())
    assert isinstance(pending, ExecutionHandle)
    assert [found is wanted for found, wanted in zip(pending.results(), given, strict=True)] == [True] * 5
    assert type(strings.outputs[0].shape[0]) is int
    with pytest.raises(WeirError, match="expected a list of results, found type 'int'"):
        CheckedInstance("mine", Fixed(5)).execute([numbers([1])], execution())


def test_responses_of_a_backend_s_own_are_checked_and_times_are_the_batch_s() -> None:
    results: list[Any] = []

    class Told(Execution):
        def respond(self, position: int, result: Result | None, is_final: bool) -> None:
            results.append((position, result and result.error and result.error.message, is_final))

        def fail(self, error: WeirError) -> None:
            results.append(error.message)

    class Responding(Fixed):
        def execute(self, requests: Any, problem: Execution) -> Any:
            problem.respond(0, None, True)
            problem.respond(1, only(shape=[9]), True)
            problem.fail("broken")  # type: ignore[arg-type]
            problem.input_end_ns, problem.infer_end_ns = 5, 6
            problem.inferred()
            problem.respond(2, None, True)

    batch = Told(execution().reader)
    with pytest.raises(IndexError, match="there is no request 2 in a batch of 2"):
        CheckedInstance("mine", Responding(None)).execute([numbers([1])] * 2, batch)
    wrong = "backend 'mine': the content of output 'OUT' does not fill its shape [9]"
    assert results == [
        (0, None, True),
        (1, wrong, True),
        "backend 'mine': an error must be a WeirError, found 'broken'",
    ]
    assert batch.input_end_ns == 5
    assert batch.infer_end_ns > 6


@pytest.mark.parametrize("raised", [Panic("oh"), SystemExit(3), KeyboardInterrupt("x")])
def test_base_exceptions_end_no_thread(raised: BaseException) -> None:
    fixed = Fixed(raised)
    model = Served(lambda device: fixed)
    model.submit(1, [1], [2])
    assert model.left() == (1, BatchEnded, [f"{type(raised).__name__}: {raised}"] * 2)
    fixed.outcomes = [Result([Tensor.from_numpy("OUT", np.ones((1, 1), np.float32), "FP32")])]
    model.submit(2)
    assert model.left() == (2, BatchEnded, [[[1.0]]])
    model.instance.stop()  # whose closing fails, too
    assert not any(thread.name == "m_0_0" for thread in threading.enumerate())


def test_an_instance_that_panics_while_it_is_created_is_an_error() -> None:
    def make(device: Any) -> Any:
        raise Panic("oh")

    with pytest.raises(WeirError, match=r"^INTERNAL: Panic: oh$"):
        Served(make)


@pytest.mark.parametrize(
    "problem", ["5", '("KIND_CPU", "a.bin")', '(["KIND_CPU"], [1])', "((), (), None)", '((), (), "", [3])']
)
def test_a_malformed_availability_is_a_problem(tmp_path: Path, problem: str) -> None:
    file = tmp_path / "backend.py"
    file.write_text(f"class Backend:\n  def load(self, m): pass\n  def availability(self, d): return {problem}\n")
    available = CustomBackend("mine", file, BackendFiles()).availability(CPU_ONLY)
    assert available.runs_on == ()
    assert len(available.problems) == 1
    assert available.problems[0].startswith("backend 'mine': ")
