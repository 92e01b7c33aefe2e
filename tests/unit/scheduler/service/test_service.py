"""The shell with the bytes of real messages: its responses to valid ones, and that malformed ones have no effect."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.collecting_bus import CollectingBus
from tests.support.scheduling.completions import (
    Outcome,
    completion,
)
from tests.support.scheduling.requests import BODY, part
from weir.bus.kv.registry import WorkerView
from weir.bus.links.link import LinkEnd
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.service.former_sequences import SequenceReports
from weir.scheduler.service.messages import GRANT_MS
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.scheduler.service.service import SchedulerService
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.wire.batches import (
    BatchEnded,
    Batches,
    BatchMessage,
    CancelledRequests,
    Completions,
    DirectRunReport,
    DirectRuns,
    RunningCancellation,
)
from weir.schemas.wire.calls import Cancellation, Frame, unpack_responses
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord

INBOX, DONE, CANCEL, WORK = "inbox.scheduler.model", "done.scheduler", "cancel.model", "work.worker"
CONFIG = {
    "name": "model",
    "max_batch_size": 4,
    "dynamic_batching": {"default_queue_policy": {"max_queue_size": 6}},
}

PLAIN = {"name": "model", "max_batch_size": 4, "dynamic_batching": {}}


class Served:
    """A scheduler that owns one model, with one instance on one worker."""

    def __init__(self, bus: CollectingBus, service: SchedulerService, owned: OwnedQueue) -> None:
        self.bus = bus
        self.service = service
        self.owned = owned

    @property
    def unanswered(self) -> int:
        """Requests that were accepted and have not ended."""
        return sum(len(owned.scheduler) for owned in self.service.queues.by_name.values())

    def frame(self, *keys: int, ack: str = "$JS.ACK.1", version: int = -1) -> None:
        self.bus.deliver(INBOX, Frame("gateway", [part(key, version) for key in keys]).pack(), ack)

    def done(self, batch_id: int, outcome: int = Outcome.ANSWERED) -> None:
        self.bus.deliver(DONE, Completions("worker", [completion(batch_id, outcome, 10)]).pack())

    def batches(self) -> list[BatchMessage]:
        return [batch for data in self.bus.taken("work.") for batch in Batches.unpack(data).batches]

    def acks(self) -> list[str]:
        self.service.queues.acks.flush()
        return [subject for subject, data, _ in self.bus.published if data == b"+ACK"]


async def serve(config: dict[str, Any] = CONFIG) -> Served:
    bus = CollectingBus()
    service = SchedulerService(bus, "scheduler", None)
    await service.listen()
    owned = await service.serve(LiveQueue("model"), "live-model")
    owned.scheduler.configure(1, ModelConfig.model_validate(config))
    owned.scheduler.set_instances("worker", {1: 1})
    bus.published.clear()
    return Served(bus, service, owned)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await serve()
    yield served
    served.owned.timer.close()


def test_the_requests_of_a_frame_leave_as_one_batch_which_ends_the_frame(served: Served):
    served.frame(1, 2, ack="$JS.ACK.1")
    assert served.bus.published[0][::2] == (WORK, "lost.scheduler.worker")
    (batch,) = served.batches()
    assert (batch.scheduler, batch.model, batch.version, batch.instance) == ("scheduler", "model", 1, 0)
    assert [(entry.gateway, entry.key, entry.body) for entry in batch.entries] == [
        ("gateway", 1, BODY),
        ("gateway", 2, BODY),
    ]
    assert served.acks() == []
    served.done(batch.batch_id)
    assert served.unanswered == 0
    assert served.acks() == ["$JS.ACK.1"]


def test_a_frame_that_ends_with_several_batches_is_acknowledged_after_the_last(served: Served):
    served.frame(1, 2, 3, 4, 5, ack="$JS.ACK.1")
    (first,) = served.batches()
    served.done(first.batch_id)
    (second,) = served.batches()
    assert served.acks() == []
    served.done(second.batch_id)
    assert served.unanswered == 0
    assert served.acks() == ["$JS.ACK.1"]


def test_the_frame_of_a_batch_that_was_not_run_is_acknowledged_once_it_has(served: Served):
    served.frame(1, ack="$JS.ACK.1")
    (first,) = served.batches()
    served.done(first.batch_id, Outcome.UNANSWERED)
    (second,) = served.batches()
    assert second.entries[0].key == 1
    assert served.acks() == []
    served.done(second.batch_id)
    assert served.acks() == ["$JS.ACK.1"]
    assert served.unanswered == 0


def test_a_worker_that_is_gone_loses_nothing(served: Served):
    served.frame(1)
    (first,) = served.batches()
    served.bus.deliver("lost.scheduler.worker", b"", status="503")
    assert served.batches() == []
    served.owned.scheduler.set_instances("other", {1: 1})
    served.frame(2, ack="$JS.ACK.2")
    (again,) = served.batches()
    assert [entry.key for entry in again.entries] == [1, 2]
    assert served.acks() == []
    served.done(first.batch_id)
    assert served.unanswered == 2


@pytest.mark.parametrize(
    ("config", "had_owner", "asks"),
    [
        (None, True, True),
        (None, False, False),
        (PLAIN, True, False),
        ({**PLAIN, "sequence_batching": {}}, False, True),
    ],
)
async def test_workers_are_asked_for_sequences_of_a_model_that_may_have_them(
    served: Served, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None, had_owner: bool, asks: bool
):
    """A worker that still loads the model has no configuration in its record."""
    view = served.service.registry.workers["worker"] = WorkerView("worker", 0.0)
    view.models["model"] = ModelRecord("model", {1: VersionRecord(ModelState.LOADING)}, config)

    async def ask(*_arguments: object) -> SequenceReports:
        return SequenceReports([], True)

    monkeypatch.setattr(served.service._survey, "ask", ask)
    found = await served.service.former_sequences(LiveQueue("model"), had_owner)
    assert found == (SequenceReports([], config is not None) if asks else None)


@pytest.mark.parametrize("end", LinkEnd)
def test_only_the_end_of_a_link_that_shows_a_death_loses_batches(served: Served, end: LinkEnd):
    """A worker that still listens goes on with its batches, and with its sequences."""
    served.frame(1)
    (batch,) = served.batches()
    served.bus.links._lost_listeners[0]("worker", end)
    goes_on = end in (LinkEnd.ORDERLY, LinkEnd.CUT)
    assert served.owned.scheduler.in_flight_on("worker") == ([batch.batch_id] if goes_on else [])
    served.done(batch.batch_id)
    assert served.unanswered == (0 if goes_on else 1)


def test_a_frame_delivered_twice_runs_once_and_is_acknowledged_twice(served: Served):
    served.frame(1, ack="$JS.ACK.1")
    served.frame(1, ack="$JS.ACK.2")
    (batch,) = served.batches()
    served.done(batch.batch_id)
    assert served.unanswered == 0
    assert served.acks() == ["$JS.ACK.1", "$JS.ACK.2"]


def test_cancelled_requests_end_their_frame_and_are_not_sent(served: Served):
    served.frame(1, 2, 3, 4)
    served.frame(5, 6, ack="$JS.ACK.2")
    (batch,) = served.batches()
    served.bus.deliver(CANCEL, Cancellation("gateway", [5, 6, 7, 1]).pack())
    assert served.acks() == ["$JS.ACK.2"]
    assert served.unanswered == 4
    served.done(batch.batch_id)
    assert served.batches() == []
    assert served.unanswered == 0


def test_workers_receive_cancellations_of_running_requests(served: Served):
    served.frame(1, 2, 3, 4)
    served.frame(5, 6, ack="$JS.ACK.2")
    (batch,) = served.batches()
    served.bus.deliver(CANCEL, Cancellation("gateway", [5, 3, 1]).pack())
    (reported,) = served.bus.taken("abandoned.worker")
    cancelled = CancelledRequests(batch.batch_id, "gateway", [1, 3])
    assert RunningCancellation.unpack(reported) == RunningCancellation("scheduler", [cancelled])
    served.bus.deliver(CANCEL, Cancellation("gateway", [6, 99]).pack())
    assert served.bus.taken("abandoned.worker") == []
    assert served.owned.scheduler.versions()[1].failures == {"REJECTED": 0, "CANCELED": 2}
    served.done(batch.batch_id)


async def test_an_instance_that_is_free_before_its_batch_ends_is_used():
    served = await serve({"name": "model", "max_batch_size": 4, "dynamic_batching": {}})
    served.frame(1, 2, 3, 4)
    served.frame(5, 6, 7, 8, ack="$JS.ACK.2")
    first, _ = served.batches()
    served.frame(9, 10, 11, 12, ack="$JS.ACK.3")
    assert served.batches() == []
    served.done(first.batch_id, Outcome.RELEASED)
    (third,) = served.batches()
    assert served.unanswered == 12
    served.done(third.batch_id)
    served.done(first.batch_id)
    assert served.unanswered == 4
    served.owned.timer.close()


def test_rejections_by_a_full_queue_are_answered_in_one_message(served: Served):
    served.frame(*range(1, 11))
    (answers,) = served.bus.taken("reply.gateway")
    version, refused = unpack_responses(answers)
    assert version == 0
    assert [answer.key for answer in refused] == [7, 8, 9, 10]
    assert {(answer.error.code, answer.error.message) for answer in refused} == {
        (ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")
    }
    assert served.unanswered == 6


def test_an_unknown_version_is_rejected(served: Served):
    served.frame(1, version=9, ack="$JS.ACK.1")
    (answers,) = served.bus.taken("reply.gateway")
    assert unpack_responses(answers)[1][0].error.code is ErrorCode.NOT_FOUND
    assert served.acks() == ["$JS.ACK.1"]


def test_an_empty_frame_is_acknowledged(served: Served):
    served.bus.deliver(INBOX, Frame("gateway", []).pack(), "$JS.ACK.1")
    assert served.acks() == ["$JS.ACK.1"]


def test_a_malformed_frame_is_never_redelivered(served: Served):
    served.bus.deliver(INBOX, b"nonsense", "$JS.ACK.1")
    assert served.bus.published == [("$JS.ACK.1", b"+TERM", "")]
    assert served.service.queues.malformed_messages == 1


@pytest.mark.parametrize("gateway", ["", "a b", "a\r\nPUB x 0\r\n", "*", "a.>", "\x7f", "ä", 7, None])
def test_a_gateway_name_that_is_no_subject_token_is_malformed(served: Served, gateway: Any):
    served.bus.deliver(INBOX, Frame(gateway, [part(1)]).pack(), "$JS.ACK.1")
    assert served.bus.published == [("$JS.ACK.1", b"+TERM", "")]


def test_a_message_to_the_inbox_that_is_not_from_the_stream_is_left_unanswered(served: Served):
    served.bus.deliver(INBOX, b"nonsense")
    served.bus.deliver(INBOX, Frame("gateway", [part(1)]).pack())
    assert served.bus.published == []
    assert served.unanswered == 0


def unloading(served: Served, state: ModelState) -> None:
    """The worker reports its version in this state."""
    view = WorkerView("worker", 0.0)
    view.models["model"] = ModelRecord("model", {1: VersionRecord(state, instances=1)}, CONFIG)
    served.service.registry.workers["worker"] = view
    served.service._on_model_change("model")
    served.bus.turn()


def leave(served: Served) -> list[int]:
    """The versions that the worker may unload."""
    served.bus.deliver("drain.model", DrainMessage.of("worker", "model", [1, 7]).pack(), "drained.worker")
    (answer,) = served.bus.taken("drained.worker")
    return DrainMessage.unpack(answer).versions


def test_a_worker_may_unload_a_version_after_its_last_request(served: Served):
    unloading(served, ModelState.READY)
    served.frame(1, 2)
    served.frame(3, version=1, ack="$JS.ACK.2")
    assert leave(served) == [], "it serves"
    unloading(served, ModelState.UNLOADING)
    assert leave(served) == []
    for _ in range(3):
        for batch in served.batches():
            assert leave(served) == []
            served.done(batch.batch_id)
    assert served.unanswered == 0
    assert leave(served) == [1]
    served.frame(4, ack="$JS.ACK.4")
    assert served.batches() == []
    (answers,) = served.bus.taken("reply.gateway")
    assert (
        unpack_responses(answers)[1][0].error.message == "Request for unknown model: 'model' has no available versions"
    )
    assert served.acks()[-1] == "$JS.ACK.4"
    assert leave(served) == [1]
    unloading(served, ModelState.READY)
    served.frame(5)
    assert len(served.batches()) == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", DrainMessage.of("stranger", "model", [1]).pack(), DrainMessage.of("worker", "x", [1]).pack()],
)
def test_a_malformed_drain_request_gets_no_reply(served: Served, data: bytes):
    unloading(served, ModelState.UNLOADING)
    served.bus.deliver("drain.model", data, "drained.worker")
    served.bus.deliver("drain.model", DrainMessage.of("worker", "model", [1]).pack(), "somewhere.else")
    assert served.bus.taken("drained.worker") == served.bus.taken("somewhere") == []


def strange(draw: random.Random, message: bytes) -> bytes:
    """The message cut, with bytes changed, or with a value of a wrong type."""
    kind = draw.randrange(3)
    if kind == 0:
        return message[: draw.randrange(len(message) + 1)]
    if kind == 1:
        position = draw.randrange(len(message))
        return message[:position] + draw.randbytes(2) + message[position + 2 :]
    tree = msgpack.unpackb(message)
    branch = tree
    while True:
        index = draw.randrange(len(branch))
        if not isinstance(branch[index], list) or not branch[index] or draw.random() < 0.2:
            break
        branch = branch[index]
    branch[index] = draw.choice([None, True, -1, 2**63, 1.5, "", "x", "\r\n", b"x", [], [[]], {}, {"a": 1}])
    return msgpack.packb(tree)


garbage = st.one_of(st.binary(max_size=40), st.integers(0, 2**32), st.integers(0, 2**32), st.integers(0, 2**32))


@given(st.lists(st.tuples(st.sampled_from([INBOX, DONE, CANCEL]), garbage), max_size=30))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
async def test_malformed_messages_do_not_affect_valid_requests(messages: list[tuple[str, bytes | int]]):
    served = await serve()
    good = {
        INBOX: Frame("somebody", [part(8), part(9)]).pack(),
        DONE: Completions("worker", [BatchEnded(10_000, 5), BatchEnded(10_001, 5)]).pack(),
        CANCEL: Cancellation("somebody", [8, 9]).pack(),
    }
    for subject, what in messages:
        data = what if isinstance(what, bytes) else strange(random.Random(what), good[subject])
        served.bus.deliver(subject, data, "$JS.ACK.garbage")
    served.frame(1, 2, ack="$JS.ACK.good")
    seen: list[int] = []
    while batches := served.batches():
        for batch in batches:
            seen += [entry.key for entry in batch.entries if entry.gateway == "gateway"]
            served.done(batch.batch_id)
    assert seen == [1, 2]
    assert served.unanswered == 0
    served.owned.timer.close()


TIMED = {
    "name": "model",
    "max_batch_size": 4,
    "dynamic_batching": {"default_queue_policy": {"default_timeout_microseconds": 20_000}},
}


async def test_a_timeout_is_answered_once_without_other_events():
    served = await serve(TIMED)
    served.frame(1)
    (busy,) = served.batches()
    began_s = time.monotonic()
    served.frame(2, 3, ack="$JS.ACK.2")
    assert served.batches() == []
    while not (answers := served.bus.taken("reply.gateway")):
        await asyncio.sleep(0.001)
        served.bus.turn()
    assert time.monotonic() - began_s > 0.015
    (message,) = answers
    assert [(a.key, a.error.code, a.error.message) for a in unpack_responses(message)[1]] == [
        (key, ErrorCode.UNAVAILABLE, "Request timeout expired") for key in (2, 3)
    ]
    assert served.acks() == ["$JS.ACK.2"]
    assert served.owned.scheduler.versions()[1].failures == {"REJECTED": 2, "CANCELED": 0}
    served.done(busy.batch_id)
    assert served.batches() == []
    assert served.unanswered == 0
    served.owned.timer.close()


async def test_a_deadline_applies_in_the_queue_and_is_sent_to_the_worker(served: Served):
    deadline_ms = time.time_ns() // 1_000_000 + 60_000
    parts = [part(1, deadline_ms=deadline_ms), part(2), part(3, deadline_ms=2**64 - 1), part(4, deadline_ms=1)]
    served.bus.deliver(INBOX, Frame("gateway", parts).pack(), "$JS.ACK.1")
    (late,) = served.bus.taken("reply.gateway")
    assert [(a.key, a.error.message) for a in unpack_responses(late)[1]] == [(4, "Request timeout expired")]
    (batch,) = served.batches()
    assert [(entry.key, entry.deadline_ms) for entry in batch.entries] == [(1, deadline_ms), (2, 0), (3, 2**64 - 1)]
    served.done(batch.batch_id)
    assert served.unanswered == 0


async def test_requests_with_little_time_go_ahead(served: Served):
    served.frame(1)
    (busy,) = served.batches()
    deadline_ms = time.time_ns() // 1_000_000 + 900
    served.frame(2, 3, 4, ack="$JS.ACK.2")
    hasty = [part(5, deadline_ms=deadline_ms), part(6, deadline_ms=deadline_ms - 1)]
    served.bus.deliver(INBOX, Frame("gateway", hasty).pack(), "$JS.ACK.3")
    served.done(busy.batch_id)
    (first,) = served.batches()
    assert [entry.key for entry in first.entries] == [6, 5, 2, 3]
    served.done(first.batch_id)
    (second,) = served.batches()
    assert [entry.key for entry in second.entries] == [4]
    served.done(second.batch_id)
    assert served.unanswered == 0


# Requests that a worker runs itself


def send_own(served: Served, *keys: int) -> BatchMessage:
    """The batch of requests that the worker itself sends, once the cost of the model is known."""
    served.frame(900)
    (first,) = served.batches()
    served.done(first.batch_id)
    served.bus.deliver(INBOX, Frame("worker", [part(key) for key in keys]).pack(), "$JS.ACK.2")
    (batch,) = served.batches()
    return batch


async def test_a_worker_with_a_request_of_its_own_may_run_more_of_them():
    served = await serve(PLAIN)
    own = send_own(served, 1, 2)
    assert own.grant == (GRANT_MS, 10)
    served.done(own.batch_id)
    served.frame(3)
    assert [batch.grant for batch in served.batches()] == [None], "the request of a gateway grants nothing"


async def test_a_model_with_a_queue_policy_grants_nothing(served: Served):
    assert send_own(served, 1).grant is None


async def test_a_version_that_is_unloaded_grants_nothing():
    served = await serve(PLAIN)
    served.owned.scheduler.set_lifecycle(frozenset({1}), frozenset(), False)
    assert send_own(served, 1).grant is None


async def test_requests_that_a_worker_ran_itself_are_counted():
    served = await serve(PLAIN)
    before = served.owned.counters.batch_requests.snapshot()
    runs = [DirectRuns("model", 1, [(2, 3), (1, 1)], 70), DirectRuns("unknown", 1, [(1, 1)], 5)]
    served.bus.deliver(DONE, DirectRunReport("worker", [], runs).pack())
    assert served.owned.counters.batch_requests.snapshot()["sum"] - before["sum"] == 7
    assert served.owned.signals.arrived == 7
    version = served.owned.scheduler.versions()[1]
    assert (version.cost.served, version.cost.busy_us) == (7, 70)
