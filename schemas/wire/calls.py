"""The messages between callers and the roles that serve their requests.

A request travels as an *envelope*, whose fields a scheduler reads, around a *body* (`weir.schemas.wire.request_body`),
which it passes on without decoding it. The envelopes that a caller sends to one model in one turn of its event loop share
a *frame* (caller -> `live.<model>`). The responses of one batch that go to one caller share a *responses message* (worker
-> `reply.<caller>`). In the fields of all of them `gateway` is the caller, which may be a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from weir.schemas.core.errors import MAX_BACKOFF_US, MAX_RETRY_AFTER_S, ErrorCode, Reason, WeirError
from weir.schemas.core.requests import Lane, Parameters
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.codec import (
    WIRE_VERSION,
    MalformedMessage,
    Message,
    OnMalformed,
    SubjectToken,
    WireTensor,
    convert,
    decode_rows,
    encode,
)

MAX_REJECTED = 1 << 31
"""Rejected requests that one message may report."""

MAX_REASON_LENGTH = 200
"""Characters of the reason in a message about lost attempts."""


class Caller(NamedTuple):
    """For whom a request is, as its scheduler needs to know it: requests of one `owner` count together ("": of nobody).

    At most `in_flight_limit` of them (0: no limit) wait or run at a model; `weight` is the owner's part of each batch while
    others wait too.
    """

    owner: str = ""
    in_flight_limit: int = 0
    weight: int = 1


ANYBODY = Caller()
"""The caller of requests that count for nobody. They share this object, so that one identity comparison detects them."""

LaneNumber = Annotated[int, Meta(ge=0, le=max(Lane).value)]
"""A `Lane`."""


class RequestEnvelope(NamedTuple):
    """One request as a scheduler reads it.

    `key` is unique within the sending gateway. `version` is -1 for the latest. `batch_size`, `shape_key`, `priority`,
    `timeout_us`, `correlation_id` and `sequence_flags` are those of `InferRequest`. `deadline_ms` is unix time, 0 for none.
    `traceparent` is W3C's. `body` is what `pack_body` or `pack_body_ref` returned. `lane` is a `Lane`. `payload_host` is
    the host whose shared memory holds its largest tensor, "" if the body holds all tensors. `owner`, `in_flight_limit` and
    `weight` are those of its `Caller`.
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
    lane: LaneNumber = 0
    payload_host: str = ""
    owner: str = ""
    in_flight_limit: Annotated[int, Meta(ge=0)] = 0
    weight: Annotated[int, Meta(ge=1)] = 1


_OWNER = RequestEnvelope._fields.index("owner")


class _RawFrame(Message, frozen=True):
    gateway: SubjectToken
    requests: list[msgspec.Raw]


class Frame(Message, frozen=True):
    """The requests that one gateway sends to one model at once."""

    gateway: SubjectToken
    requests: list[RequestEnvelope]


def pack_frame(gateway: str, requests: Iterable[RequestEnvelope]) -> bytes:
    """The message that carries these requests. A request of nobody has the row that older schedulers can read too."""
    return encode((WIRE_VERSION, gateway, [row if row.owner else row[:_OWNER] for row in requests]))


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
    return raw.gateway, decode_rows(raw.requests, RequestEnvelope, "request", on_malformed)


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
    return raw.version, decode_rows(raw.responses, _ResponseRow, "response", on_malformed, _response)


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


class SlotRelease(Message, frozen=True):
    """Payload slots that have been read: segment, slot and generation of each, as in `PayloadRef`."""

    slots: list[tuple[str, int, int]]


class LostAttempts(Message, frozen=True):
    """Requests of a gateway whose batch was lost, so that they run again, and why. Sent for durable requests only."""

    keys: list[int]
    reason: Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
