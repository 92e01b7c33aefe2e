"""Answers that are several, and word of those who have given up, on the bus."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from schemas.abandoned import AbandonedRequests, pack_abandoned, unpack_abandoned
from schemas.errors import ErrorCode, WeirError
from schemas.lost_attempts import MAX_REASON_LENGTH, pack_lost_attempts, unpack_lost_attempts
from schemas.messages import pack_answer, pack_answers, pack_end, pack_error, unpack_answers
from schemas.tensors import Tensor
from schemas.wire import WIRE_VERSION, MalformedMessage


def test_responses_and_their_end() -> None:
    tensor = Tensor("A", "INT8", [2], b"\1\2")
    error = WeirError(ErrorCode.NOT_FOUND, "gone")
    rows = [
        pack_answer(7, [tensor], {"a": 1}, is_final=False, run=("s.1", 4)),
        pack_error(7, error, is_final=False),
        pack_answer(7, [tensor], None, is_final=False, moments={"QUEUE_START": 5}, run=("s.1", 4)),
        pack_end(7, run=("s.1", 4)),
        pack_end(8),
        pack_answer(9, [tensor]),
    ]
    version, answers = unpack_answers(pack_answers(3, rows))
    assert version == 3
    assert [(answer.key, answer.is_final, answer.run, answer.number) for answer in answers] == [
        (7, False, "s.1", 4),
        (7, False, "", 0),
        (7, False, "s.1", 4),
        (7, True, "s.1", 4),
        (8, True, "", 0),
        (9, True, "", 0),
    ]
    assert answers[0].parameters == {"a": 1}
    assert answers[1].error is not None
    assert answers[1].error.message == "gone"
    assert answers[2].moments == {"QUEUE_START": 5}
    assert answers[3].outputs is None
    assert len(rows[-1]) == 3, "what is answered once carries nothing of this"


def test_what_was_abandoned() -> None:
    batches = [AbandonedRequests(5, "gateway-a", [1, 2]), AbandonedRequests(6, "gateway-b", [])]
    assert unpack_abandoned(pack_abandoned("scheduler", batches)) == ("scheduler", batches)


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("scheduler",),
        ("scheduler", 5),
        (5, []),
        ("scheduler", [5]),
        ("scheduler", [("5", "gateway", [1])]),
        ("scheduler", [(True, "gateway", [1])]),
        ("scheduler", [(5, 6, [1])]),
        ("scheduler", [(5, "gateway", 1)]),
        ("scheduler", [(5, "gateway", ["1"])]),
        ("scheduler", [(5, "gateway", {1: 1})]),
        ("scheduler", [(5, "gateway", [1], 1)]),
    ],
)
def test_what_abandons_nothing(fields: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_abandoned(msgpack.packb((WIRE_VERSION, *fields)))


@pytest.mark.parametrize(
    "ending",
    [(1, None), (True, 5), (True, None, 5), (True, None, "run", "1"), (True, None, "run", 1, 1)],
)
def test_answers_with_strange_endings(ending: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_answers(pack_answers(1, [(7, None, None, *ending)]))


def test_lost_attempts() -> None:
    assert unpack_lost_attempts(pack_lost_attempts([1, 2], "its process died")) == ([1, 2], "its process died")
    assert unpack_lost_attempts(pack_lost_attempts([], "x" * 1000)) == ([], "x" * MAX_REASON_LENGTH)


@pytest.mark.parametrize("fields", [(), ([1],), ([1], 5), ("12", "why"), (["1"], "why"), ([True], "why")])
def test_what_tells_of_no_lost_attempts(fields: tuple[object, ...]) -> None:
    for data in (msgpack.packb((WIRE_VERSION, *fields)), msgpack.packb((WIRE_VERSION + 1, [1], "why")), b"\xc1", b""):
        with pytest.raises(MalformedMessage):
            unpack_lost_attempts(data)
