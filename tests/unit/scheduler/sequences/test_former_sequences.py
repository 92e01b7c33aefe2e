"""Requests of sequences that a former owner of the queue had: they are told from those that were never started."""

from __future__ import annotations

import pytest

from tests.support.scheduling.requests import CountingFrame
from weir.scheduler.batching.request import QueuedRequest, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.sequences.scheduler import TAKEOVER_US, FoundSequence, SoughtSequence
from weir.scheduler.sequences.sequence import MAX_REPLAY_BYTES, replay_of
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, Reason, WeirError
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import NO_REPLY, BatchEnded, SequencePosition, StartedSequence
from weir.schemas.wire.calls import RequestEnvelope

IDLE_US = 1_000_000
CONFIG = ModelConfig.model_validate(
    {"name": "m", "max_batch_size": 4, "sequence_batching": {"max_sequence_idle_microseconds": IDLE_US}}
)
TAKEN_OVER_US = 5_000_000


def checkpointed(every: int) -> ModelConfig:
    parameters = {"weir_checkpoint_every": {"string_value": str(every)}}
    return ModelConfig.model_validate({**CONFIG.model_dump(exclude_defaults=True), "parameters": parameters})


REPEATED = "the response to a request of sequence 7 of model 'm' was lost with the broker: the request has run"
LOST = "the state of sequence {} of model 'm' was lost with the scheduler that had it: start the sequence again"
NOT_STARTED = (
    "inference request for sequence {} to model 'm' must specify the START flag on the first request of the sequence"
)


class Successor:
    """The policy of a queue that had another owner, whose sequences are `former`."""

    def __init__(self, *former: StartedSequence, is_complete: bool = True, every: int = 0) -> None:
        self.policy = ModelScheduler("m")
        self.policy.take_over(TAKEN_OVER_US, former, is_complete)
        self.policy.configure(1, CONFIG if not every else checkpointed(every))
        self.policy.set_instances("worker", {1: 1})
        self._key = 0

    def refusal(self, sequence: int | str, flags: int = 0, after_us: int = 1, key: int = 0) -> WeirError | None:
        """Why a request of the sequence is rejected that comes so long after the takeover."""
        self._key = key or self._key + 1
        envelope = RequestEnvelope(self._key, 1, 1, "", 0, 0, 0, sequence, flags, "", b"")
        requests = requests_of("gateway", [envelope], TAKEN_OVER_US + after_us, CountingFrame(), lambda ms: ms)
        failures = self.policy.enqueue(requests)
        assert all(isinstance(failure.request, QueuedRequest) for failure in failures)
        return failures[0].error if failures else None

    def found(self, id: int | str, found: FoundSequence | None) -> list[tuple[int, str]]:
        """The requests that fail, with their errors, once it is known what is stored of a sequence."""
        _, failures = self.policy.sequence_found(1, id, found)
        return [(failure.request.key, failure.error.message) for failure in failures]

    def run(self) -> list[tuple[str, int, SequencePosition]]:
        """Runs all batches there are: gateway and key of each request, and its place."""
        ran: list[tuple[str, int, SequencePosition]] = []
        while batches := self.policy.dispatch(TAKEN_OVER_US + 1)[0]:
            for batch in batches:
                ran += [(r.gateway, r.key, place) for r, place in zip(batch.requests, batch.places, strict=True)]
                self.policy.complete(TAKEN_OVER_US + 1, BatchEnded(batch.id, 1))
        return ran


def told(error: WeirError | None) -> tuple[ErrorCode, Reason, str]:
    assert error is not None
    return error.code, error.reason, error.message


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("flags", [0, SEQUENCE_START])
def test_a_request_that_has_run_at_the_former_owner_is_not_taken_for_a_new_one(flags: int, every: int) -> None:
    """It comes again because it shared a frame with one that had not run. A start would silently reset the state."""
    successor = Successor(StartedSequence(1, 7, 0, 3, "gateway", 40), every=every)
    for key in (38, 40):
        assert told(successor.refusal(7, flags, key=key))[1:] == (Reason.NOT_REPEATABLE, REPEATED)
    assert successor.refusal(7, SEQUENCE_START, key=41) is None


@pytest.mark.parametrize("id", [7, "seven"])
def test_a_sequence_of_the_former_owner_is_lost_until_it_is_started_again(id: int | str) -> None:
    successor = Successor(StartedSequence(1, id, 0, 1), StartedSequence(2, 8, 0, 1))
    for after_us in (1, 100 * IDLE_US):
        error = successor.refusal(id, after_us=after_us)
        assert told(error) == (ErrorCode.UNAVAILABLE, Reason.SEQUENCE_LOST, LOST.format(id))
    assert successor.refusal(id, SEQUENCE_START) is None
    assert successor.refusal(id) is None


def test_a_sequence_that_was_never_started_is_told_so() -> None:
    successor = Successor(StartedSequence(1, 7, 0))
    error = successor.refusal(8)
    assert told(error) == (ErrorCode.INVALID_ARG, Reason.NONE, NOT_STARTED.format(8))
    assert error is not None
    assert error.http_status == 400


def test_a_sequence_that_was_idle_for_too_long_before_has_ended() -> None:
    longest_us = IDLE_US + TAKEOVER_US
    successor = Successor(StartedSequence(1, 7, longest_us + 1), StartedSequence(1, 8, longest_us))
    assert told(successor.refusal(7))[2] == NOT_STARTED.format(7)
    assert told(successor.refusal(8))[2] == LOST.format(8)


def test_any_sequence_may_have_been_there_while_reports_are_incomplete() -> None:
    """For as long as one that was there may be idle."""
    successor = Successor(StartedSequence(1, 7, 0), is_complete=False)
    assert told(successor.refusal(9, after_us=IDLE_US))[2] == LOST.format(9)
    assert told(successor.refusal(9, after_us=IDLE_US + 1))[2] == NOT_STARTED.format(9)
    assert told(successor.refusal(7, after_us=IDLE_US + 1))[2] == LOST.format(7)


def test_a_first_owner_knows_all_sequences() -> None:
    policy = ModelScheduler("m")
    policy.configure(1, CONFIG)
    envelope = RequestEnvelope(1, 1, 1, "", 0, 0, 0, 5, 0, "", b"")
    (failure,) = policy.enqueue(requests_of("gateway", [envelope], 1, CountingFrame(), lambda ms: ms))
    assert failure.error.message == NOT_STARTED.format(5)


STARTED = StartedSequence(1, 7, 0, 4)


def stored(checkpoint: int, *bodies: bytes, age_us: int = 0) -> FoundSequence:
    """A sequence of correlation id 7 whose last request was key 40 of gateway `gateway`."""
    requests = [
        replay_of((SEQUENCE_START if checkpoint + at == 0 else 0, body), 1, 7) for at, body in enumerate(bodies)
    ]
    return FoundSequence("former", 99, checkpoint, "gateway", 40, age_us, requests)


def test_a_sequence_continues_from_its_checkpoint_in_order() -> None:
    successor = Successor(STARTED, every=1)
    assert successor.refusal(7, key=41) is None
    assert successor.refusal(7, key=42) is None
    assert successor.policy.take_sought() == [SoughtSequence(1, 7, 1, 4)]
    assert successor.policy.take_sought() == []
    assert successor.run() == [], "its state is not known yet"
    assert successor.found(7, stored(4)) == []
    (first, second) = successor.run()
    assert (first[:2], second[:2]) == (("gateway", 41), ("gateway", 42))
    assert (first[2].number, first[2].restore, second[2].number, second[2].restore) == (4, True, 5, False)
    assert successor.refusal(7, key=43) is None
    assert [place.number for _, _, place in successor.run()] == [6]


def test_requests_since_the_checkpoint_run_again_first() -> None:
    successor = Successor(STARTED, every=3)
    assert successor.refusal(7, key=41) is None
    assert successor.found(7, stored(3, b"fourth", b"fifth")) == []
    ran = successor.run()
    assert [(gateway, place.number, place.restore) for gateway, _, place in ran] == [
        (NO_REPLY, 3, True), (NO_REPLY, 4, False), ("gateway", 5, False),
    ]  # fmt: skip


def test_requests_since_the_start_run_again_without_a_checkpoint() -> None:
    successor = Successor(STARTED, every=3)
    assert successor.refusal(7, key=41) is None
    assert successor.found(7, stored(0, b"first")) == []
    (first, second) = [place for _, _, place in successor.run()]
    assert (first.number, first.restore, first.flags) == (0, False, SEQUENCE_START)
    assert (second.number, second.restore) == (1, False)


def test_a_request_that_has_run_does_not_run_again() -> None:
    """The former owner's worker had run it, and it is delivered again because it was not acknowledged."""
    successor = Successor(STARTED, every=1)
    assert successor.refusal(7, key=40) is None
    assert successor.refusal(7, key=41) is None
    ((key, text),) = successor.found(7, stored(4))
    assert key == 40
    assert text.endswith("the request has run")
    assert [(key, place.number) for _, key, place in successor.run()] == [(41, 4)]


@pytest.mark.parametrize("found", [None, stored(0, bytes(MAX_REPLAY_BYTES + 1))])
def test_a_sequence_of_which_nothing_is_found_is_lost(found: FoundSequence | None) -> None:
    successor = Successor(STARTED, every=3)
    assert successor.refusal(7, key=41) is None
    assert successor.refusal(7, SEQUENCE_START, key=42) is None
    assert successor.refusal(7, key=43) is None
    assert successor.found(7, found) == [(41, LOST.format(7))]
    assert [(key, place.number) for _, key, place in successor.run()] == [(42, 0), (43, 1)]
    assert successor.policy.take_sought()[1:] == []


def test_a_sequence_that_was_not_found_is_not_looked_up_again() -> None:
    successor = Successor(STARTED, every=3)
    assert successor.refusal(7) is None
    assert successor.found(7, None) == [(1, LOST.format(7))]
    assert told(successor.refusal(7))[2] == LOST.format(7)
    assert len(successor.policy.take_sought()) == 1


@pytest.mark.parametrize(("is_complete", "text"), [(True, NOT_STARTED), (False, LOST)])
def test_a_sequence_that_no_worker_reports_is_looked_up_for_a_while(is_complete: bool, text: str) -> None:
    """Its worker may have been lost before, or together with its scheduler."""
    successor = Successor(every=1, is_complete=is_complete)
    assert successor.refusal(7) is None
    assert successor.policy.take_sought() == [SoughtSequence(1, 7, 1, 0)]
    assert successor.found(7, stored(4, age_us=IDLE_US + TAKEOVER_US + 1)) == [(1, text.format(7))]
    assert successor.refusal(8) is None
    assert successor.found(8, None) == [(2, text.format(8))]
    assert told(successor.refusal(9, after_us=IDLE_US + 1))[2] == NOT_STARTED.format(9)


def test_nothing_is_found_of_a_sequence_that_has_ended_meanwhile() -> None:
    successor = Successor(STARTED, every=1)
    assert successor.refusal(7) is None
    _, failures = successor.policy.cancel("gateway", [1])
    assert failures == []
    assert successor.found(7, stored(4)) == []
    assert successor.run() == []
