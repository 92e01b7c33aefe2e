"""`EnsembleRequest`, `StepLimiter` and the checks of an ensemble against its models, without a bus."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from weir.bus.payloads.arena import PayloadArena, PayloadReader
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import cancelled_error
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.request_body import body_template, pack_body, unpack_body
from weir.worker.ensembles.backend import ComposingModel, check_ensemble_models
from weir.worker.ensembles.request import MAX_RUNS, EnsembleContext, EnsembleRequest, StepLimiter
from weir.worker.ensembles.run import EnsemblePlan

LOST = cancelled_error()


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
    """An `InferenceClient` that keeps requests until `answer` responds to the first of them."""

    def __init__(self, *configs):
        by_name = {config.name: config for config in configs}
        self.catalog = SimpleNamespace(resolve=lambda name, version: SimpleNamespace(config=by_name[name]))
        self.caches = lambda model: True  # so no request uses a template
        self.sent = []
        self.cancelled = []
        self.released = []

    def submit(self, request, on_response):
        pending = SimpleNamespace(request=request, on_response=on_response, timestamps=None)
        self.sent.append(pending)
        return pending

    def cancel(self, pending):
        if pending in self.sent:  # cancelling a request that has ended does nothing, as in `RequestDispatcher`
            self.sent.remove(pending)
            self.cancelled.append(pending)

    def release(self, ref):
        self.released.append(ref)

    def answer(self, content, is_final=True, **timestamps):
        """Responds to the first request, with an error or with output OUT."""
        pending = self.sent.pop(0)
        pending.timestamps = timestamps or None
        if isinstance(content, WeirError):
            pending.on_response(content, True)
            return
        size = content.size if isinstance(content, tuple) else len(content)
        outputs = [Tensor("OUT", "FP32", [size // 4], content)]
        pending.on_response(InferResponse(pending.request.model_name, "1", "", outputs), is_final)


class ResponseLog:
    """The caller of a request, which keeps the responses."""

    def __init__(self):
        self.responses = []
        self.ends = []

    def responded(self, outputs, parameters):
        self.responses.append(outputs)

    def ended(self, error):
        self.ends.append(error)


def start(calls, config, limiter=None, shape=(4,), correlation_id=0):
    log = ResponseLog()
    request = InferRequest("e", id="me", inputs=[Tensor("IN", "FP32", shape, bytes(4 * int(np.prod(shape))))])
    request.correlation_id = correlation_id
    limiter = limiter or StepLimiter(len(config.ensemble_scheduling.step), 0)
    ensemble = EnsembleContext(config, EnsemblePlan(config), limiter, calls, PayloadReader())
    running = EnsembleRequest(ensemble, request, log)
    running.begin()
    return running, log


@pytest.fixture
def slots():
    arena = PayloadArena("worker-test-ensemble")
    yield lambda: arena.allocate(100_000)
    arena.close()


def test_references_are_passed_on_and_released_once(slots):
    calls = Calls(model("a"), model("b"))
    _, log = start(calls, ensemble("a", "b"))
    first, second = slots(), slots()
    calls.answer(first.ref())
    assert calls.sent[0].request.inputs[0].data == first.ref()
    assert calls.released == []
    calls.answer(second.ref())
    assert calls.released == [first.ref()], "the caller owns the output of the response"
    assert ([row.data for row in log.responses[0]], log.ends) == ([second.ref()], [None])


def test_a_request_runs_again_after_tensors_between_steps_were_lost(slots):
    calls = Calls(model("a"), model("b"))
    _, log = start(calls, ensemble("a", "b"))
    lost = slots()
    for _ in range(MAX_RUNS):
        assert calls.sent[0].request.model_name == "a"
        calls.answer(lost.ref())
        calls.answer(LOST)
    assert calls.released == [lost.ref()] * MAX_RUNS
    assert [(error.code, error.message) for error in log.ends] == [
        (
            ErrorCode.UNAVAILABLE,
            "in ensemble 'e', tensors between its steps were lost; the request may be sent again",
        )
    ]


def test_a_request_runs_again_after_an_output_was_lost(slots):
    calls = Calls(model("a"))
    _, log = start(calls, ensemble("a"))
    slot = slots()
    ref = slot.ref()
    slot.free()
    calls.answer(ref)
    assert log.ends == []
    calls.answer(b"1234")
    assert (len(log.responses), log.ends) == (1, [None])


def test_a_cancelled_request_cancels_its_steps_without_a_response(slots):
    calls = Calls(model("a"), model("b"))
    asked, log = start(calls, ensemble("a", "b"))
    slot = slots()
    calls.answer(slot.ref())
    asked.cancel()
    assert (len(calls.cancelled), calls.sent, calls.released) == (1, [], [slot.ref()])
    assert (log.responses, log.ends) == ([], [])


def test_times_of_steps_are_summed_up():
    calls = Calls(model("a"), model("b"))
    asked, _ = start(calls, ensemble("a", "b"))
    for _ in range(2):
        calls.answer(b"1234", COMPUTE_START=10, COMPUTE_INPUT_END=11, COMPUTE_OUTPUT_START=15, COMPUTE_END=17)
    assert asked.phases_ns == [2, 8, 4]


@pytest.mark.parametrize(("batch", "of_step", "given", "passed"), [(0, 8, (4,), [1, 4]), (8, 8, (2, 4), [2, 4])])
def test_a_step_that_batches_gets_a_batch_dimension(batch, of_step, given, passed):
    calls = Calls(model("a", of_step))
    start(calls, ensemble("a", batch=batch), shape=given)
    assert calls.sent[0].request.inputs[0].shape == passed


def test_a_step_runs_as_many_calls_as_its_limit_allows():
    config = ensemble("a")
    limiter = StepLimiter(1, limit=1)

    async def three():
        calls = Calls(model("a"))
        rows = [start(calls, config, limiter) for _ in range(3)]
        assert len(calls.sent) == 1
        rows[1][0].cancel()  # while it waits
        calls.answer(b"1234")
        assert len(calls.sent) == 1
        calls.answer(b"1234")
        assert [len(log.responses) for _, log in rows] == [1, 0, 1]

    asyncio.run(three())


def test_a_request_of_a_sequence_does_not_run_again(slots):
    calls = Calls(model("a"), model("b"))
    _, log = start(calls, ensemble("a", "b"), correlation_id=7)
    lost = slots()
    calls.answer(lost.ref())
    calls.answer(LOST)
    assert (calls.sent, calls.released) == ([], [lost.ref()])
    assert [error.message for error in log.ends] == [
        "in ensemble 'e', tensors between its steps were lost: start the sequence again"
    ]


def test_a_step_whose_tensors_were_lost_leaves_the_limiter(slots):
    calls = Calls(model("a"), model("b"))
    limiter = StepLimiter(2, limit=1)
    start(calls, ensemble("a", "b"), limiter)
    ref = slots().ref()
    for lost in (ref, ref._replace(segment="weir-worker-01234567-1_1_0.131072")):  # on another host
        calls.answer(lost)
        calls.answer(LOST)
        assert calls.sent[0].request.model_name == "a", "the request starts again"
    calls.answer(b"1234")
    assert calls.sent[0].request.model_name == "b", "the limiter admits the next call"


def test_further_responses_of_a_failed_stream_are_cancelled():
    calls = Calls(model("a"))
    _, log = start(calls, ensemble("a"))
    (pending,) = calls.sent
    pending.on_response(WeirError(ErrorCode.INTERNAL, "no"), False)
    assert calls.cancelled == [pending]
    assert [error.message for error in log.ends] == ["in ensemble 'e', no"]


def test_an_exception_in_weir_ends_the_request_once(monkeypatch):
    def broken(*_arguments):
        raise KeyError("a bug")

    calls = Calls(model("a"))
    _, log = start(calls, ensemble("a"))
    monkeypatch.setattr("weir.worker.ensembles.run.EnsembleRun.responded", broken)
    calls.answer(b"1234")
    assert [(error.code, error.message) for error in log.ends] == [
        (ErrorCode.INTERNAL, "in ensemble 'e', internal server error")
    ]
    assert calls.sent == []


def test_a_call_exceeds_the_limit_after_the_timeout():
    async def patience():
        calls = Calls(model("a"))
        limiter = StepLimiter(1, limit=1, timeout_s=0.01)
        for _ in range(2):
            start(calls, ensemble("a"), limiter)
        while len(calls.sent) < 2:
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
def test_bodies_carry_optional_fields(priority, wants, traceparent):
    request = InferRequest("m", "1", inputs=[Tensor("IN", "FP32", [1], b"1234")])
    request.priority, request.wants_timestamps, request.traceparent = priority, wants, traceparent
    body = pack_body(request)
    assert b"1234".join(body_template(request)) == body
    read = unpack_body(body, "m", 1)
    assert (read.priority, read.wants_timestamps, read.traceparent) == (
        priority,
        wants or bool(traceparent),
        traceparent,
    )
