"""The messages roles exchange on the bus: msgpack arrays whose first element is the wire version.

A request travels as a *part*: routing facts, which a scheduler reads, and a *body*, which it passes on unread. Parts of
one model and one event-loop tick share a *frame* (gateway -> `live.<model>`); the requests of one batch share a *batch
message* (scheduler -> `work.<worker>`); the answers of one batch that belong to one gateway share an *answers message*
(worker -> `reply.<gateway>`); and a *done message* tells the scheduler that slots are free (worker -> `done.<scheduler>`).

Everything that arrives is untrusted: each `unpack_*` raises `MalformedMessage` for what is not the message it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from schemas.errors import MAX_RETRY_AFTER_S, MAX_SHUT_US, ErrorCode, Reason, WeirError
from schemas.lanes import Lane
from schemas.ownership import MAX_EPOCH
from schemas.requests import SEQUENCE_END, SEQUENCE_START, Parameters
from schemas.tensors import Tensor
from schemas.wire import (
    WIRE_VERSION,
    MalformedMessage,
    pack,
    parameters_or_none,
    payload_ref,
    text,
    unpack,
    unpack_tensors,
)

_ONE_ROW, _ROWS_16 = b"\x91", b"\xdc"  # how msgpack begins an array of one element, and of so many as two bytes say
_LANES = frozenset(lane.value for lane in Lane)
_ALL_FLAGS = SEQUENCE_START | SEQUENCE_END
_MAX_QUEUED_US = 1 << 40  # twelve days: sums of it stay far within 64 bits

MAX_TURNED_AWAY = 1 << 31
"""Requests that one message may tell of."""

_is_subject = re.compile(r"[!-)+-=?-~]+", re.ASCII).fullmatch  # printable, and neither `*` nor `>`
_is_ack = re.compile(r"\$JS\.ACK\.[!-)+-=?-~]+", re.ASCII).fullmatch


class Part(NamedTuple):
    """One request as a scheduler sees it.

    `key` is unique within the sending gateway. `version` is -1 for the latest. `batch_size`, `shape_key`, `priority`,
    `timeout_us`, `correlation_id` and `sequence_flags` are those of `InferRequest`; `deadline_ms` is unix time, 0 for
    none; `traceparent` is W3C's; `body` is what `pack_body` or `pack_body_ref` made; `lane` is a `schemas.lanes.Lane`.
    `payload_host` is the host (`bus.identity.host`) where its largest tensor lies, "" where all of it is in the body.
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
    lane: int = 0
    payload_host: str = ""


NOBODY = ""
"""In the place of the gateway of a row that is not answered.

Without a `place` it is a null row, a copy of another row's request that fills the batch. With one, it is a request that
was answered before and runs again, to bring its sequence's state to where it was.
"""


class SequencePlace(NamedTuple):
    """Where a request of a sequence stands: the `slot` of its instance that keeps the sequence's state.

    `number` is how many requests of the sequence ran before it. `restore`: the state is not in the slot, but was
    checkpointed after that many requests. `run` numbers the sequence among all that its scheduler has known, so that one
    that is started again is another. `flags` are the START and END with which the request runs, whatever its body says:
    one that is rescheduled has none.
    """

    slot: int
    number: int
    restore: bool
    run: int = 0
    flags: int = 0


class BatchEntry(NamedTuple):
    """One request of a batch: where its answer goes (`NOBODY`: nowhere), how long it has queued, and its body.

    `deadline_ms` is unix time, 0 for none: nobody waits for the answer after it. `place` is there for requests of
    sequences. `lane` is a `schemas.lanes.Lane`, told to ensembles, which ask their steps by the same.
    """

    gateway: str
    key: int
    queued_us: int
    body: bytes
    deadline_ms: int = 0
    place: SequencePlace | None = None
    lane: int = 0


class BatchMessage(NamedTuple):
    """One batch for one instance of one worker.

    `acks` are the ack subjects of frames that end with this batch: the worker acknowledges them with its answers. The
    requests of a series are executed one after another, each alone, whatever the model's configuration is by then.
    `epoch` is that from which on the scheduler owns the queue, `partition`, that the requests come from.
    """

    scheduler: str
    batch_id: int
    model: str
    version: int
    instance: int
    entries: list[BatchEntry]
    acks: list[str]
    is_series: bool = False
    epoch: int = 0
    partition: int = 0


class BatchOutcome(IntEnum):
    """How a batch ended, or that its instance is free while it goes on."""

    ANSWERED = 0
    """Every request has its last answer."""
    UNANSWERED = 1
    """None was answered, for the instance is gone: the batch is to be done again."""
    RELEASED = 2
    """The instance takes the next batch, while responses of this one are still to come; it ends later."""
    NOT_RUN = 3
    """The instance can't run for the time being, and has not begun: the batch goes back to the queue as it was."""
    HANDED_BACK = 4
    """Some of a series have not begun, and go back to the queue as they were: what is before them takes its time."""
    REFUSED = 5
    """Its worker knows of a later owner of the queue, and has not begun: `Done.busy_us` is the epoch of that one."""


class Done(NamedTuple):
    """The end of one batch, or of its execution; `busy_us` is the time its instance was executing it.

    `rescheduled` are the positions of requests that have no answer yet and are to run again: an iterative sequence's, or
    those of a series that were not answered. None, where it ended otherwise than ANSWERED, means all.
    """

    batch_id: int
    outcome: int
    busy_us: int
    rescheduled: Sequence[int] = ()


def pack_frame(gateway: str, parts: Sequence[Part]) -> bytes:
    """A frame of `parts` from `gateway`."""
    return bytes(pack((WIRE_VERSION, gateway, parts)))


def pack_batch(batch: BatchMessage) -> bytes:
    """The message that hands `batch` to its worker."""
    return bytes(pack((WIRE_VERSION, *batch)))


def unpack_batch(data: bytes) -> BatchMessage:
    """The batch in a message. Raises MalformedMessage."""
    scheduler, batch_id, model, version, instance, rows, acks, *more = unpack(data, 7, optional=3)
    try:
        if not type(rows) is type(acks) is list:
            raise TypeError("expected lists")
        entries = [_entry(*row) for row in rows]
        if not (_is_subject(scheduler) and all(map(_is_ack, acks))):
            raise TypeError("names that can't be part of a subject")
        if not type(batch_id) is type(version) is type(instance) is int:
            raise TypeError("expected integers")
        if batch_id < 0:
            raise TypeError("not the number of a batch")
        return BatchMessage(scheduler, batch_id, text(model), version, instance, entries, acks, *_batch_ending(*more))
    except TypeError as error:
        raise MalformedMessage(f"not a batch: {error}") from error


def _batch_ending(is_series: bool = False, epoch: int = 0, partition: int = 0) -> tuple[bool, int, int]:
    if not (type(is_series) is bool and type(epoch) is type(partition) is int):
        raise TypeError("not whether it is a series, or not an epoch, or not a partition")
    if not (0 <= epoch < MAX_EPOCH and 0 <= partition < MAX_EPOCH):
        raise TypeError("an epoch, or a partition, that can't be")
    return is_series, epoch, partition


def _entry(
    gateway: str, key: int, queued_us: int, body: bytes, deadline_ms: int = 0, place: Any = None, lane: int = 0
) -> BatchEntry:
    if not (
        (gateway == NOBODY or _is_subject(gateway))
        and type(key) is type(queued_us) is type(deadline_ms) is int
        and type(body) is bytes
    ):
        raise TypeError("an entry of wrong types")
    if not (0 <= queued_us < _MAX_QUEUED_US and deadline_ms >= 0):
        raise TypeError("a time that can't be")
    if type(lane) is not int or lane not in _LANES:
        raise TypeError("not a lane")
    return BatchEntry(gateway, key, queued_us, body, deadline_ms, None if place is None else _place(*place), lane)


def _place(slot: int, number: int, restore: bool, run: int = 0, flags: int = 0) -> SequencePlace:
    integers = type(slot) is type(number) is type(run) is type(flags) is int
    if not (integers and type(restore) is bool and min(slot, number, run) >= 0 and 0 <= flags <= _ALL_FLAGS):
        raise TypeError("not a place in a sequence")
    return SequencePlace(slot, number, restore, run, flags)


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
    detail: Any = (error.message, error.retry_after_s) if error.retry_after_s else error.message
    if error.reason:
        detail = (error.message, error.retry_after_s, error.shut_us, error.reason.value)
    elif error.shut_us:
        detail = (error.message, error.retry_after_s, error.shut_us)
    return _with_ending((key, error.code.number, detail), is_final, moments, run)


def _with_ending(row: tuple[Any, ...], is_final: bool, moments: Moments | None, run: Run | None) -> tuple[Any, ...]:
    if run is not None:
        return (*row, is_final, moments, *run)
    return row if is_final and moments is None else (*row, is_final, moments)


def pack_answers(version: int, answers: Sequence[tuple[Any, ...]]) -> bytes:
    """The message that brings one gateway its answers from `version` of a model (0 where no version ran)."""
    return bytes(pack((WIRE_VERSION, version, answers)))


def join_answers(version: int, messages: Sequence[bytes]) -> bytes:
    """One message of several, each of which `pack_answers` made of one answer from `version` of a model."""
    head = pack((WIRE_VERSION, version, ()))[:-1]
    if not all(message.startswith(head + _ONE_ROW) for message in messages):
        raise ValueError("not messages of one answer each")
    rows = len(messages).to_bytes(2, "big")
    return b"".join((head, _ROWS_16, rows, *(message[len(head) + 1 :] for message in messages)))


def unpack_answers(
    data: bytes, on_malformed: Callable[[int | None, MalformedMessage], None] | None = None
) -> tuple[int, list[Answer]]:
    """(model version, answers) of an answers message. Raises MalformedMessage.

    An answer that can't be decoded is passed to `on_malformed`, with the key of its request where that can be read, and
    the others are returned; without `on_malformed` it raises.
    """
    version, rows = unpack(data, 2)
    if type(version) is not int or type(rows) is not list:
        raise MalformedMessage("not answers: expected a version and a list")
    answers: list[Answer] = []
    for row in rows:
        try:
            key, outcome, detail, *more = row
            if type(key) is not int:
                raise TypeError("expected an integer as key")
            ending = _unpack_ending(*more) if more else ()
            if type(outcome) is int:
                error = _unpack_error(outcome, *(detail if type(detail) is list else (detail,)))
                answers.append(Answer(key, [], None, error, *ending))
            else:
                outputs = None if outcome is None else unpack_tensors(outcome, payload_ref)
                answers.append(Answer(key, outputs, parameters_or_none(detail), None, *ending))
        except (TypeError, ValueError) as problem:
            malformed = MalformedMessage(f"not answers: {problem}")
            if on_malformed is None:
                raise malformed from problem
            on_malformed(row[0] if type(row) is list and row and type(row[0]) is int else None, malformed)
    return version, answers


def _unpack_error(code: int, message: Any, retry_after_s: Any = 0, shut_us: Any = 0, reason: Any = 0) -> WeirError:
    if type(retry_after_s) is not int or not 0 <= retry_after_s <= MAX_RETRY_AFTER_S:
        raise TypeError("not a time to come again")
    if type(shut_us) is not int or not 0 <= shut_us <= MAX_SHUT_US:
        raise TypeError("not a time for which a queue is shut")
    if type(reason) is not int:
        raise TypeError("not a reason")
    return WeirError(ErrorCode.from_number(code), text(message), retry_after_s, shut_us, Reason.from_number(reason))


def pack_done(worker: str, dones: Sequence[Done]) -> bytes:
    """The message that tells a scheduler which batches of `worker` have ended."""
    return bytes(pack((WIRE_VERSION, worker, dones)))


def pack_cancel(gateway: str, keys: Sequence[int], turned_away: int = 0) -> bytes:
    """The message by which `gateway` abandons requests, and tells of others that it has not even sent."""
    return bytes(pack((WIRE_VERSION, gateway, keys, turned_away)))


def unpack_cancel(data: bytes) -> tuple[str, list[int], int]:
    """(gateway, keys of the abandoned requests, how many more it has turned away). Raises MalformedMessage."""
    gateway, keys, *more = unpack(data, 2, 1)
    turned_away = more[0] if more else 0
    if not isinstance(keys, list) or not all(type(key) is int for key in keys):
        raise MalformedMessage("not a cancel message")
    if type(turned_away) is not int or not 0 <= turned_away <= MAX_TURNED_AWAY:
        raise MalformedMessage("not a number of requests")
    return text(gateway), keys, turned_away


def pack_release(slots: Sequence[tuple[str, int, int]]) -> bytes:
    """The message that gives back payload slots: (segment, slot, generation) each, as in `PayloadRef`."""
    return bytes(pack((WIRE_VERSION, slots)))


def unpack_release(data: bytes) -> list[tuple[str, int, int]]:
    """The payload slots given back. Raises MalformedMessage."""
    (slots,) = unpack(data, 1)
    try:
        return [_slot(*row) for row in slots]
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"not a release: {error}") from error


def _slot(segment: Any, slot: Any, generation: Any) -> tuple[str, int, int]:
    if not type(slot) is type(generation) is int:
        raise TypeError("expected integers")
    return text(segment), slot, generation


def _unpack_ending(
    is_final: Any, moments: Any, run: Any = "", number: Any = 0
) -> tuple[bool, Moments | None, str, int]:
    known = moments is None or (
        type(moments) is dict and all(type(name) is str and type(ns) is int for name, ns in moments.items())
    )
    if type(is_final) is not bool or not known or type(number) is not int:
        raise TypeError("not the end of an answer")
    return is_final, moments, text(run), number
