"""The messages roles exchange on the bus: msgpack arrays whose first element is the wire version.

A request travels as a *part*: routing facts, which a scheduler reads, and a *body*, which it passes on unread. Parts of
one model and one event-loop tick share a *frame* (gateway -> `live.<model>`); the requests of one batch share a *batch
message* (scheduler -> `work.<worker>`); the answers of one batch that belong to one gateway share an *answers message*
(worker -> `reply.<gateway>`); and a *done message* tells the scheduler that slots are free (worker -> `done.<scheduler>`).

Everything that arrives is untrusted: each `unpack_*` raises `MalformedMessage` for what is not the message it names.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

from schemas.datatypes import DATATYPES
from schemas.errors import ErrorCode, WeirError
from schemas.requests import InferRequest, Parameters, RequestedOutput
from schemas.tensors import ClientRef, CudaRegionRef, PayloadRef, Reference, RegionRef, Tensor

WIRE_VERSION = 1

_packer = msgpack.Packer(use_bin_type=True, autoreset=True)
_pack = _packer.pack
_pack_array_header = _packer.pack_array_header

_MAX_QUEUED_US = 1 << 40  # twelve days: sums of it stay far within 64 bits

_is_subject = re.compile(r"[!-)+-=?-~]+", re.ASCII).fullmatch  # printable, and neither `*` nor `>`
_is_ack = re.compile(r"\$JS\.ACK\.[!-)+-=?-~]+", re.ASCII).fullmatch


_BODY_REF = b"\x95"  # how an array of five begins; a body is an array of seven to nine


class MalformedMessage(ValueError):
    """Bytes on a subject that are not the message the subject carries."""


class Part(NamedTuple):
    """One request as a scheduler sees it.

    `key` is unique within the sending gateway. `version` is -1 for the latest. `batch_size`, `shape_key`, `priority`,
    `timeout_us`, `correlation_id` and `sequence_flags` are those of `InferRequest`; `deadline_ms` is unix time, 0 for
    none; `traceparent` is W3C's; `body` is what `pack_body` or `pack_body_ref` made.
    """

    key: int
    version: int
    batch_size: int
    shape_key: str
    priority: int
    timeout_us: int
    deadline_ms: int
    correlation_id: int | str
    sequence_flags: int
    traceparent: str
    body: bytes


NOBODY = ""
"""In the place of the gateway of a null row: a copy of another row's request, which fills a batch and is not answered."""


class BatchEntry(NamedTuple):
    """One request of a batch: where its answer goes (`NOBODY`: nowhere), how long it has queued, and its body."""

    gateway: str
    key: int
    queued_us: int
    body: bytes


class BatchMessage(NamedTuple):
    """One batch for one instance of one worker.

    `acks` are the ack subjects of frames that end with this batch: the worker acknowledges them with its answers.
    """

    scheduler: str
    batch_id: int
    model: str
    version: int
    instance: int
    entries: list[BatchEntry]
    acks: list[str]


class BatchOutcome(IntEnum):
    """How a batch ended, or that its instance is free while it goes on."""

    ANSWERED = 0
    """Every request has its last answer."""
    UNANSWERED = 1
    """None was answered, for the instance is gone: the batch is to be done again."""
    RELEASED = 2
    """The instance takes the next batch, while responses of this one are still to come; it ends later."""


class Done(NamedTuple):
    """The end of one batch, or of its execution; `busy_us` is the time its instance was executing it."""

    batch_id: int
    outcome: int
    busy_us: int


def pack_body(request: InferRequest) -> bytes:
    """The part of `request` that only the worker reads. Tensor data is copied once, into the returned bytes."""
    return bytes(
        _pack(
            (
                request.id,
                request.parameters,
                [(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in request.inputs],
                [_output_row(output) for output in request.outputs],
                request.correlation_id,
                request.sequence_flags,
                request.timeout_us,
                *_trace_context(request),
            )
        )
    )


def _trace_context(request: InferRequest) -> tuple[str, ...]:
    if not request.traceparent:
        return ()
    return (request.traceparent, request.tracestate) if request.tracestate else (request.traceparent,)


def body_template(request: InferRequest) -> list[bytes]:
    """What `pack_body` makes of `request`, without the content of its tensors: the bytes before, between and after it.

    Joined with the content of other tensors of the same sizes, it is the body of the request that has those.
    """
    pieces: list[bytes] = []
    piece = _pack_array_header(7) + _pack(request.id) + _pack(request.parameters)
    piece += _pack_array_header(len(request.inputs))
    for tensor in request.inputs:
        piece += _pack_array_header(4) + _pack(tensor.name) + _pack(tensor.datatype) + _pack(tensor.shape)
        pieces.append(piece + _bin_header(tensor.size_bytes))
        piece = b""
    piece += _pack([_output_row(output) for output in request.outputs])
    piece += _pack(request.correlation_id) + _pack(request.sequence_flags) + _pack(request.timeout_us)
    pieces.append(piece)
    return pieces


def pack_body_ref(ref: PayloadRef) -> bytes:
    """In the place of a body: where it lies, when the bodies of a frame are together too large for a message."""
    return bytes(_pack(ref))


def body_ref(body: bytes) -> PayloadRef | None:
    """Where the body lies, if this stands in its place. Raises MalformedMessage."""
    if body[:1] != _BODY_REF:
        return None
    try:
        segment, slot, generation, offset, size = msgpack.unpackb(body)
        return PayloadRef(_text(segment), int(slot), int(generation), int(offset), int(size))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a reference to a body: {error}") from error


def unpack_body(body: bytes | memoryview, model: str, version: int) -> InferRequest:
    """The request whose body this is, with tensors over the unpacked bytes. Raises MalformedMessage."""
    try:
        id, parameters, inputs, outputs, correlation_id, sequence_flags, timeout_us, *more = msgpack.unpackb(body)
        request = InferRequest(model, str(version), _text(id), parameters=_parameters(parameters))
        request.inputs = _unpack_tensors(inputs, _reference)
        request.outputs = [_requested_output(row) for row in outputs]
        if not (isinstance(correlation_id, (int, str)) and type(sequence_flags) is type(timeout_us) is int):
            raise TypeError("wrong types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a request body: {error}") from error
    request.correlation_id = correlation_id
    request.sequence_flags = sequence_flags
    request.timeout_us = timeout_us
    if more:
        request.traceparent = _text(more[0])
        request.tracestate = _text(more[1]) if len(more) > 1 else ""
    return request


def pack_frame(gateway: str, parts: Sequence[Part]) -> bytes:
    """A frame of `parts` from `gateway`."""
    return bytes(_pack((WIRE_VERSION, gateway, parts)))


def pack_batch(batch: BatchMessage) -> bytes:
    """The message that hands `batch` to its worker."""
    return bytes(_pack((WIRE_VERSION, *batch)))


def unpack_batch(data: bytes) -> BatchMessage:
    """The batch in a message. Raises MalformedMessage."""
    scheduler, batch_id, model, version, instance, rows, acks = _unpack(data, 7)
    try:
        entries = [BatchEntry(*row) for row in rows]
        for gateway, key, queued_us, body in entries:
            if not (
                (gateway == NOBODY or _is_subject(gateway))
                and type(key) is type(queued_us) is int
                and type(body) is bytes
            ):
                raise TypeError("an entry of wrong types")
            if not 0 <= queued_us < _MAX_QUEUED_US:
                raise TypeError("a time that can't be")
        if not (_is_subject(scheduler) and all(map(_is_ack, acks))):
            raise TypeError("names that can't be part of a subject")
        if not type(batch_id) is type(version) is type(instance) is int:
            raise TypeError("expected integers")
        return BatchMessage(scheduler, batch_id, _text(model), version, instance, entries, acks)
    except TypeError as error:
        raise MalformedMessage(f"not a batch: {error}") from error


Run = tuple[str, int]
"""A run of a decoupled model, and how many responses it had sent before."""

Moments = dict[str, int]
"""When a traced request passed the points of its way, by the names of Triton's trace timestamps; unix nanoseconds."""


class Answer(NamedTuple):
    """An answer to the request `key`: outputs and response parameters, or an error.

    `is_final` is False while others follow, as a decoupled model may send any number; `outputs` None is no response at
    all, but the end of them alone. `moments` are there where the request was traced. `run` tells the responses of one run
    of a decoupled model from those of another, when the request was delivered again; `number` is how many came before.
    """

    key: int
    outputs: list[Tensor] | None
    parameters: Parameters | None
    error: WeirError | None
    is_final: bool = True
    moments: Moments | None = None
    run: str = ""
    number: int = 0


def pack_answer(
    key: int,
    outputs: Iterable[Tensor],
    parameters: Parameters | None = None,
    is_final: bool = True,
    moments: Moments | None = None,
    run: Run | None = None,
) -> tuple[Any, ...]:
    """A successful answer, to be sent by `pack_answers`."""
    rows = [(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in outputs]
    return _with_ending((key, rows, parameters), is_final, moments, run)


def pack_end(key: int, moments: Moments | None = None, run: Run | None = None) -> tuple[Any, ...]:
    """The end of a request's answers, to be sent by `pack_answers` where no response comes with it."""
    return _with_ending((key, None, None), True, moments, run)


def pack_error(
    key: int,
    error: WeirError,
    is_final: bool = True,
    moments: Moments | None = None,
    run: Run | None = None,
) -> tuple[Any, ...]:
    """An answer that is an error, to be sent by `pack_answers`."""
    return _with_ending((key, error.code.number, error.message), is_final, moments, run)


def _with_ending(row: tuple[Any, ...], is_final: bool, moments: Moments | None, run: Run | None) -> tuple[Any, ...]:
    if run is not None:
        return (*row, is_final, moments, *run)
    return row if is_final and moments is None else (*row, is_final, moments)


def pack_answers(version: int, answers: Sequence[tuple[Any, ...]]) -> bytes:
    """The message that brings one gateway its answers from `version` of a model (0 where no version ran)."""
    return bytes(_pack((WIRE_VERSION, version, answers)))


def unpack_answers(data: bytes) -> tuple[int, list[Answer]]:
    """(model version, answers) of an answers message. Raises MalformedMessage."""
    version, rows = _unpack(data, 2)
    answers: list[Answer] = []
    try:
        for key, outcome, detail, *more in rows:
            if type(key) is not int or type(version) is not int:
                raise TypeError("expected integers")
            ending = _unpack_ending(*more) if more else ()
            if type(outcome) is int:
                error = WeirError(ErrorCode.from_number(outcome), _text(detail))
                answers.append(Answer(key, [], None, error, *ending))
            else:
                outputs = None if outcome is None else _unpack_tensors(outcome, _payload_ref)
                answers.append(Answer(key, outputs, _parameters(detail), None, *ending))
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"not answers: {error}") from error
    return version, answers


def pack_done(worker: str, dones: Sequence[Done]) -> bytes:
    """The message that tells a scheduler which batches of `worker` have ended."""
    return bytes(_pack((WIRE_VERSION, worker, dones)))


def pack_cancel(gateway: str, keys: Sequence[int]) -> bytes:
    """The message by which `gateway` abandons requests."""
    return bytes(_pack((WIRE_VERSION, gateway, keys)))


def unpack_cancel(data: bytes) -> tuple[str, list[int]]:
    """(gateway, keys of the abandoned requests). Raises MalformedMessage."""
    gateway, keys = _unpack(data, 2)
    if not isinstance(keys, list) or not all(type(key) is int for key in keys):
        raise MalformedMessage("not a cancel message")
    return _text(gateway), keys


def pack_release(slots: Sequence[tuple[str, int, int]]) -> bytes:
    """The message that gives back payload slots: (segment, slot, generation) each, as in `PayloadRef`."""
    return bytes(_pack((WIRE_VERSION, slots)))


def unpack_release(data: bytes) -> list[tuple[str, int, int]]:
    """The payload slots given back. Raises MalformedMessage."""
    (slots,) = _unpack(data, 1)
    try:
        return [(_text(segment), int(slot), int(generation)) for segment, slot, generation in slots]
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"not a release: {error}") from error


def _bin_header(size: int) -> bytes:
    # msgpack's "bin" formats; the packer offers no call for the header alone.
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    if size < 1 << 16:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)


def _unpack(data: bytes, fields: int) -> list[Any]:
    try:
        message = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {error}") from error
    if not isinstance(message, list) or len(message) < fields + 1:
        raise MalformedMessage("not one of our messages")
    if message[0] != WIRE_VERSION:
        raise MalformedMessage(f"wire version {message[0]!r} is not {WIRE_VERSION}")
    return message[1 : fields + 1]


def _unpack_tensors(rows: Any, reference: Callable[..., Reference]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for name, datatype, shape, data in rows:
        if type(name) is not str or datatype not in DATATYPES or not all(type(dim) is int for dim in shape):
            raise TypeError("not a tensor")
        if isinstance(data, list):
            data = reference(*data)
        elif type(data) is not bytes:
            raise TypeError("not the content of a tensor")
        tensors.append(Tensor(name, datatype, shape, data))
    return tensors


def _unpack_ending(
    is_final: Any, moments: Any, run: Any = "", number: Any = 0
) -> tuple[bool, Moments | None, str, int]:
    known = moments is None or (
        type(moments) is dict and all(type(name) is str and type(ns) is int for name, ns in moments.items())
    )
    if type(is_final) is not bool or not known or type(number) is not int:
        raise TypeError("not the end of an answer")
    return is_final, moments, _text(run), number


def _output_row(output: RequestedOutput) -> str | tuple[str, ClientRef]:
    return output.name if output.region is None else (output.name, output.region)


def _requested_output(row: Any) -> RequestedOutput:
    if not isinstance(row, list):
        return RequestedOutput(_text(row))
    name, place = row
    output = RequestedOutput(_text(name))
    region = _reference(*place)
    if isinstance(region, PayloadRef):
        raise TypeError("outputs are not put into payload slots")
    output.region = region
    return output


def _reference(*row: Any) -> Reference:
    return _payload_ref(*row) if len(row) == 5 else _client_ref(*row)


def _client_ref(place: Any, number: Any, offset: Any, size: Any) -> ClientRef:
    # What a client shares is named by a file and its inode, or by the handle of GPU memory and its device.
    if not type(number) is type(offset) is type(size) is int or min(number, offset, size) < 0:
        raise TypeError("not a place in a client's memory")
    if type(place) is bytes:
        return CudaRegionRef(place, number, offset, size)
    return RegionRef(_text(place), number, offset, size)


def _payload_ref(segment: Any, slot: Any, generation: Any, offset: Any, size: Any) -> PayloadRef:
    if not type(slot) is type(generation) is type(offset) is type(size) is int:
        raise TypeError("not a reference to a payload")
    return PayloadRef(_text(segment), slot, generation, offset, size)


def _parameters(value: Any) -> Parameters | None:
    if value is None or (type(value) is dict and all(type(key) is str for key in value)):
        return value
    raise MalformedMessage("not parameters")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedMessage(f"expected text, got {type(value).__name__}")
    return value
