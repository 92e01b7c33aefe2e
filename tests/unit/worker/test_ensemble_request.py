"""`EnsembleRequest`, `StepGates` and the checks of an ensemble against its models, without a bus."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from bus.payloads import PayloadArena, PayloadReader
from schemas.bodies import body_template, pack_body, unpack_body
from schemas.errors import ErrorCode, WeirError
from schemas.model_config import ModelConfig
from schemas.request_errors import given_up
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import Tensor
from worker.ensembles.checks import ComposingModel, check_ensemble_models
from worker.ensembles.plan import EnsemblePlan
from worker.ensembles.request import MAX_RUNS, EnsembleRequest
from worker.ensembles.step_gates import StepGates

LOST = given_up()


def model(name, batch=0, dims=(-1,), **fields):
    """A model of one input and one output."""
    tensor = {"data_type": "TYPE_FP32", "dims": list(dims)}
    rows = {"input": [{"name": "IN", **tensor}], "output": [{"name": "OUT", **tensor}]}
    return ModelConfig.model_validate({"name": name, "max_batch_size": batch, **rows, **fields})


def ensemble(*models, batch=0, dims=(-1,)):
    """A chain of these models from IN to OUT."""
    rows = [
        {
            "model_name": name,
            "model_version": -1,
            "input_map": {"IN": f"T{place}" if place else "IN"},
            "output_map": {"OUT": "OUT" if place == len(models) - 1 else f"T{place + 1}"},
        }
        for place, name in enumerate(models)
    ]
    return model("e", batch, dims, platform="ensemble", ensemble_scheduling={"step": rows})


class Calls:
    """Stands for `InnerCalls`: keeps what was asked, and answers when it is told to."""

    def __init__(self, *configs):
        by_name = {config.name: config for config in configs}
        self.catalog = SimpleNamespace(resolve=lambda name, version: SimpleNamespace(config=by_name[name]))
        self.asked = []
        self.abandoned = []
        self.released = []

    def submit(self, request, on_answer):
        pending = SimpleNamespace(request=request, on_answer=on_answer, moments=None)
        self.asked.append(pending)
        return pending

    def abandon(self, pending):
        if pending in self.asked:  # giving up what has its last answer changes nothing, as in `Inference`
            self.asked.remove(pending)
            self.abandoned.append(pending)

    def release(self, ref):
        self.released.append(ref)

    def answer(self, content, is_final=True, **moments):
        """Answers what was asked first: with an error, or with OUT."""
        pending = self.asked.pop(0)
        pending.moments = moments or None
        if isinstance(content, WeirError):
            pending.on_answer(content, True)
            return
        size = content.size if isinstance(content, tuple) else len(content)
        outputs = [Tensor("OUT", "FP32", [size // 4], content)]
        pending.on_answer(InferResponse(pending.request.model_name, "1", "", outputs), is_final)


class Told:
    """The caller of a request."""

    def __init__(self):
        self.responses = []
        self.ends = []

    def responded(self, outputs, parameters):
        self.responses.append(outputs)

    def ended(self, error):
        self.ends.append(error)


def begun(calls, config, gates=None, shape=(4,), correlation_id=0):
    told = Told()
    request = InferRequest("e", id="me", inputs=[Tensor("IN", "FP32", shape, bytes(4 * int(np.prod(shape))))])
    request.correlation_id = correlation_id
    gates = gates or StepGates(len(config.ensemble_scheduling.step), 0)
    asked = EnsembleRequest(config, EnsemblePlan(config), gates, request, calls, PayloadReader(), told)
    asked.begin()
    return asked, told


@pytest.fixture
def slots():
    arena = PayloadArena("worker-test-ensemble")
    yield lambda: arena.allocate(100_000)
    arena.close()


def test_references_are_passed_on_and_given_back_once(slots):
    calls = Calls(model("a"), model("b"))
    _, told = begun(calls, ensemble("a", "b"))
    first, second = slots(), slots()
    calls.answer(first.ref())
    assert calls.asked[0].request.inputs[0].data == first.ref()
    assert calls.released == []
    calls.answer(second.ref())
    assert calls.released == [first.ref()], "the other one belongs to whoever gets the response"
    assert ([row.data for row in told.responses[0]], told.ends) == ([second.ref()], [None])


def test_what_was_lost_between_steps_is_made_anew(slots):
    calls = Calls(model("a"), model("b"))
    _, told = begun(calls, ensemble("a", "b"))
    lost = slots()
    for _ in range(MAX_RUNS):
        assert calls.asked[0].request.model_name == "a"
        calls.answer(lost.ref())
        calls.answer(LOST)
    assert calls.released == [lost.ref()] * MAX_RUNS
    assert [(error.code, error.message) for error in told.ends] == [
        (
            ErrorCode.UNAVAILABLE,
            "in ensemble 'e', tensors between its steps were lost; the request may be sent again",
        )
    ]


def test_an_output_that_has_gone_is_made_anew(slots):
    calls = Calls(model("a"))
    _, told = begun(calls, ensemble("a"))
    slot = slots()
    ref = slot.ref()
    slot.free()
    calls.answer(ref)
    assert told.ends == []
    calls.answer(b"1234")
    assert (len(told.responses), told.ends) == (1, [None])


def test_giving_up_abandons_what_runs_and_tells_nobody(slots):
    calls = Calls(model("a"), model("b"))
    asked, told = begun(calls, ensemble("a", "b"))
    slot = slots()
    calls.answer(slot.ref())
    asked.cancel()
    assert (len(calls.abandoned), calls.asked, calls.released) == (1, [], [slot.ref()])
    assert (told.responses, told.ends) == ([], [])


def test_times_of_steps_are_summed_up():
    calls = Calls(model("a"), model("b"))
    asked, _ = begun(calls, ensemble("a", "b"))
    for _ in range(2):
        calls.answer(b"1234", COMPUTE_START=10, COMPUTE_INPUT_END=11, COMPUTE_OUTPUT_START=15, COMPUTE_END=17)
    assert asked.phases_ns == [2, 8, 4]


@pytest.mark.parametrize(("batch", "of_step", "given", "passed"), [(0, 8, (4,), [1, 4]), (8, 8, (2, 4), [2, 4])])
def test_a_step_that_batches_gets_a_batch_dimension(batch, of_step, given, passed):
    calls = Calls(model("a", of_step))
    begun(calls, ensemble("a", batch=batch), shape=given)
    assert calls.asked[0].request.inputs[0].shape == passed


def test_gates_let_in_as_many_as_they_may():
    config = ensemble("a")
    gates = StepGates(1, limit=1)

    async def three():
        calls = Calls(model("a"))
        rows = [begun(calls, config, gates) for _ in range(3)]
        assert len(calls.asked) == 1
        rows[1][0].cancel()  # while it waits
        calls.answer(b"1234")
        assert len(calls.asked) == 1
        calls.answer(b"1234")
        assert [len(told.responses) for _, told in rows] == [1, 0, 1]

    asyncio.run(three())


def test_a_request_of_a_sequence_is_not_run_anew(slots):
    calls = Calls(model("a"), model("b"))
    _, told = begun(calls, ensemble("a", "b"), correlation_id=7)
    lost = slots()
    calls.answer(lost.ref())
    calls.answer(LOST)
    assert (calls.asked, calls.released) == ([], [lost.ref()])
    assert [error.message for error in told.ends] == [
        "in ensemble 'e', tensors between its steps were lost: start the sequence again"
    ]


def test_a_step_that_finds_its_tensors_lost_leaves_its_gate(slots):
    calls = Calls(model("a"), model("b"))
    gates = StepGates(2, limit=1)
    begun(calls, ensemble("a", "b"), gates)
    ref = slots().ref()
    for lost in (ref, ref._replace(segment="weir-worker-01234567-1_1_0.131072")):  # on another host
        calls.answer(lost)
        calls.answer(LOST)
        assert calls.asked[0].request.model_name == "a", "it begins anew"
    calls.answer(b"1234")
    assert calls.asked[0].request.model_name == "b", "whose gate was left"


def test_the_rest_of_a_stream_that_fails_is_given_up():
    calls = Calls(model("a"))
    _, told = begun(calls, ensemble("a"))
    (pending,) = calls.asked
    pending.on_answer(WeirError(ErrorCode.INTERNAL, "no"), False)
    assert calls.abandoned == [pending]
    assert [error.message for error in told.ends] == ["in ensemble 'e', no"]


@pytest.mark.parametrize("at", ["begin", "submit", "answer"])
def test_what_our_own_code_gets_wrong_ends_the_request_once(at, monkeypatch):
    def broken(*_arguments):
        raise KeyError("a bug")

    calls = Calls(model("a"))
    if at == "begin":
        monkeypatch.setattr("worker.ensembles.run.EnsembleRun.begin", broken)
    elif at == "submit":
        calls.submit = broken
    _, told = begun(calls, ensemble("a"))
    if at == "answer":
        monkeypatch.setattr("worker.ensembles.run.EnsembleRun.responded", broken)
        calls.answer(b"1234")
    assert [(error.code, error.message) for error in told.ends] == [
        (ErrorCode.INTERNAL, "in ensemble 'e', internal server error")
    ]
    assert calls.asked == []


def test_gates_let_everything_in_after_a_while():
    async def patience():
        calls = Calls(model("a"))
        gates = StepGates(1, limit=1, patience_s=0.01)
        for _ in range(2):
            begun(calls, ensemble("a"), gates)
        async with asyncio.timeout(5):
            while len(calls.asked) < 2:
                await asyncio.sleep(0.005)

    asyncio.run(patience())


@pytest.mark.parametrize(
    ("config", "steps", "text"),
    [
        (ensemble("a"), {}, "contains models that are not available or ambiguous: a"),
        (ensemble("a"), {"a": ComposingModel(failure="why")}, "which has no loaded version. Model 'a' loading failed"),
        (
            ensemble("a", batch=4),
            {"a": model("a", 2)},
            "allows maximum batch size 4, but it contains model a which only",
        ),
        (
            ensemble("a", dims=[3]),
            {"a": model("a", dims=[4])},
            "inconsistent shape: [3] is inferred from model e while [4]",
        ),
    ],
)
def test_an_ensemble_must_fit_its_models(config, steps, text):
    found = {name: ComposingModel(row, [1]) if isinstance(row, ModelConfig) else row for name, row in steps.items()}
    with pytest.raises(WeirError) as refused:
        check_ensemble_models(config, {"a": ComposingModel(), **found})
    assert text in refused.value.message
    assert refused.value.code is ErrorCode.INVALID_ARG


def test_the_batch_of_a_step_may_be_a_dimension_of_the_ensemble():
    check_ensemble_models(ensemble("a", dims=[-1, 3]), {"a": ComposingModel(model("a", 4, dims=[3]), [1])})


@pytest.mark.parametrize(
    ("priority", "wants", "traceparent"), [(0, False, ""), (3, False, ""), (0, True, ""), (3, True, "t")]
)
def test_bodies_carry_what_few_requests_have(priority, wants, traceparent):
    request = InferRequest("m", "1", inputs=[Tensor("IN", "FP32", [1], b"1234")])
    request.priority, request.wants_moments, request.traceparent = priority, wants, traceparent
    body = pack_body(request)
    assert b"1234".join(body_template(request)) == body
    read = unpack_body(body, "m", 1)
    assert (read.priority, read.wants_moments, read.traceparent) == (priority, wants or bool(traceparent), traceparent)
