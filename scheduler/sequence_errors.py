"""What requests of sequences end with that can't be run: the texts, of which some are Triton's."""

from __future__ import annotations

from scheduler.queued_request import QueuedRequest
from scheduler.sequence import Sequence as StatefulSequence
from scheduler.version_scheduler import TIMEOUT_EXPIRED
from schemas.errors import ErrorCode, Reason, WeirError, invalid, overloaded, unavailable

_MAY_BE_LOST = "; if it has begun, its state was lost with the scheduler that had it: start the sequence again"


def not_started(request: QueuedRequest, model: str, is_heir: bool) -> WeirError:
    """No sequence of this id has begun; with `is_heir`, as far as this owner of the queue knows."""
    return invalid(
        f"inference request for sequence {_name(request)} to model '{model}' must specify the START "
        "flag on the first request of the sequence" + (_MAY_BE_LOST if is_heir else "")
    )


def state_lost(request: QueuedRequest, model: str) -> WeirError:
    """The sequence has gone with its instance."""
    return unavailable(
        f"the state of sequence {_name(request)} of model '{model}' was lost with its instance: start the sequence again",
        Reason.SEQUENCE_LOST,
    )


def answer_lost(request: QueuedRequest, model: str) -> WeirError:
    """The request has run, and is not run again."""
    return unavailable(
        f"the answer to a request of sequence {_name(request)} of model '{model}' was lost with the broker: "
        "the request has run",
        Reason.NOT_REPEATABLE,
    )


def cancelled_earlier(sequence: StatefulSequence) -> WeirError:
    """An earlier request of the sequence was."""
    return WeirError(ErrorCode.CANCELLED, f"the sequence {_name(sequence)} was cancelled by an earlier request")


def lateness(request: QueuedRequest, sequence: StatefulSequence, late: QueuedRequest | None, now_us: int) -> WeirError:
    """What a request of the sequence ends with, which ends since one of them, or the sequence (None), was late."""
    if late is None:
        return unavailable("timeout of the corresponding sequence has been expired", Reason.SEQUENCE_LOST)
    if 0 < request.terms.deadline_us <= now_us:
        return overloaded(TIMEOUT_EXPIRED, reason=Reason.TIMED_OUT)
    return unavailable(
        f"the sequence {_name(sequence)} has ended: the timeout of another of its requests expired",
        Reason.SEQUENCE_LOST,
    )


def _name(of: QueuedRequest | StatefulSequence) -> int | str:
    """The id as a caller may read it: that of an iterative sequence was not given by one."""
    id = of.correlation_id if isinstance(of, QueuedRequest) else of.id
    return abs(id) if isinstance(id, int) else id
