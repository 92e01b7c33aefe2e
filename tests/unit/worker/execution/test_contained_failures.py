"""An exception in the handling of one request does not affect other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.contained_sites import fail_for
from tests.support.fakes.called_models import CalledModels, ModelCall, called, outputs, respond
from tests.unit.worker.backends.python.test_calls_connection import Peer, peer
from tests.unit.worker.ensembles.test_instance import Coordinator, coordinator
from tests.unit.worker.execution.test_batch_execution import CONFIG, Scripted, number
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, internal
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import RegionRef, Tensor
from weir.schemas.wire.batches import BatchEnded, BatchEntry, BatchLost, BatchMessage, BatchReleased
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.execution.batch import Batch
from weir.worker.execution.shared_memory import SharedMemoryIO
from weir.worker.execution.updates import BatchUpdate
from weir.worker.python_stub._weir_channel import Kind

__all__ = ["called", "coordinator", "peer"]

ONE_RESPONSE = ModelConfig.model_validate({"name": "m", "max_batch_size": 4})


# Batches that are answered at once


@pytest.fixture
def model() -> Iterator[Scripted]:
    scripted = Scripted(ONE_RESPONSE)
    scripted.execute = lambda requests, execution: [number(5) for _ in requests]
    yield scripted
    scripted.instance.stop()


def responses_of(update: BatchUpdate) -> dict[int, str | int]:
    """The value or error of each response, by the key of its request."""
    rows = [row for _, message in update.responses for row in unpack_responses(message)[1]]
    return {row.key: row.error.message if row.error else row.outputs[0].data[0] for row in rows}


def test_a_request_that_can_not_be_decoded(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.execution.decoding.unpack_plain", lambda *_: None)
    fail_for(
        monkeypatch, "weir.worker.execution.decoding:_Decoder.decode", lambda _self, position, _entry: position == 1
    )
    model.submit(1, 2, 3)
    answers = responses_of(model.published.get(timeout=10))
    assert answers == {1: 5, 2: "the request can't be decoded: RuntimeError: injected", 3: 5}
    assert model.counted()[2] == {"OTHER": 1}


def test_a_response_that_can_not_be_sent(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = number(6)
    site = "weir.worker.execution.response_writer:ResponseWriter.write"
    fail_for(monkeypatch, site, lambda *arguments: failing in arguments)
    model.execute = lambda requests, execution: [number(5), failing, number(5)]
    monkeypatch.setattr(SharedMemoryIO, "_check_access", lambda *_: None)
    entries = []
    for key in (1, 2, 3):
        output = RequestedOutput("N", region=RegionRef("of-the-client", 1, 0, 8) if key == 2 else None)
        body = pack_body(InferRequest("m", inputs=[Tensor("A", "INT8", [1, 1], b"\1")], outputs=[output]))
        entries.append(BatchEntry("gateway", key, 5, body))
    model.instance.submit(Batch(BatchMessage("scheduler", 1, "m", 1, 0, entries)))
    answers = responses_of(model.published.get(timeout=10))
    assert answers == {1: 5, 2: "the response can't be sent: RuntimeError: injected", 3: 5}
    assert model.counted()[2] == {"BACKEND": 1}


def test_a_response_that_can_not_be_packed(model: Scripted) -> None:
    unpackable = number(6)
    unpackable.parameters = {"a": object()}
    model.execute = lambda requests, execution: [number(5), unpackable, number(5)]
    model.submit(1, 3, 5)  # of one gateway
    answers = responses_of(model.published.get(timeout=10))
    assert answers.pop(3).startswith("the response can't be sent: TypeError: ")  # type: ignore[union-attr]
    assert answers == {1: 5, 5: 5}


def test_a_batch_that_can_not_be_counted_gets_its_responses(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "weir.worker.execution.batch:Batch.record")
    model.submit(1, 2)
    assert responses_of(model.published.get(timeout=10)) == {1: 5, 2: 5}


def test_a_batch_whose_failure_can_not_be_reported_runs_again(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "weir.worker.execution.instance:ModelInstance._failed")
    monkeypatch.setattr("weir.worker.execution.batch_runner.decode_batch", lambda *_: 1 / 0)
    model.submit(1)
    update = model.published.get(timeout=10)
    (completion,) = update.completions
    assert type(completion) is BatchLost


# Batches whose models answer in pieces


@pytest.fixture
def streaming() -> Iterator[Scripted]:
    scripted = Scripted(CONFIG)
    yield scripted
    scripted.instance.stop()


def test_a_stream_that_fails_does_not_affect_others(streaming: Scripted) -> None:
    streaming.submit(1, 2)
    execution = streaming.executions.get()
    assert streaming.left()[0] == BatchReleased
    unpackable = number(6)
    unpackable.parameters = {"a": object()}
    execution.respond(0, unpackable, False)
    outcome, ((key, text, is_final),) = streaming.left()
    assert (outcome, key, is_final) == (None, 1, True)
    assert text.startswith("the response can't be sent: TypeError: ")
    execution.respond(1, number(7), True)
    assert streaming.left() == (BatchEnded, [(2, 7, True)])


def test_streams_end_although_counting_fails(streaming: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "weir.worker.execution.batch:Batch._count")
    streaming.submit(1)
    execution = streaming.executions.get()
    streaming.left()
    execution.respond(0, number(7), True)
    assert streaming.left() == (BatchEnded, [(1, 7, True)])


# What models ask of others


def test_a_call_that_fails_does_not_affect_others(
    called: CalledModels, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = "weir.worker.backends.python.calls:ProcessConnection._submit"
    fail_for(monkeypatch, site, lambda _self, number, *_: number == 1)
    called.react = lambda call: respond(call, outputs())
    peer.call(1)
    kind, call, (code, text), is_final = peer.channel.receive()
    assert (kind, call, code, is_final) == (Kind.CALL_RESPONSE, 1, ErrorCode.INTERNAL.number, True)
    assert text.endswith("internal error of the worker: RuntimeError: injected")
    peer.call(2)
    assert peer.channel.receive() == (Kind.CALL_RESPONSE, 2, ((), None), True)


def test_a_response_to_a_call_that_fails_does_not_affect_others(
    called: CalledModels, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def react(call: ModelCall) -> None:
        with pytest.raises(ZeroDivisionError):
            respond(call, outputs())
        respond(call, internal("no"))  # as `weir.calls.responses.delivery` ends a request whose response was not taken

    called.react = react
    monkeypatch.setattr("weir.worker.backends.python.calls.pack_response", lambda _: 1 / 0)
    for key in (1, 2):
        peer.call(key)
        error = (ErrorCode.INTERNAL.number, "no")
        assert peer.channel.receive() == (Kind.CALL_RESPONSE, key, error, True)
    assert not called.calls.open_calls


def test_an_operation_on_the_repository_that_fails(called: CalledModels, peer: Peer) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("injected")

    peer.connection._server.model_control.load = fail
    peer.channel.send(Kind.LOAD, 1, "m", None, {})
    kind, call, text = peer.channel.receive()
    assert (kind, call) == (Kind.FAILED, 1)
    assert text.endswith("internal error of the worker: RuntimeError: injected")


# Ensembles


STARTING, ANSWERING = "the request can't be run: ZeroDivisionError", "in ensemble 'e', internal server error"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("instance.unpack_body", STARTING),
        ("run.EnsembleRun.begin", STARTING),
        ("request.EnsembleRequest._submit", STARTING),
        ("run.EnsembleRun.responded", ANSWERING),
        ("instance._OpenRequest.responded", ANSWERING),
        ("instance.pack_response", ANSWERING),
    ],
)
async def test_a_request_of_an_ensemble_that_fails(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    monkeypatch.setattr(f"weir.worker.ensembles.{broken}", lambda *_: 1 / 0)
    coordinator.submit(1)
    if coordinator.calls.sent:
        coordinator.calls.answer(b"1234")
    assert coordinator.calls.sent == []
    await asyncio.sleep(0)  # what is answered in one turn of the loop leaves at its end
    (update,) = coordinator.published
    (completion,) = update.completions
    assert type(completion) is BatchEnded
    ((_, responses),) = update.responses
    (row,) = unpack_responses(responses)[1]
    assert row.error is not None
    assert row.error.message.startswith(message)


async def test_a_request_of_an_ensemble_that_can_not_be_counted_gets_its_response(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.worker.execution.statistics.ModelStatistics.record_requests", lambda *_: 1 / 0)
    coordinator.submit(1)
    coordinator.calls.answer(b"1234")
    await asyncio.sleep(0)  # as above
    (update,) = coordinator.published
    assert [type(completion) for completion in update.completions] == [BatchEnded]
    ((_, responses),) = update.responses
    (row,) = unpack_responses(responses)[1]
    assert row.error is None
