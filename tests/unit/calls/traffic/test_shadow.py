"""Pairs of responses: in which order and how they may come, and what is kept of them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import eventually
from weir.calls.traffic import shadow
from weir.calls.traffic.shadow import ResponsePair, ShadowComparisons, WorstRequest
from weir.schemas.core.errors import WeirError, unavailable
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor, pack_bytes
from weir.schemas.wire.request_body import pack_body

KEY = ("m", 2)


def response(*values: float) -> InferResponse:
    return InferResponse("m", "1", outputs=[Tensor.from_numpy("OUT", np.array([values], np.float32), "FP32")])


def body(*values: float) -> bytes:
    return pack_body(InferRequest("m", inputs=[Tensor.from_numpy("IN", np.array([values], np.float32), "FP32")]))


class Callers:
    """What the callers of requests got."""

    def __init__(self) -> None:
        self.comparisons = ShadowComparisons()
        self.worst: list[WorstRequest] = []
        self.comparisons.on_worst = self.worst.append
        self.got: list[Any] = []

    def run(
        self, live: InferResponse | WeirError | None, copied: InferResponse | WeirError, live_first: bool = True
    ) -> None:
        pair = ResponsePair(self.comparisons, KEY, "r", body(1, 2))
        take = [
            partial(pair.on_response, self._receive, is_live, outcome, True)
            for is_live, outcome in ((True, live), (False, copied))
        ]
        for call in take if live_first else reversed(take):
            call()

    def _receive(self, outcome: Any, is_final: bool) -> None:
        assert is_final
        self.got.append(outcome)
        if isinstance(outcome, InferResponse):
            for tensor in outcome.outputs:
                tensor.data = b""  # as a frontend that has sent it

    @property
    def counts(self) -> tuple[int, int, int, int]:
        totals = self.comparisons.of(KEY)
        return totals.compared, totals.differing, totals.failed, totals.skipped


@pytest.mark.parametrize("live_first", [True, False])
def test_responses_are_compared_in_any_order(live_first: bool) -> None:
    callers = Callers()
    callers.run(response(1, 2), response(1, 2), live_first)
    callers.run(response(1, 2), response(1, 3), live_first)
    assert callers.counts == (2, 1, 0, 0)
    (worst,) = callers.worst
    assert (worst.slot, worst.sample.request_id) == (0, "r")
    contents = worst.sample.inputs, worst.sample.live, worst.sample.copied
    assert [np.frombuffer(tensors[0].data, np.float32).tolist() for tensors in contents] == [[1, 2], [1, 2], [1, 3]]
    assert len(callers.got) == 4
    assert callers.comparisons.held_bytes == 0


def test_failures_and_cancelled_requests_end_their_comparison() -> None:
    callers = Callers()
    callers.run(response(1), unavailable("copy"))
    callers.run(unavailable("live"), response(1))
    callers.run(None, response(1), live_first=False)
    assert callers.counts == (0, 0, 1, 0)
    pair = ResponsePair(callers.comparisons, KEY, "", b"")
    pair.on_response(lambda *_: None, False, response(1), True)  # the request was cancelled: it has no response
    assert callers.comparisons.held_bytes == 4
    del pair
    assert callers.comparisons.held_bytes == 0


def test_outputs_without_room_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    callers = Callers()
    monkeypatch.setattr(shadow, "MAX_OUTPUT_BYTES", 8)
    callers.run(response(1, 2, 3), response(1, 2, 3))
    assert callers.counts == (0, 0, 0, 1)
    monkeypatch.setattr(shadow, "MAX_HELD_BYTES", 12)
    waiting = ResponsePair(callers.comparisons, KEY, "", b"")
    waiting.on_response(lambda *_: None, False, response(1, 2), True)
    callers.run(response(1, 2), response(1, 2))
    assert callers.counts == (0, 0, 0, 2)
    waiting.on_response(lambda *_: None, True, response(1), True)
    assert callers.counts == (1, 1, 0, 2)


def test_long_outputs_of_strings_are_skipped() -> None:
    callers = Callers()
    for length, counts in ((1000, (1, 0, 0, 0)), (70_000, (1, 0, 0, 1))):
        words = [
            InferResponse("m", "1", outputs=[Tensor("OUT", "BYTES", [1], pack_bytes([b"x" * length]))])
            for _ in range(2)
        ]
        callers.run(*words)
        assert callers.counts == counts


def test_only_the_worst_are_kept() -> None:
    callers = Callers()
    for number in range(1, 40):
        callers.run(response(1), response(1 + number / 100))
    assert {worst.slot for worst in callers.worst} == set(range(shadow.KEPT_SAMPLES))
    last = {worst.slot: worst.difference.score for worst in callers.worst}
    assert sorted(last.values()) == pytest.approx([n / (100 + n) for n in range(30, 40)])
    before = len(callers.worst)
    callers.run(response(1), response(1.01))
    assert len(callers.worst) == before


async def test_large_outputs_are_compared_outside_of_the_event_loop() -> None:
    callers = Callers()
    callers.run(response(*range(5000)), response(*range(1, 5001)))
    assert callers.counts == (0, 0, 0, 0)
    await eventually(lambda: callers.counts == (1, 1, 0, 0))
    await asyncio.sleep(0)
    assert callers.comparisons.held_bytes == 0
    callers.comparisons.close()
