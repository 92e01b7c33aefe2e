"""The messages of the inference path, between gateways, schedulers and workers.

A request travels as an *envelope*, whose fields a scheduler reads, around a *body* (`weir.schemas.wire.request_body`),
which it passes on without decoding it. The envelopes that a gateway sends to one model in one turn of its event loop
share a *frame* (gateway -> `live.<model>`). The requests of one batch share a *batch message* (scheduler ->
`work.<worker>`). The responses of one batch that go to one gateway share a *responses message* (worker ->
`reply.<gateway>`). A *completions message* reports the end of batches (worker -> `done.<scheduler>`).

All of them are untrusted: whatever decodes one raises `MalformedMessage` for bytes that are not such a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from weir.schemas.core.errors import MAX_BACKOFF_US, MAX_RETRY_AFTER_S, ErrorCode, Reason, WeirError
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, Lane, Parameters
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.codec import (
    WIRE_VERSION,
    MalformedMessage,
    Message,
    NonNegative,
    WireTensor,
    convert,
    decode,
    encode,
)

MAX_REJECTED = 1 << 31
"""Rejected requests that one message may report."""

MAX_REASON_LENGTH = 200
"""Characters of the reason in a message about lost attempts."""

MAX_EPOCH = 10**15
"""Milliseconds of 30,000 years. nats-server accepts 16 characters as the name of a group, and an epoch is such a name."""

MAX_GRANT_MS = 10_000
"""For how long a scheduler may let a worker run its own requests itself."""

SubjectToken = Annotated[str, Meta(pattern=r"^[!-)+-=?-~]+\Z")]
"""Text that may be part of a subject: printable ASCII without `*` and `>`."""

_SequenceFlags = Annotated[int, Meta(ge=0, le=SEQUENCE_START | SEQUENCE_END)]
_Epoch = Annotated[int, Meta(ge=0, lt=MAX_EPOCH)]
_QueuedUs = Annotated[int, Meta(ge=0, lt=1 << 40)]  # twelve days: sums of it stay far within 64 bits
_LaneNumber = Annotated[int, Meta(ge=0, le=max(Lane).value)]


class RequestEnvelope(NamedTuple):
    """One request as a scheduler reads it.

    `key` is unique within the sending gateway. `version` is -1 for the latest. `batch_size`, `shape_key`, `priority`,
    `timeout_us`, `correlation_id` and `sequence_flags` are those of `InferRequest`. `deadline_ms` is unix time, 0 for none.
    `traceparent` is W3C's. `body` is what `pack_body` or `pack_body_ref` returned. `lane` is a `Lane`. `payload_host` is
    the host whose shared memory holds its largest tensor, "" if the body holds all tensors.
    """

    key: int
    version: int
    batch_size: Annotated[int, Meta(ge=1)]
    shape_key: str
    priority: int
    timeout_us: int
    deadline_ms: int
    correlation_id: int | str
    sequence_flags: int
    traceparent: str
    body: bytes
    lane: _LaneNumber = 0
    payload_host: str = ""


class _RawFrame(Message, frozen=True):
    gateway: SubjectToken
    requests: list[msgspec.Raw]


class Frame(Message, frozen=True):
    """The requests that one gateway sends to one model at once."""

    gateway: SubjectToken
    requests: list[RequestEnvelope]


OnMalformed = Callable[[int | None, MalformedMessage], None]
"""Receives each row of a message that cannot be decoded: the key of its request where that can be read, and the error."""


def unpack_frame(data: bytes, on_malformed: OnMalformed | None = None) -> tuple[str, list[RequestEnvelope]]:
    """(gateway, requests) of the frame in `data`. Raises MalformedMessage.

    With `on_malformed`, a request that cannot be decoded is passed to it and left out; without it, it raises.
    """
    try:
        frame = Frame.unpack(data)
    except MalformedMessage:
        if on_malformed is None:
            raise
    else:
        return frame.gateway, frame.requests
    raw = _RawFrame.unpack(data)
    return raw.gateway, _decodable(raw.requests, RequestEnvelope, on_malformed)


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
    lane: _LaneNumber = 0


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
    return _decodable(_RawCompletions.unpack(data).batches, BatchCompletion, on_malformed), ()


ResponseRun = tuple[str, int]
"""One run of a decoupled model: its id, and how many responses it sent before."""

Timestamps = dict[str, int | Annotated[str, Meta(max_length=256)]]
"""When a traced request passed the stages of its way: unix nanoseconds by the names of Triton's trace timestamps.

With them come the numbers `BATCH_ID`, `BATCH_SIZE` and `INSTANCE` and the names `SCHEDULER` and `WORKER` of its batch.
"""


def timestamp(timestamps: Timestamps, name: str, default_ns: int = 0) -> int:
    """One of the times, in unix nanoseconds; `default_ns` where it is missing."""
    value = timestamps.get(name, default_ns)
    return value if isinstance(value, int) else default_ns


class ResponseEnvelope(msgspec.Struct):
    """A response to the request `key`: outputs and response parameters, or an error.

    `is_final` is False while others follow, since a decoupled model may send any number of responses. `outputs` is None
    where the end of the responses comes without a response. `timestamps` are set where the request was traced. `run` and
    `number` order the responses of one run of a decoupled model, which may run twice if the request was delivered twice.
    """

    key: int
    outputs: list[Tensor] | None
    parameters: Parameters | None
    error: WeirError | None
    is_final: bool = True
    timestamps: Timestamps | None = None
    run: str = ""
    number: int = 0


class _ResponseTensor(WireTensor, eq=False):
    data: bytes | PayloadRef  # type: ignore[assignment]  # clients' memory holds no responses


class _ResponseRow(msgspec.Struct, array_like=True):
    """A response on the wire: `outcome` is its outputs, None without a response, or the number of an `ErrorCode`."""

    key: int
    outcome: list[_ResponseTensor] | int | None
    detail: dict[str, Any] | list[Any] | str | None
    is_final: bool = True
    timestamps: Timestamps | None = None
    run: str = ""
    number: int = 0


class _Responses(Message, frozen=True):
    version: int
    responses: list[_ResponseRow]


class _RawResponses(Message, frozen=True):
    version: int
    responses: list[msgspec.Raw]


class _ErrorDetail(NamedTuple):
    message: str
    retry_after_s: Annotated[int, Meta(ge=0, le=MAX_RETRY_AFTER_S)] = 0
    backoff_us: Annotated[int, Meta(ge=0, le=MAX_BACKOFF_US)] = 0
    reason: int = 0


def pack_response(  # noqa: PLR0913 - the fields of a row, most of which have their default
    key: int,
    outputs: Iterable[Tensor],
    parameters: Parameters | None = None,
    is_final: bool = True,
    timestamps: Timestamps | None = None,
    run: ResponseRun | None = None,
) -> tuple[Any, ...]:
    """A successful response as a row for `pack_responses`."""
    return _with_ending((key, list(outputs), parameters), is_final, timestamps, run)


def pack_end(key: int, timestamps: Timestamps | None = None, run: ResponseRun | None = None) -> tuple[Any, ...]:
    """The end of a request's responses, without a response, as a row for `pack_responses`."""
    return _with_ending((key, None, None), True, timestamps, run)


def pack_error(
    key: int,
    error: WeirError,
    is_final: bool = True,
    timestamps: Timestamps | None = None,
    run: ResponseRun | None = None,
) -> tuple[Any, ...]:
    """An error response as a row for `pack_responses`."""
    detail: Any = (error.message, error.retry_after_s) if error.retry_after_s else error.message
    if error.reason:
        detail = (error.message, error.retry_after_s, error.backoff_us, error.reason.value)
    elif error.backoff_us:
        detail = (error.message, error.retry_after_s, error.backoff_us)
    return _with_ending((key, error.code.number, detail), is_final, timestamps, run)


def _with_ending(
    row: tuple[Any, ...], is_final: bool, timestamps: Timestamps | None, run: ResponseRun | None
) -> tuple[Any, ...]:
    if run is not None:
        return (*row, is_final, timestamps, *run)
    return row if is_final and timestamps is None else (*row, is_final, timestamps)


def pack_responses(version: int, responses: Sequence[tuple[Any, ...]]) -> bytes:
    """The message that carries responses of `version` of a model (0 if no version ran) to one gateway."""
    return encode((WIRE_VERSION, version, responses))


_ROWS_16 = 0xDC  # MessagePack's header of an array whose length follows in two bytes


def join_responses(version: int, messages: Sequence[bytes]) -> bytes:
    """Joins messages that `pack_responses` made, all of responses from `version` of a model. Raises ValueError."""
    head = encode((WIRE_VERSION, version, ()))[:-1]
    start, rows = len(head), 0
    parts: list[bytes] = []
    for message in messages:
        count = message[start] if message.startswith(head) and len(message) > start else 0
        if count & 0xF0 != 0x90 and count != _ROWS_16:
            raise ValueError("not messages of responses of one version")
        if count == _ROWS_16:
            rows += int.from_bytes(message[start + 1 : start + 3], "big")
            parts.append(message[start + 3 :])
        else:
            rows += count & 0x0F
            parts.append(message[start + 1 :])
    return b"".join((head, bytes((_ROWS_16,)), rows.to_bytes(2, "big"), *parts))


def unpack_responses(data: bytes, on_malformed: OnMalformed | None = None) -> tuple[int, list[ResponseEnvelope]]:
    """(model version, responses) of a message. Raises MalformedMessage.

    With `on_malformed`, a response that cannot be decoded is passed to it and left out; without it, it raises.
    """
    try:
        message = _Responses.unpack(data)
        return message.version, list(map(_response, message.responses))
    except MalformedMessage:
        if on_malformed is None:
            raise
    raw = _RawResponses.unpack(data)
    return raw.version, _decodable(raw.responses, _ResponseRow, on_malformed, _response)


def _response(row: _ResponseRow) -> ResponseEnvelope:
    outputs, detail, error = row.outcome, row.detail, None
    if type(outputs) is int:
        if detail is None or type(detail) is dict:
            raise MalformedMessage("not a response: an error without a message")
        outputs, detail, error = [], None, _error(outputs, detail)  # type: ignore[arg-type]  # a text or a list
    elif not (detail is None or type(detail) is dict):
        raise MalformedMessage("not a response: expected parameters")
    return ResponseEnvelope(
        row.key,
        outputs,  # type: ignore[arg-type]  # a list is invariant
        detail,
        error,
        row.is_final,
        row.timestamps,
        row.run,
        row.number,
    )


def _error(code: int, detail: str | list[Any]) -> WeirError:
    if isinstance(detail, str):
        return WeirError(ErrorCode.from_number(code), detail)
    try:
        message, retry_after_s, backoff_us, reason = convert(detail, _ErrorDetail)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"not a response: {error}") from error
    return WeirError(ErrorCode.from_number(code), message, retry_after_s, backoff_us, Reason.from_number(reason))


class Cancellation(Message, frozen=True):
    """Requests that their callers have cancelled, by their keys, and how many more `gateway` rejected without sending."""

    gateway: str
    keys: Sequence[int]
    rejected: Annotated[int, Meta(ge=0, le=MAX_REJECTED)] = 0


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


class SlotRelease(Message, frozen=True):
    """Payload slots that have been read: segment, slot and generation of each, as in `PayloadRef`."""

    slots: list[tuple[str, int, int]]


class CancelledRequests(NamedTuple):
    """Cancelled requests of one batch that came from one gateway."""

    batch_id: int
    gateway: str
    keys: list[int]


class RunningCancellation(Message, frozen=True):
    """Cancelled requests in batches that the worker has received from `scheduler`."""

    scheduler: str
    batches: list[CancelledRequests]


class LostAttempts(Message, frozen=True):
    """Requests of a gateway whose batch was lost, so that they run again, and why. Sent for durable requests only."""

    keys: list[int]
    reason: Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]


class QueueOwner(Message, frozen=True):
    """The record of who owns queue `partition` of `model`, and the announcement of it. `owner` "": no scheduler does.

    Epochs of a queue only grow. A process that has seen one rejects messages from owners of lower ones.
    """

    model: str
    partition: NonNegative
    owner: Annotated[str, Meta(max_length=256, pattern=r"^[A-Za-z0-9_=-]*\Z")]
    epoch: _Epoch


class _Keyed(msgspec.Struct, array_like=True):
    key: int


_Row = TypeVar("_Row")
_Value = TypeVar("_Value")


def _decodable(
    rows: Iterable[msgspec.Raw],
    kind: Any,
    on_malformed: OnMalformed,
    convert: Callable[[_Row], _Value] = lambda row: row,  # type: ignore[assignment,return-value]
) -> list[_Value]:
    """The rows that can be decoded; the others are passed to `on_malformed`."""
    found: list[_Value] = []
    for row in rows:
        try:
            found.append(convert(decode(row, kind, getattr(kind, "__name__", "completion"))))
        except MalformedMessage as error:
            on_malformed(_key_of(row), error)
    return found


def _key_of(row: msgspec.Raw) -> int | None:
    try:
        keyed: _Keyed = decode(row, _Keyed, "row")
    except MalformedMessage:
        return None
    return keyed.key
