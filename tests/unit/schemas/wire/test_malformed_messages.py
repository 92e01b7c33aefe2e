"""Messages of which something is not as it should be: read as what they are, or malformed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.schemas.core.errors import unavailable
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import PayloadRef, RegionRef, Tensor
from weir.schemas.wire.batches import (
    BatchEnded,
    BatchEntry,
    Batches,
    BatchMessage,
    Completions,
    SequencePosition,
    unpack_completions,
)
from weir.schemas.wire.calls import (
    Cancellation,
    SlotRelease,
    pack_error,
    pack_response,
    pack_responses,
    unpack_responses,
)
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.request_body import body_ref, pack_body, pack_body_ref, unpack_body
from weir.schemas.wire.transfers import StatePiece, pack_pieces, pack_state, unpack_state

REF = PayloadRef("weir-a_1", 64, 3, 128, 10)
TENSOR = Tensor("IN", "INT8", [1, 2], b"ab")


def body(**more: Any) -> bytes:
    request = InferRequest("m", "1", "id", [TENSOR], [RequestedOutput("OUT"), RequestedOutput("AT")], {"a": 1})
    request.outputs[1].region = RegionRef("region", 5, 0, 16)
    for name, value in more.items():
        setattr(request, name, value)
    return pack_body(request)


BATCH = BatchMessage(
    "scheduler",
    9,
    "m",
    1,
    0,
    [BatchEntry("g", 1, 50, b"x"), BatchEntry("", 2, 0, b"y", 7, SequencePosition(3, 4, True, 5, 1))],
)
ANSWERS = [
    pack_response(1, [TENSOR, Tensor("LARGE", "FP32", [4], REF)], {"b": True}),
    pack_error(2, unavailable("no"), is_final=False, timestamps={"QUEUE_START": 1}, run=("r", 2)),
]


def of_body(data: bytes) -> Any:
    request = unpack_body(data, "m", 1)
    assert type(request.correlation_id) is str or 0 <= request.correlation_id < 1 << 64
    assert request.sequence_flags in range(4)
    assert min(request.timeout_us, request.priority) >= 0
    assert type(request.traceparent) is type(request.tracestate) is str
    check(request.inputs)


def check(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        assert type(tensor.name) is type(tensor.datatype) is str
        assert type(tensor.shape) is list
        assert all(type(dim) is int and dim >= 0 for dim in tensor.shape)


def of_answers(data: bytes) -> None:
    for answer in unpack_responses(data)[1]:
        assert type(answer.key) is type(answer.number) is int
        assert type(answer.is_final) is bool
        check(answer.outputs or [])


def of_batch(data: bytes) -> None:
    for entry in [entry for batch in Batches.unpack(data).batches for entry in batch.entries]:
        assert type(entry.body) is bytes
        if entry.position is not None:
            assert entry.position.flags in range(4)
            assert min(entry.position.slot, entry.position.number, entry.position.run) >= 0
            assert type(entry.position.restore) is bool


MESSAGES: list[tuple[bytes, Callable[[bytes], Any]]] = [
    (body(), of_body),
    (body(correlation_id=5, sequence_flags=3, timeout_us=9), of_body),
    (body(correlation_id="five", traceparent="00-a", tracestate="b", wants_timestamps=True, priority=7), of_body),
    (pack_body_ref(REF), body_ref),
    (Batches([BATCH]).pack(), of_batch),
    (pack_responses(1, ANSWERS), of_answers),
    (Cancellation("gateway", [1, 2], 3).pack(), Cancellation.unpack),
    (SlotRelease([("weir-a_1", 64, 3)]).pack(), SlotRelease.unpack),
    (Completions("worker", [BatchEnded(1, 5, [2])]).pack(), unpack_completions),
    (pack_pieces(4, b"state", 3)[0], StatePiece.unpack),
    (pack_state([TENSOR]), lambda data: check(unpack_state(data))),
]

GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 4, 1 << 63, -(1 << 63), float("inf"), float("nan"), 0.5, "", b"", [], {}]),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(-2, 9), max_size=5),
    st.dictionaries(st.text(max_size=2), st.integers(-2, 9), max_size=2),
    st.lists(st.lists(st.text(max_size=3), max_size=5), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a message."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += places(part, (*path, key))
    return found


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[bytes, Callable[[bytes], Any]]:
    """A message in which one thing or two are others, or lack, or are there twice; and who reads it."""
    packed, read = draw(st.sampled_from(MESSAGES))
    message = [msgpack.unpackb(packed)]
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(places(message)[1:]))
        parent: Any = message
        for key in way:
            parent = parent[key]
        how = draw(st.sampled_from(["other", "other", "lacks", "twice"])) if isinstance(parent, list) else "other"
        if how == "other" or len(message) != 1 or not way:
            parent[last] = draw(GARBAGE)
        elif how == "lacks":
            del parent[last]
        else:
            parent.insert(last, parent[last])
    return msgpack.packb(message[0]), read


@given(spoilt())
@settings(max_examples=600)
def test_an_altered_message_is_decoded_or_malformed(message: tuple[bytes, Callable[[bytes], Any]]) -> None:
    data, read = message
    try:
        read(data)
    except MalformedMessage:
        pass


@given(st.sampled_from([read for _, read in MESSAGES]), st.binary(max_size=60))
def test_any_bytes_are_decoded_or_malformed(read: Callable[[bytes], Any], data: bytes) -> None:
    try:
        read(data)
    except MalformedMessage:
        pass


@pytest.mark.parametrize(("packed", "read"), MESSAGES)
def test_unaltered_messages_are_decoded(packed: bytes, read: Callable[[bytes], Any]) -> None:
    read(packed)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (2, {}),
        (3, "OUT"),
        (4, -1),
        (4, True),
        (4, None),
        (5, 4),
        (5, -1),
        (6, -1),
        (6, 1.0),
        (7, b"00"),
        (8, None),
        (9, 1),
        (10, -1),
        (10, True),
    ],
)
def test_each_field_of_a_body_is_checked(position: int, value: Any) -> None:
    fields = msgpack.unpackb(body(traceparent="00-a", tracestate="b", wants_timestamps=True, priority=7))
    assert len(fields) == 11
    fields[position : position + 1] = [value]
    with pytest.raises(MalformedMessage):
        unpack_body(msgpack.packb(fields), "m", 1)
