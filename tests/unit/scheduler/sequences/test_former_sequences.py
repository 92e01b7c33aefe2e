"""Requests of sequences that a former owner of the queue had: they are told from those that were never started."""

from __future__ import annotations

import pytest

from scheduler.batching.request import QueuedRequest, requests_of
from scheduler.model_scheduler import ModelScheduler
from scheduler.sequences.scheduler import TAKEOVER_US
from schemas.config.model_config import ModelConfig
from schemas.core.errors import ErrorCode, Reason, WeirError
from schemas.core.requests import SEQUENCE_START
from schemas.wire.messages import RequestEnvelope, StartedSequence
from tests.support.scheduling.requests import CountingFrame

IDLE_US = 1_000_000
CONFIG = ModelConfig.model_validate(
    {"name": "m", "max_batch_size": 4, "sequence_batching": {"max_sequence_idle_microseconds": IDLE_US}}
)
TAKEN_OVER_US = 5_000_000
LOST = "the state of sequence {} of model 'm' was lost with the scheduler that had it: start the sequence again"
NOT_STARTED = (
    "inference request for sequence {} to model 'm' must specify the START flag on the first request of the sequence"
)


class Successor:
    """The policy of a queue that had another owner, whose sequences are `former`."""

    def __init__(self, *former: StartedSequence, is_complete: bool = True) -> None:
        self.policy = ModelScheduler("m")
        self.policy.take_over(TAKEN_OVER_US, former, int(is_complete))
        self.policy.configure(1, CONFIG)
        self.policy.set_instances("worker", {1: 1})
        self._key = 0

    def refusal(self, sequence: int | str, flags: int = 0, after_us: int = 1) -> WeirError | None:
        """Why a request of the sequence is rejected that comes so long after the takeover."""
        self._key += 1
        envelope = RequestEnvelope(self._key, 1, 1, "", 0, 0, 0, sequence, flags, "", b"")
        requests = requests_of("gateway", [envelope], TAKEN_OVER_US + after_us, CountingFrame(1), lambda ms: ms)
        failures = self.policy.enqueue(requests)
        assert all(isinstance(failure.request, QueuedRequest) for failure in failures)
        return failures[0].error if failures else None


def told(error: WeirError | None) -> tuple[ErrorCode, Reason, str]:
    assert error is not None
    return error.code, error.reason, error.message


@pytest.mark.parametrize("id", [7, "seven"])
def test_a_sequence_of_the_former_owner_is_lost_until_it_is_started_again(id: int | str) -> None:
    successor = Successor(StartedSequence(1, id, 0), StartedSequence(2, 8, 0))
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
    (failure,) = policy.enqueue(requests_of("gateway", [envelope], 1, CountingFrame(1), lambda ms: ms))
    assert failure.error.message == NOT_STARTED.format(5)
