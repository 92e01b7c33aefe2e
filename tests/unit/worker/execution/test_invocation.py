"""`ModelInvoker`: a batch that fails runs again request by request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import DeviceLost, Execution, InstanceDied, Result
from weir.worker.execution.invocation import MAX_FAILED_BATCHES, PROBES, ModelInvoker

REQUESTS = [InferRequest("m", inputs=[Tensor("A", "INT8", [1, 1], bytes([value]))]) for value in range(8)]


def value_of(request: InferRequest) -> int:
    return int(bytes(request.inputs[0].data)[0])  # type: ignore[arg-type]


class Model:
    """An instance that raises the error in `poison` for a request's value; the next run overwrites its outputs."""

    def __init__(self, poison: dict[int, Exception]) -> None:
        self.poison = poison
        self.runs: list[list[int]] = []
        self._memory = bytearray(8)
        self.during: Callable[[list[int], Execution], Any] = lambda values, execution: None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        values = [value_of(request) for request in requests]
        self.runs.append(values)
        special = self.during(values, execution)
        for value in values:
            if value in self.poison:
                raise self.poison[value]
        if special is not None:
            return list(special)
        self._memory[: len(values)] = bytes(values)
        return [
            Result([Tensor("OUT", "INT8", [1, 1], memoryview(self._memory)[at : at + 1])]) for at in range(len(values))
        ]

    def close(self) -> None:
        pass


class Watched(Execution):
    """An execution in which the test decides which requests may run again."""

    def __init__(self, barred: set[int] | None = None) -> None:
        super().__init__(PayloadReader())
        self.barred = barred or set()
        self.alone: list[int] = []
        self.responses: list[tuple[int, Result | None, bool]] = []

    def may_run_again(self, position: int) -> bool:
        return position not in self.barred

    def has_run_alone(self, position: int, run: Execution) -> None:
        self.alone.append(position)

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        self.responses.append((position, result, is_final))

    @property
    def has_responded(self) -> bool:
        return bool(self.responses)


def values_of(outcomes: Sequence[Result | None]) -> list[int | str | None]:
    """The value of each outcome, or the text of its error."""
    return [
        None if outcome is None else outcome.error.message if outcome.error else int(bytes(outcome.outputs[0].data)[0])  # type: ignore[arg-type]
        for outcome in outcomes
    ]


def test_only_the_failing_request_fails() -> None:
    model, execution = Model({3: invalid("three"), 5: ValueError("five")}), Watched()
    outcomes = ModelInvoker("m_0").start(model, REQUESTS, execution)
    assert values_of(outcomes) == [0, 1, 2, "three", 4, "ValueError: five", 6, 7]
    assert outcomes[3] is not None
    assert outcomes[3].error is not None
    assert outcomes[3].error.code is ErrorCode.INVALID_ARG
    assert model.runs == [list(range(8)), *([value] for value in range(8))]
    assert execution.alone == list(range(8))


def test_single_requests_and_successful_batches_run_once() -> None:
    model = Model({0: invalid("zero")})
    run = ModelInvoker("m_0")
    assert values_of(run.start(model, REQUESTS[:1], Watched())) == ["zero"]
    assert values_of(run.start(model, REQUESTS[1:], Watched())) == list(range(1, 8))
    assert len(model.runs) == 2


def test_a_stateful_model_runs_no_request_twice() -> None:
    model = Model({3: invalid("three")})
    outcomes = ModelInvoker("m_0", is_stateful=True).start(model, REQUESTS, Watched())
    assert values_of(outcomes) == ["three"] * 8
    assert len(model.runs) == 1


def test_requests_that_may_not_run_again_get_the_error_of_the_batch() -> None:
    model, execution = Model({3: invalid("three")}), Watched({0, 6})
    assert values_of(ModelInvoker("m_0").start(model, REQUESTS, execution)) == [
        "three",
        1,
        2,
        "three",
        4,
        5,
        "three",
        7,
    ]
    assert execution.alone == [1, 2, 3, 4, 5, 7]


def test_requests_cancelled_meanwhile_do_not_run_again() -> None:
    model, execution = Model({3: invalid("three")}), Watched()
    model.during = lambda values, _: execution.barred.add(2) if values == [1] else None
    ModelInvoker("m_0").start(model, REQUESTS, execution)
    assert execution.alone == [0, 1, 3, 4, 5, 6, 7]


def test_a_broken_model_is_probed_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "shuffle", list.reverse)
    model = Model({value: internal(f"broken {value}") for value in range(8)})
    run = ModelInvoker("m_0")
    for _ in range(MAX_FAILED_BATCHES):
        assert values_of(run.start(model, REQUESTS, Watched())) == [f"broken {value}" for value in range(8)]
    assert len(model.runs) == MAX_FAILED_BATCHES * 9
    model.runs.clear()
    assert values_of(run.start(model, REQUESTS, Watched())) == ["broken 0"] * 6 + ["broken 6", "broken 7"]
    assert len(model.runs) == 1 + PROBES
    # A probe that works brings all others their turn, and the model is believed in again.
    model.poison = {3: internal("three"), 7: internal("seven")}
    for _ in range(2):
        model.runs.clear()
        assert values_of(run.start(model, REQUESTS, Watched())) == [0, 1, 2, "three", 4, 5, 6, "seven"]
        assert len(model.runs) == 9


def test_a_successful_batch_resets_the_failures() -> None:
    model = Model({value: internal("broken") for value in range(8)})
    run = ModelInvoker("m_0")
    for _ in range(MAX_FAILED_BATCHES + 1):
        run.start(model, REQUESTS, Watched())
    healthy, model.poison = model.poison, {}
    run.start(model, REQUESTS, Watched())
    model.poison = healthy
    model.runs.clear()
    run.start(model, REQUESTS, Watched())
    assert len(model.runs) == 9


@pytest.mark.parametrize("death", [InstanceDied("gone"), DeviceLost("gone")])
def test_a_batch_is_lost_if_the_instance_dies(death: InstanceDied) -> None:
    model = Model({3: invalid("three")})

    def die(values: list[int], execution: Execution) -> None:
        if values == [4]:
            raise death

    model.during = die
    with pytest.raises(InstanceDied):
        ModelInvoker("m_0").start(model, REQUESTS, Watched())


def test_after_a_response_a_dead_instance_fails_the_other_requests() -> None:
    model, execution = Model({3: invalid("three")}), Watched()

    def respond(values: list[int], run: Execution) -> list[None] | None:
        if len(values) > 1:
            return None
        if values[0] > 3:
            raise InstanceDied("gone")
        run.respond(0, Result(), False)
        return [None]

    model.during = respond
    outcomes = ModelInvoker("m_0").start(model, REQUESTS, execution)
    assert values_of(outcomes) == [None, None, None, "three", "gone", "gone", "gone", "gone"]
    assert [(position, is_final) for position, _, is_final in execution.responses] == [
        (0, False),
        (1, False),
        (2, False),
        (3, False),
    ]


def test_a_single_run_responds_to_its_own_request_only() -> None:
    model, execution = Model({3: invalid("three")}), Watched()
    lost = WeirError(ErrorCode.UNAVAILABLE, "lost")

    def later(values: list[int], run: Execution) -> list[None] | None:
        if values != [5]:
            return None
        run.fail(lost)
        return [None]

    model.during = later
    assert values_of(ModelInvoker("m_0").start(model, REQUESTS, execution)) == [
        0,
        1,
        2,
        "three",
        4,
        None,
        6,
        7,
    ]
    [(position, result, is_final)] = execution.responses
    assert (position, result and result.error, is_final) == (5, lost, True)


RUNS = [0]


@pytest.fixture(scope="module", autouse=True)
def told_runs() -> Iterator[None]:
    yield
    print(f"\n{RUNS[0]} batches")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.integers(1, 8)), max_size=12))
def test_any_batches(batches: list[tuple[set[int], set[int], int]]) -> None:
    """Each request has its own outcome whatever fails, and a broken model does not run every request again."""
    run = ModelInvoker("m_0")
    in_vain = 0
    for poison, barred, size in batches:
        RUNS[0] += 1
        model = Model({value: internal(f"poison {value}") for value in poison})
        outcomes = values_of(run.start(model, REQUESTS[:size], Watched(barred)))
        assert len(outcomes) == size
        whole, *alone = model.runs
        assert whole == list(range(size))
        assert len(alone) == len({run[0] for run in alone}) <= size
        assert not barred & {run[0] for run in alone}
        bad = poison & set(range(size))
        if not bad or size == 1:
            assert alone == []
            in_vain = 0 if not bad else in_vain
            continue
        may = set(range(size)) - barred
        if in_vain < MAX_FAILED_BATCHES:
            assert {run[0] for run in alone} == may
        for value, outcome in enumerate(outcomes):
            if [value] in alone:
                assert outcome == (f"poison {value}" if value in bad else value)
            else:
                assert outcome == f"poison {min(bad)}"
        if alone and {run[0] for run in alone} <= bad:
            assert len(alone) == (len(may) if in_vain < MAX_FAILED_BATCHES else min(PROBES, len(may)))
            in_vain += 1
        elif alone:
            assert {run[0] for run in alone} == may
            in_vain = 0
