"""Responses, cancellations and lost attempts."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage
from weir.schemas.wire.messages import (
    MAX_REASON_LENGTH,
    CancelledRequests,
    LostAttempts,
    RunningCancellation,
    Timestamps,
    pack_end,
    pack_error,
    pack_response,
    pack_responses,
    unpack_responses,
)


def test_responses_and_their_end() -> None:
    tensor = Tensor("A", "INT8", [2], b"\1\2")
    error = WeirError(ErrorCode.NOT_FOUND, "gone")
    rows = [
        pack_response(7, [tensor], {"a": 1}, is_final=False, run=("s.1", 4)),
        pack_error(7, error, is_final=False),
        pack_response(7, [tensor], None, is_final=False, timestamps={"QUEUE_START": 5}, run=("s.1", 4)),
        pack_end(7, run=("s.1", 4)),
        pack_end(8),
        pack_response(9, [tensor]),
    ]
    version, answers = unpack_responses(pack_responses(3, rows))
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
    assert answers[2].timestamps == {"QUEUE_START": 5}
    assert answers[3].outputs is None
    assert len(rows[-1]) == 3, "what is answered once carries nothing of this"


TRACED: Timestamps = {"QUEUE_START": 5, "BATCH_ID": 6, "SCHEDULER": "scheduler-1", "WORKER": "worker-2"}


def test_cancelled_requests_survive_packing() -> None:
    batches = [CancelledRequests(5, "gateway-a", [1, 2]), CancelledRequests(6, "gateway-b", [])]
    message = RunningCancellation("scheduler", batches)
    assert RunningCancellation.unpack(message.pack()) == message


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
def test_malformed_cancellations(fields: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessage):
        RunningCancellation.unpack(msgpack.packb((WIRE_VERSION, *fields)))


@pytest.mark.parametrize(
    "ending",
    [(1, None), (True, 5), (True, None, 5), (True, None, "run", "1")],
)
def test_responses_with_malformed_last_fields(ending: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_responses(pack_responses(1, [(7, None, None, *ending)]))


def test_lost_attempts() -> None:
    lost = LostAttempts([1, 2], "its process died")
    assert LostAttempts.unpack(lost.pack()) == lost
    with pytest.raises(MalformedMessage):
        LostAttempts.unpack(LostAttempts([], "x" * (MAX_REASON_LENGTH + 1)).pack())


@pytest.mark.parametrize("fields", [(), ([1],), ([1], 5), ("12", "why"), (["1"], "why"), ([True], "why")])
def test_malformed_lost_attempts(fields: tuple[object, ...]) -> None:
    for data in (msgpack.packb((WIRE_VERSION, *fields)), msgpack.packb((WIRE_VERSION + 1, [1], "why")), b"\xc1", b""):
        with pytest.raises(MalformedMessage):
            LostAttempts.unpack(data)
