"""The messages between schedulers and workers, and the record of who owns a queue.

The requests of one batch share a *batch message*, and the batches that are sent to one worker at once share a message
(scheduler -> `work.<worker>`). A *completions message* reports the end of batches (worker -> `done.<scheduler>`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.calls import MAX_REJECTED, LaneNumber
from weir.schemas.wire.codec import MalformedMessage, Message, NonNegative, OnMalformed, SubjectToken, decode_rows

MAX_EPOCH = 10**15
"""Milliseconds of 30,000 years. nats-server accepts 16 characters as the name of a group, and an epoch is such a name."""

MAX_GRANT_MS = 10_000
"""For how long a scheduler may let a worker run its own requests itself."""

_SequenceFlags = Annotated[int, Meta(ge=0, le=SEQUENCE_START | SEQUENCE_END)]
_Epoch = Annotated[int, Meta(ge=0, lt=MAX_EPOCH)]
_QueuedUs = Annotated[int, Meta(ge=0, lt=1 << 40)]  # twelve days: sums of it stay far within 64 bits

NO_REPLY = ""
"""Replaces the gateway of a batch entry whose response is dropped.

An entry without a `position` is padding, a copy of another entry's request that fills the batch. An entry with one is a
request that had its response before and runs again, to restore the state of its sequence.
"""


class SequencePosition(NamedTuple):
    """Where a request is in its sequence, and in which `slot` of its instance the state of the sequence is kept.

    `number` requests of the sequence ran before it. With `restore`, the state is not in the slot, but in the checkpoint
    taken after that many requests. `run` numbers the sequences of one scheduler, so that a sequence that starts again under
    the same correlation id is another one. `flags` are the START and END flags with which the request runs, whatever its
    body says: a request that is rescheduled has neither.
    """

    slot: NonNegative
    number: NonNegative
    restore: bool
    run: NonNegative = 0
    flags: _SequenceFlags = 0


class BatchEntry(NamedTuple):
    """One request of a batch: which gateway receives the response (`NO_REPLY`: none), how long it has queued, and its body.

    The response is dropped after `deadline_ms` (unix time, 0 for none). `position` is set for requests of sequences. `lane`
    is a `Lane`: ensembles send the requests of their steps in the same lane.
    """

    gateway: Annotated[str, Meta(pattern=r"^[!-)+-=?-~]*\Z")]
    key: int
    queued_us: _QueuedUs
    body: bytes
    deadline_ms: NonNegative = 0
    position: SequencePosition | None = None
    lane: LaneNumber = 0


class DirectGrant(NamedTuple):
    """For how long a worker may run requests of its own itself, and how long one is expected to take."""

    duration_ms: Annotated[int, Meta(ge=1, le=MAX_GRANT_MS)]
    request_us: _QueuedUs


class CheckpointName(NamedTuple):
    """Under which name the state of a sequence is checkpointed: that of the run in which it started.

    `run` is the one of its `SequencePosition`. `origin_scheduler` and `origin_run` are the scheduler and the run with which
    it started, which are others once the sequence continues at another scheduler. `id` is its correlation id.
    """

    run: NonNegative
    origin_scheduler: SubjectToken
    origin_run: NonNegative
    id: int | str


class BatchMessage(Message, frozen=True):
    """One batch for one instance of one worker.

    The requests come from queue `partition` of the model, which the scheduler owns since `epoch`. With a `grant` the
    worker may run further requests of its own for this version itself, on instances that run nothing. `checkpoints` are the
    names of the sequences whose states are checkpointed. `sent_ns` is when the batch was sent (unix time), 0 where no
    process observes batches.
    """

    scheduler: SubjectToken
    batch_id: NonNegative
    model: str
    version: int
    instance: int
    entries: list[BatchEntry]
    epoch: _Epoch = 0
    partition: _Epoch = 0
    grant: DirectGrant | None = None
    checkpoints: list[CheckpointName] = []  # noqa: RUF012 - msgspec copies an empty default
    sent_ns: NonNegative = 0


class Batches(Message, frozen=True):
    """Batches for the instances of one worker, each of which runs and ends by itself."""

    batches: list[BatchMessage]


class NotRunReason(IntEnum):
    """Why a batch returns to the queue unchanged."""

    CALLING = 0
    """The instance waits for responses of other models, perhaps for one to a request of this batch."""
    SLOW = 1
    """A batch before this one is slow, and other instances may be free sooner."""
    DOWN = 2
    """The instance has no process, or its device is lost."""
    GONE = 3
    """The version was reloaded without this instance, or runs each request alone now."""


class BatchEnded(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Every request has its last response, except those at the positions in `rescheduled`, which run again.

    Those are requests of iterative sequences. The batch kept its instance busy for `busy_us`.
    """

    batch_id: int
    busy_us: int = 0
    rescheduled: Sequence[int] = ()


class BatchReleased(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The instance is free for the next batch. Responses of this batch follow, and another completion."""

    batch_id: int
    busy_us: int = 0


class BatchNotRun(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The batch has not started, and returns to the queue unchanged."""

    batch_id: int
    reason: NotRunReason


class BatchLost(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """No request has a response, because the instance is gone: the batch must run again."""

    batch_id: int
    busy_us: int = 0


class BatchRefused(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """The queue has a later owner, since `epoch`, and the batch has not started."""

    batch_id: int
    epoch: _Epoch


BatchCompletion = BatchEnded | BatchReleased | BatchNotRun | BatchLost | BatchRefused
"""How a batch ended, or, where it is BatchReleased, why its instance is free before the end."""


class DirectRuns(NamedTuple):
    """Batches of its own requests that a worker has run itself, by the grant of the scheduler that owns the model's queue.

    `sizes` are (requests in a batch, number of such batches). They kept instances busy for `busy_us`.
    """

    model: str
    version: int
    sizes: list[tuple[Annotated[int, Meta(ge=1, le=MAX_REJECTED)], Annotated[int, Meta(ge=1, le=MAX_REJECTED)]]]
    busy_us: _QueuedUs


class _RawCompletions(Message, frozen=True):
    worker: str
    batches: list[msgspec.Raw]


class Completions(Message, frozen=True):
    """The batches of one worker that have ended."""

    worker: str
    batches: Sequence[BatchCompletion]


class DirectRunReport(Completions, frozen=True):
    """Completions with a report of batches that the worker has run without the scheduler, on the same subject."""

    direct_runs: Sequence[DirectRuns] = ()


def unpack_completions(
    data: bytes, on_malformed: OnMalformed | None = None
) -> tuple[Sequence[BatchCompletion], Sequence[DirectRuns]]:
    """The completions and the direct runs in a message. Raises MalformedMessage.

    With `on_malformed`, a completion that cannot be decoded is passed to it and left out, since the message reports batches
    of many models; without it, it raises.
    """
    try:
        message = DirectRunReport.unpack(data)
        return message.batches, message.direct_runs
    except MalformedMessage:
        if on_malformed is None:
            raise
    return decode_rows(_RawCompletions.unpack(data).batches, BatchCompletion, "completion", on_malformed), ()


class CancelledRequests(NamedTuple):
    """Cancelled requests of one batch that came from one gateway."""

    batch_id: int
    gateway: str
    keys: list[int]


class RunningCancellation(Message, frozen=True):
    """Cancelled requests in batches that the worker has received from `scheduler`."""

    scheduler: str
    batches: list[CancelledRequests]


class SequenceQuery(Message, frozen=True):
    """A query for the sequences of a model that a worker has started, from the next owner of its queue `partition`."""

    model: str
    partition: _Epoch = 0


class StartedSequence(NamedTuple):
    """A sequence of a version that has started and not ended: its last request ended `age_us` ago, as its `number`th.

    That was request `key` of `gateway`.
    """

    version: int
    id: int | str
    age_us: NonNegative
    number: NonNegative = 0
    gateway: str = ""
    key: int = 0


class SequenceReport(Message, frozen=True):
    """The reply of `worker`: sequences that have started and not ended.

    Others may run that are not among them unless it `is_complete`.
    """

    worker: str
    sequences: list[StartedSequence]
    is_complete: bool


class QueueOwner(Message, frozen=True):
    """The record of who owns queue `partition` of `model`, and the announcement of it. `owner` "": no scheduler does.

    Epochs of a queue only grow. A process that has seen one rejects messages from owners of lower ones.
    """

    model: str
    partition: NonNegative
    owner: Annotated[str, Meta(max_length=256, pattern=r"^[A-Za-z0-9_=-]*\Z")]
    epoch: _Epoch
