"""Completions and cancelled requests: decoded as they were sent, or malformed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.wire.batches import (
    BatchEnded,
    BatchLost,
    BatchNotRun,
    BatchRefused,
    BatchReleased,
    CancelledRequests,
    Completions,
    DirectRunReport,
    DirectRuns,
    NotRunReason,
    RunningCancellation,
    unpack_completions,
)
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage


def test_completions_are_decoded_as_they_were_sent():
    dones = [
        BatchEnded(1, 250, [3]),
        BatchLost(2),
        BatchNotRun(3, NotRunReason.SLOW),
        BatchReleased(4, 5),
        BatchRefused(5, 7),
    ]
    assert unpack_completions(Completions("worker", dones).pack()) == (dones, ())
    runs = [DirectRuns("m", 1, [(2, 3)], 500)]
    assert unpack_completions(DirectRunReport("worker", dones, runs).pack()) == (dones, runs)


@pytest.mark.parametrize(
    "message",
    [
        None,
        [WIRE_VERSION, "worker"],
        [WIRE_VERSION + 1, "worker", [[1, 0, 5]]],
        [WIRE_VERSION, "worker", 3],
        [WIRE_VERSION, "worker", [3]],
        [WIRE_VERSION, "worker", [[9, 0]]],
        [WIRE_VERSION, "worker", [[2, 0, 99]]],
        [WIRE_VERSION, "worker", [["1", 0, 5]]],
        [WIRE_VERSION, "worker", [[1, None, 5]]],
        [WIRE_VERSION, "worker", [[1, 0, 5.0]]],
        [WIRE_VERSION, "worker", [[1, 0, 5], [[], 0, 5]]],
    ],
)
def test_malformed_completions(message: Any):
    with pytest.raises(MalformedMessage):
        unpack_completions(msgpack.packb(message))


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_malformed(data: bytes):
    try:
        unpack_completions(data)
    except MalformedMessage:
        pass


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
