"""What users' backends get wrong: each request has its answer all the same, and others have theirs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import execution, numbers
from test_batch_pipeline import Served

from schemas.errors import WeirError
from schemas.messages import BatchOutcome
from schemas.tensors import Tensor, pack_bytes
from worker.backend import RESCHEDULED, Execution, Pending, Result
from worker.devices import CPU_ONLY
from worker.own_backend import BackendFiles, OwnBackend
from worker.own_instance import OwnInstance

GOOD = Result([Tensor.from_numpy("OUT", np.ones((1, 1), np.float32), "FP32")], {"a": 1})


class Panic(BaseException):
    """As libraries in Rust raise."""


class Fixed:
    """Answers every batch with these outcomes, or raises them."""

    def __init__(self, outcomes: Any) -> None:
        self.outcomes = outcomes

    def execute(self, requests: Any, told: Execution) -> Any:
        if isinstance(self.outcomes, BaseException):
            raise self.outcomes
        return self.outcomes

    def close(self) -> None:
        raise Panic("closing")


def only(**fields: Any) -> Result:
    given = {"name": "OUT", "datatype": "FP32", "shape": [1], "data": b"1234"} | fields
    return Result([Tensor(**given)])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("text", "expected a result, found type 'str'"),
        (Result(error="bad"), "an error must be a WeirError, found 'bad'"),  # type: ignore[arg-type]
        (Result(parameters={"a": object()}), "response parameters must be text, numbers or booleans by name"),
        (Result(parameters={1: "a"}), "response parameters must be text"),  # type: ignore[dict-item]
        (Result(None), "outputs must be a list of tensors, found type 'NoneType'"),  # type: ignore[arg-type]
        (Result([np.ones(1)]), "outputs must be tensors with names, found array"),  # type: ignore[list-item]
        (only(name=None), "outputs must be tensors with names"),
        (only(datatype="FLOAT"), "output 'OUT' has the unknown datatype 'FLOAT'"),
        (only(datatype=["FP32"]), "output 'OUT' has the unknown datatype"),
        (only(shape=["a"]), r"output 'OUT' has no shape but \['a'\]"),
        (only(shape=[-1]), r"output 'OUT' has the shape \[-1\]"),
        (only(shape=[5]), r"the content of output 'OUT' does not fill its shape \[5\]"),
        (only(data="1234"), "the content of output 'OUT' must be bytes, found type 'str'"),
        (only(data=memoryview(b"12345678")[::2]), "the content of output 'OUT' does not lie in one piece"),
        (only(datatype="BYTES", data=pack_bytes([b"a", b"b"])), "does not fill its shape"),
        (only(datatype="BYTES", data=b"\xff\xff\xff\xff"), "does not fill its shape"),
    ],
)
def test_what_can_t_be_sent_is_its_request_s_error(wrong: Any, told: str) -> None:
    outcomes = OwnInstance("mine", Fixed([GOOD, wrong, None])).execute([numbers([1])] * 3, execution())
    assert not isinstance(outcomes, Pending)
    good, bad, later = outcomes
    assert (good, later) == (GOOD, None)
    assert bad is not None
    assert bad.error is not None
    with pytest.raises(WeirError, match=f"^backend 'mine': .*{told}"):
        raise bad.error


def test_what_is_right_stays_as_it_is() -> None:
    strings = only(datatype="BYTES", shape=(np.int64(2),), data=pack_bytes([b"a", b"bc"]))
    numpy_s = only(data=memoryview(np.ones(1, np.float32)))
    given = [GOOD, strings, numpy_s, RESCHEDULED, Result(error=WeirError(3, "no"))]  # type: ignore[arg-type]

    class Run(Pending):
        def results(self) -> Any:
            return given

    pending = OwnInstance("mine", Fixed(Run())).execute([numbers([1])] * 5, execution())
    assert isinstance(pending, Pending)
    assert [found is wanted for found, wanted in zip(pending.results(), given, strict=True)] == [True] * 5
    assert type(strings.outputs[0].shape[0]) is int
    with pytest.raises(WeirError, match="expected a list of results, found type 'int'"):
        OwnInstance("mine", Fixed(5)).execute([numbers([1])], execution())


def test_responses_of_a_backend_s_own_are_checked_and_times_are_the_batch_s() -> None:
    said: list[Any] = []

    class Told(Execution):
        def respond(self, position: int, result: Result | None, is_final: bool) -> None:
            said.append((position, result and result.error and result.error.message, is_final))

        def fail(self, error: WeirError) -> None:
            said.append(error.message)

    class Responding(Fixed):
        def execute(self, requests: Any, told: Execution) -> Any:
            told.respond(0, None, True)
            told.respond(1, only(shape=[9]), True)
            told.fail("broken")  # type: ignore[arg-type]
            told.input_end_ns, told.infer_end_ns = 5, 6
            told.inferred()
            told.respond(2, None, True)

    batch = Told(execution().reader)
    with pytest.raises(IndexError, match="there is no request 2 in a batch of 2"):
        OwnInstance("mine", Responding(None)).execute([numbers([1])] * 2, batch)
    wrong = "backend 'mine': the content of output 'OUT' does not fill its shape [9]"
    assert said == [(0, None, True), (1, wrong, True), "backend 'mine': an error must be a WeirError, found 'broken'"]
    assert batch.input_end_ns == 5
    assert batch.infer_end_ns > 6


@pytest.mark.parametrize("raised", [Panic("oh"), SystemExit(3), KeyboardInterrupt("x")])
def test_what_is_no_ordinary_exception_ends_no_thread(raised: BaseException) -> None:
    fixed = Fixed(raised)
    model = Served(lambda device: fixed)
    model.submit(1, [1], [2])
    assert model.left() == (1, BatchOutcome.ANSWERED, [f"{type(raised).__name__}: {raised}"] * 2)
    fixed.outcomes = [Result([Tensor.from_numpy("OUT", np.ones((1, 1), np.float32), "FP32")])]
    model.submit(2)
    assert model.left() == (2, BatchOutcome.ANSWERED, [[[1.0]]])
    model.instance.stop()  # whose closing fails, too
    assert not any(thread.name == "m_0_0" for thread in threading.enumerate())


def test_an_instance_that_panics_while_it_is_made_is_told() -> None:
    def make(device: Any) -> Any:
        raise Panic("oh")

    with pytest.raises(WeirError, match=r"^Panic: oh$"):
        Served(make)


@pytest.mark.parametrize(
    "told", ["5", '("KIND_CPU", "a.bin")', '(["KIND_CPU"], [1])', "((), (), None)", '((), (), "", [3])']
)
def test_an_availability_that_makes_no_sense_is_a_problem(tmp_path: Path, told: str) -> None:
    file = tmp_path / "backend.py"
    file.write_text(f"class Backend:\n  def load(self, m): pass\n  def availability(self, d): return {told}\n")
    available = OwnBackend("mine", file, BackendFiles()).availability(CPU_ONLY)
    assert available.runs_on == ()
    assert len(available.problems) == 1
    assert available.problems[0].startswith("backend 'mine': ")
