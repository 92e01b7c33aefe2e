"""`RequestDispatcher` on a bus of the test's own: answers in order, look-ups in a cache, and callers that give up in
between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway.inference import Bench
from weir.bus.naming import subjects
from weir.bus.nats.connection import Message
from weir.calls.in_flight import PendingRequest
from weir.calls.responses import delivery as answer_order
from weir.schemas.core.errors import WeirError, unavailable
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.calls import Caller, pack_end, pack_error, pack_response, pack_responses


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_response_waits_for_earlier_requests_of_its_model_only(bench: Bench) -> None:
    first, second, third = (bench.submit(name) for name in "123")
    other = bench.submit("other", "other")
    bench.answer(third)
    bench.hear(pack_error(second.key, unavailable("no")))
    assert bench.told == []
    bench.answer(other)
    assert bench.names() == ["other"]
    bench.answer(first, b"1")
    assert bench.told[1:] == [("1", b"1"), ("2", "error"), ("3", b"y")]


async def test_responses_of_an_owner_wait_for_its_own_requests_only(bench: Bench) -> None:
    first, second = (bench.submit(name, caller=Caller("key a")) for name in ("a1", "a2"))
    other = bench.submit("b", caller=Caller("key b"))
    bench.answer(other)
    assert bench.names() == ["b"]
    bench.answer(second)
    bench.answer(first)
    assert bench.names() == ["b", "a1", "a2"]


async def test_a_cancelled_request_delays_no_other_and_gets_no_response(bench: Bench) -> None:
    first, second, third = (bench.submit(name) for name in "123")
    bench.answer(second)
    bench.answer(third)
    bench.inference.cancel(second)  # its answer waits
    bench.inference.cancel(first)  # it has none
    bench.inference.cancel(first)
    assert bench.names() == ["3"]
    await asyncio.sleep(0)
    assert bench.cancels == 1
    bench.answer(first)
    assert bench.names() == ["3"]


async def test_a_callback_may_submit_and_cancel_requests(bench: Bench) -> None:
    later: list[PendingRequest] = []
    first = bench.submit("1", then=lambda: (bench.inference.cancel(later[0]), bench.submit("4")))
    later += [bench.submit("2"), bench.submit("3")]
    other = bench.submit("other", "other", then=lambda: bench.inference.cancel(first))
    bench.submit("after", "other")
    for pending in later:
        bench.answer(pending)
    bench.answer(first)
    assert bench.names() == ["1", "3"]
    bench.answer(other)
    assert bench.names() == ["1", "3", "other"]


async def test_cancelling_releases_the_slots_of_buffered_responses() -> None:
    bench = Bench(keeps_references=True)
    _, second, third = (bench.submit(name, "streams") for name in "123")
    refs = [PayloadRef("weir-worker-1_1_0.131072", number, 1, 64, 100_000) for number in range(2)]
    for pending, ref in zip((second, third), refs, strict=True):
        tensors = [Tensor("OUT", "UINT8", [100_000], ref)]
        bench.hear(pack_response(pending.key, tensors, None, True, None, ("r", 0)))
    assert (bench.told, bench.released) == ([], [])
    bench.inference.cancel(second)
    await asyncio.sleep(0)
    assert bench.released == [("weir-worker-1_1_0.131072", 0, 1)], "and nothing of who still waits"


async def test_a_failing_callback_keeps_the_order_of_the_others(bench: Bench) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    first, second = bench.submit("1", then=fail), bench.submit("2")
    bench.answer(second)
    bench.answer(first)
    third = bench.submit("3")
    bench.answer(third)
    assert bench.names() == ["1", "1", "2", "3"]  # the first has heard an error after its response


async def test_buffered_responses_count_towards_the_bounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.calls.in_flight.MAX_IN_FLIGHT", 4)
    first, *others = (bench.submit(name) for name in "1234")
    for pending in others:
        bench.answer(pending)
    with pytest.raises(WeirError, match="Exceeds maximum queue size"):
        bench.submit("5")
    bench.answer(first)
    assert bench.names() == ["1", "2", "3", "4"]
    bench.submit("5")


async def test_a_stream_that_is_not_next_fails_when_the_buffer_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_order, "MAX_BUFFERED_BYTES", 1000)
    first, second = bench.submit("1", "streams"), bench.submit("2", "streams")
    for number in range(4):
        bench.answer(second, bytes(400), final=False, run=("r", number))
        bench.answer(first, bytes(400), final=False, run=("q", number))
    assert bench.names() == ["1"] * 4
    bench.hear(pack_end(first.key, None, ("q", 4)))
    assert bench.told[4] == ("1", None)
    assert bench.told[5:] == [("2", bytes(400))] * 3 + [("2", "error")]
    await asyncio.sleep(0)
    assert bench.cancels == 1
    assert bench.inference.in_flight == 0


async def test_after_a_loss_all_requests_are_sent_again_in_order(bench: Bench) -> None:
    """The broker may be back before its streams are: what found none would come after what was accepted later."""
    for name in "12":
        bench.submit(name)
    await asyncio.sleep(0)
    bench.losses += 1
    bench.submit("3")
    await asyncio.sleep(0)
    assert bench.sent == [1, 2]
    bench.inference._outbox.resend_all()
    await asyncio.sleep(0)
    assert bench.sent[2:] == [1, 2, 3]
    bench.submit("4")
    await asyncio.sleep(0)
    assert bench.sent[5:] == [4]


async def test_a_cache_hit_is_delivered_later_unless_cancelled() -> None:
    bench = Bench("local")
    bench.answer(bench.submit("1", "cached"))
    assert bench.names() == ["1"]
    pending = bench.submit("2", "cached")
    gone = bench.submit("3", "cached")
    assert bench.inference.in_flight == 2
    bench.inference.cancel(gone)
    bench.inference._outbox.resend_all()
    await asyncio.sleep(0)
    assert bench.told[1:] == [("2", b"y")]
    bench.inference.cancel(pending)
    assert bench.inference.in_flight == bench.cancels == 0
    assert len(bench.sent) == 0, "hits are not sent, nor sent again"


async def test_a_request_that_is_not_in_the_shared_cache_is_queued() -> None:
    bench = Bench("nats")
    assert bench.cache is not None
    shared: Any = bench.cache._shared
    asked, gone = bench.submit("1", "cached"), bench.submit("2", "cached", b"z")
    bench.inference._outbox.resend_all()
    await asyncio.sleep(0)
    assert not bench.sent, "not before the cache has answered"
    bench.inference.cancel(gone)
    for reply in bench.lookups:
        shared._on_reply(Message(reply, "", b"", "404"))
    await asyncio.sleep(0)
    assert bench.sent == [asked.key]
    assert bench.cancels == 0
    bench.answer(asked)
    assert bench.told == [("1", b"y")]
    found = bench.submit("3", "cached")
    kept = pack_responses(1, [pack_response(0, [Tensor("OUT", "UINT8", [1], b"k")])])
    shared._on_reply(Message(bench.lookups[-1], "", kept, ""))
    assert bench.told[1:] == [("3", b"k")]
    assert found.key not in bench.sent
    row = bench.cache.counters.snapshot()[0]
    assert (row["cache_hit"][0], row["cache_miss"][0]) == (1, 1)
    assert subjects.cache_replies("me") in bench.lookups[0]


async def test_a_request_cancelled_before_it_is_sent_is_not_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.calls.outbox.MAX_UNACKNOWLEDGED_FRAMES", 1)
    first = bench.submit("1", "other")
    await asyncio.sleep(0)
    gone, later, alone = (bench.submit(name, "other") for name in "234")
    bench.inference.cancel(gone)
    bench.inference._outbox._on_publish_ack(Message("ack.me.1", "", b"{}", ""))
    await asyncio.sleep(0)
    assert bench.sent == [first.key, later.key, alone.key]
    last = bench.submit("5", "other")
    bench.inference.cancel(last)
    bench.inference._outbox._on_publish_ack(Message("ack.me.2", "", b"{}", ""))
    await asyncio.sleep(0)
    assert bench.sent == [first.key, later.key, alone.key], "a frame of nothing is not sent"
