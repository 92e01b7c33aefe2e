"""An exception while a worker does one request's part of something that serves several: only that request fails."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from asked_models import AskedModels, answer, asked, outputs
from collecting_bus import CollectingBus
from test_batch_execution import CONFIG, Scripted, number
from test_ensemble_instance import Coordinator, coordinator
from test_python_call_connection import Peer, peer

from runtime.containment import SITES
from schemas.abandoned import pack_abandoned
from schemas.bodies import pack_body
from schemas.errors import ErrorCode
from schemas.messages import (
    BatchEntry,
    BatchMessage,
    BatchOutcome,
    pack_batch,
    pack_release,
    unpack_answers,
)
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest, RequestedOutput
from schemas.tensors import Tensor
from worker.batch_execution import FinishedBatch
from worker.control_tasks import ControlTasks
from worker.python_stub._weir_channel import Kind
from worker.running_batch import RunningBatch
from worker.service import WorkerService

__all__ = ["asked", "coordinator", "peer"]

ONE_RESPONSE = ModelConfig.model_validate({"name": "m", "max_batch_size": 4})


def fail_for(monkeypatch: pytest.MonkeyPatch, site: str, is_meant: Callable[..., bool] = lambda *_: True) -> None:
    """Calls of the site's function for which `is_meant(*arguments)` raise; the others do what they ever did."""
    function = SITES[site].function

    def failing(*arguments: Any, **named: Any) -> Any:
        if is_meant(*arguments):
            raise RuntimeError("injected")
        return function(*arguments, **named)

    monkeypatch.setattr(SITES[site], "function", failing)


# Batches that are answered at once


@pytest.fixture
def model() -> Iterator[Scripted]:
    scripted = Scripted(ONE_RESPONSE)
    scripted.execute = lambda requests, execution: [number(5) for _ in requests]
    yield scripted
    scripted.instance.stop()


def said(finished: FinishedBatch) -> dict[int, str | int]:
    """Each answer's value, or its error, by the key of its request."""
    rows = [row for _, message in finished.answers for row in unpack_answers(message)[1]]
    return {row.key: row.error.message if row.error else row.outputs[0].data[0] for row in rows}


def test_a_request_that_can_not_be_decoded(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "worker.batch_decoding:_Decoder.decode", lambda _self, position, _entry: position == 1)
    model.submit(1, 2, 3)
    answers = said(model.published.get(timeout=10))
    assert answers == {1: 5, 2: "the request can't be decoded: RuntimeError: injected", 3: 5}
    assert model.counted()[2] == {"OTHER": 1}


@pytest.mark.parametrize(
    "site", ["worker.answer_packer:AnswerPacker.packed", "worker.batch_runner:BatchRunner._deliver"]
)
def test_a_response_that_can_not_be_sent(model: Scripted, monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    failing = number(6)
    fail_for(monkeypatch, site, lambda *arguments: failing in arguments)
    model.execute = lambda requests, execution: [number(5), failing, number(5)]
    # Only requests that name their outputs may want them in memory of their own.
    body = pack_body(InferRequest("m", inputs=[Tensor("A", "INT8", [1, 1], b"\1")], outputs=[RequestedOutput("N")]))
    entries = [BatchEntry("gateway", key, 5, body) for key in (1, 2, 3)]
    model.instance.submit(RunningBatch(BatchMessage("scheduler", 1, "m", 1, 0, entries, [])))
    answers = said(model.published.get(timeout=10))
    assert answers == {1: 5, 2: "the response can't be sent: RuntimeError: injected", 3: 5}


def test_a_response_that_can_not_be_packed(model: Scripted) -> None:
    unpackable = number(6)
    unpackable.parameters = {"a": object()}
    model.execute = lambda requests, execution: [number(5), unpackable, number(5)]
    model.submit(1, 3, 5)  # of one gateway
    answers = said(model.published.get(timeout=10))
    assert answers.pop(3).startswith("the response can't be sent: TypeError: ")  # type: ignore[union-attr]
    assert answers == {1: 5, 5: 5}


def test_a_batch_that_can_not_be_counted_is_answered(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "worker.batch_runner:BatchRunner._record")
    model.submit(1, 2)
    assert said(model.published.get(timeout=10)) == {1: 5, 2: 5}


def test_what_can_not_be_told_of_one_batch_leaves_the_instance_its_thread(
    model: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "worker.model_instance:ModelInstance._tell", lambda _self, batch: batch.done.batch_id == 1)
    model.submit(1)
    model.submit(2)
    untold = model.published.get(timeout=10)
    assert untold.done is not None
    assert (untold.done.batch_id, untold.done.outcome) == (1, BatchOutcome.UNANSWERED)
    assert said(model.published.get(timeout=10)) == {2: 5}


def test_a_batch_whose_failure_can_not_be_told_is_done_again(model: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "worker.model_instance:ModelInstance._failure")
    monkeypatch.setattr(model.instance._runner, "begin", lambda *_: 1 / 0)
    model.submit(1)
    finished = model.published.get(timeout=10)
    assert finished.done is not None
    assert finished.done.outcome == BatchOutcome.UNANSWERED


# Batches whose models answer in pieces


@pytest.fixture
def streaming() -> Iterator[Scripted]:
    scripted = Scripted(CONFIG)
    yield scripted
    scripted.instance.stop()


def test_one_stream_that_can_not_go_on(streaming: Scripted) -> None:
    streaming.submit(1, 2)
    execution = streaming.executions.get()
    assert streaming.left()[0] == BatchOutcome.RELEASED
    unpackable = number(6)
    unpackable.parameters = {"a": object()}
    execution.respond(0, unpackable, False)
    outcome, ((key, text, is_final),), _ = streaming.left()
    assert (outcome, key, is_final) == (None, 1, True)
    assert text.startswith("the response can't be sent: TypeError: ")
    execution.respond(1, number(7), True)
    assert streaming.left() == (BatchOutcome.ANSWERED, [(2, 7, True)], ["ack"])


@pytest.mark.parametrize("method", ["_moments", "_count_end", "_count_execution", "_count_stream_response"])
def test_streams_end_whatever_counting_them_does(
    streaming: Scripted, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fail_for(monkeypatch, f"worker.batch_execution:BatchExecution.{method}")
    streaming.submit(1)
    execution = streaming.executions.get()
    streaming.left()
    execution.respond(0, number(7), True)
    assert streaming.left() == (BatchOutcome.ANSWERED, [(1, 7, True)], ["ack"])


# The worker's shell


class FakeInstance:
    """Takes batches, and slots that are given back."""

    def __init__(self) -> None:
        self.submitted: list[RunningBatch] = []
        self.released: list[int] = []
        self.arena_name = "arena"

    def submit(self, batch: RunningBatch) -> None:
        self.submitted.append(batch)

    def release(self, _segment: str, slot: int, _generation: int) -> None:
        self.released.append(slot)


class ReconnectingBus(CollectingBus):
    def on_reconnect(self, _listener: object) -> None:
        pass


class Shell:
    """A worker's shell with one instance, and what it publishes."""

    def __init__(self) -> None:
        self.bus = ReconnectingBus()
        self.published: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        publisher = SimpleNamespace(publish=self.publish)
        self.service = WorkerService(self.bus, publisher, "w")  # type: ignore[arg-type]
        self.instance = FakeInstance()
        served = SimpleNamespace(
            instances=[self.instance],
            instance=lambda _number: self.instance,
            runs_alone=False,
            statistics=SimpleNamespace(snapshot=lambda: {"execution_count": 1}),
        )
        self.service.models["m"] = SimpleNamespace(served={1: served, 2: served}, config=None)  # type: ignore[assignment]
        self.service._arenas["arena"] = self.instance  # type: ignore[assignment]

    def publish(self, messages: list[tuple[str, bytes]], on_sent: Callable[[], None]) -> None:
        for message in messages:
            self.published.put(message)
        on_sent()

    def send(self, batch_id: int) -> None:
        entries = [BatchEntry("gateway", batch_id, 0, b"")]
        message = pack_batch(BatchMessage("s", batch_id, "m", 1, 0, entries, []))
        self.service._on_batch(SimpleNamespace(data=message))  # type: ignore[arg-type]

    def done(self) -> tuple[int, int]:
        """The next batch that ended, and how."""
        _, _, ((batch_id, outcome, *_),) = msgpack.unpackb(self.published.get_nowait()[1])
        return batch_id, outcome


@pytest.fixture
async def shell() -> Shell:
    return Shell()


async def test_a_batch_that_can_not_be_handed_on_is_done_again(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "worker.service:WorkerService._run", lambda _self, batch, *_: batch.batch_id == 1)
    shell.send(1)
    shell.send(2)
    assert shell.done() == (1, BatchOutcome.UNANSWERED)
    assert [batch.message.batch_id for batch in shell.instance.submitted] == [2]
    assert list(shell.service._held) == [("s", 2)]


async def test_a_batch_whose_answers_can_not_be_published_is_done_again(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "worker.service:WorkerService._publish")
    shell.send(1)
    done = SimpleNamespace(batch_id=1, outcome=BatchOutcome.ANSWERED, busy_us=3)
    shell.service.finished(FinishedBatch("s", done, []))  # type: ignore[arg-type]
    assert shell.done() == (1, BatchOutcome.UNANSWERED)
    assert not shell.service._held


async def test_others_are_cancelled_and_given_back(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.send(1)
    shell.send(2)
    first, second = shell.instance.submitted
    fail_for(monkeypatch, "worker.service:WorkerService._cancel", lambda _self, running, *_: running is first)
    message = pack_abandoned("s", [(1, "gateway", [1]), (2, "gateway", [2])])
    shell.service._on_abandoned(SimpleNamespace(data=message))  # type: ignore[arg-type]
    assert (first.cancelled, second.cancelled) == (frozenset(), {0})
    fail_for(monkeypatch, "worker.service:WorkerService._release", lambda _self, _segment, slot, _generation: slot == 1)
    slots = pack_release([("weir-arena.0", 1, 1), ("weir-arena.0", 2, 1)])
    shell.service._on_release(SimpleNamespace(data=slots))  # type: ignore[arg-type]
    assert shell.instance.released == [2]


async def test_counters_of_the_other_versions_are_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "worker.service:WorkerService._counted", lambda _self, _name, number, _served: number == 1)
    assert [row["version"] for row in shell.service.statistics()] == [2]


async def test_heartbeats_go_on(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.service.HEARTBEAT_INTERVAL_S", 0.0)
    calls: list[int] = []
    fail_for(monkeypatch, "worker.service:WorkerService._send_heartbeat", lambda *_: calls.append(1) or True)
    beating = asyncio.create_task(shell.service._beat())
    while len(calls) < 3:
        await asyncio.sleep(0)
    beating.cancel()


# Operations on models


async def test_an_operation_that_fails_does_not_end_the_worker() -> None:
    tasks = ControlTasks()

    async def fail() -> None:
        raise RuntimeError("injected")

    async with asyncio.TaskGroup() as background:
        tasks.start(background)
        await asyncio.gather(tasks.operate(fail()), tasks.end(fail()))


# What models ask of others


def test_one_call_that_can_not_be_made(asked: AskedModels, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(
        monkeypatch, "worker.backends.python_calls:PythonConnection._ask_model", lambda _self, number, *_: number == 1
    )
    asked.react = lambda question: answer(question, outputs())
    peer.call(1)
    kind, call, (code, text), is_final = peer.channel.receive()
    assert (kind, call, code, is_final) == (Kind.ANSWER, 1, ErrorCode.INTERNAL.number, True)
    assert text.endswith("internal error of the worker: RuntimeError: injected")
    peer.call(2)
    assert peer.channel.receive() == (Kind.ANSWER, 2, ((), None), True)


def test_one_response_that_can_not_be_told(asked: AskedModels, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(
        monkeypatch, "worker.backends.python_calls:PythonConnection._answered", lambda _self, number, *_: number == 1
    )
    asked.react = lambda question: answer(question, outputs())
    peer.call(1)
    peer.call(2)
    kind, call, (code, _), is_final = peer.channel.receive()
    assert (kind, call, code, is_final) == (Kind.ANSWER, 1, ErrorCode.INTERNAL.number, True)
    assert peer.channel.receive() == (Kind.ANSWER, 2, ((), None), True)


def test_an_operation_on_the_repository_that_fails(asked: AskedModels, peer: Peer) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("injected")

    peer.connection._operations.load = fail
    peer.channel.send(Kind.LOAD, 1, "m", None, {})
    kind, call, text = peer.channel.receive()
    assert (kind, call) == (Kind.FAILED, 1)
    assert text.endswith("internal error of the worker: RuntimeError: injected")


# Ensembles


@pytest.mark.parametrize("method", ["begin", "responded", "ended"])
async def test_a_request_of_an_ensemble_that_fails(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fail_for(monkeypatch, f"worker.ensembles.instance:_OpenRequest.{method}")
    coordinator.submit(1)
    if coordinator.calls.asked:
        coordinator.calls.answer(b"1234")
    await asyncio.sleep(0)  # what is answered in one turn of the loop leaves at its end
    (finished,) = coordinator.published
    assert finished.done is not None
    assert finished.done.outcome == BatchOutcome.ANSWERED
    ((_, message),) = finished.answers
    (row,) = unpack_answers(message)[1]
    assert row.error is not None
    assert row.error.message.endswith("RuntimeError: injected")
