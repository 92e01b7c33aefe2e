"""`Inference` on a bus of the test's own: answers in order, look-ups in a cache, and callers that give up in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from inference_bench import Bench

from bus import subjects
from bus.connection import Message
from calls import answer_order
from calls.pending import Pending
from schemas.errors import WeirError, unavailable
from schemas.messages import pack_answer, pack_answers, pack_end, pack_error
from schemas.tensors import PayloadRef, Tensor


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_an_answer_waits_for_those_before_it_in_its_line_only(bench: Bench) -> None:
    first, second, third = (bench.submit(name) for name in "123")
    other = bench.submit("other", "other")
    bench.answer(third)
    bench.hear(pack_error(second.key, unavailable("no")))
    assert bench.told == []
    bench.answer(other)
    assert bench.names() == ["other"]
    bench.answer(first, b"1")
    assert bench.told[1:] == [("1", b"1"), ("2", "error"), ("3", b"y")]


async def test_who_is_given_up_holds_up_nobody_and_hears_nothing(bench: Bench) -> None:
    first, second, third = (bench.submit(name) for name in "123")
    bench.answer(second)
    bench.answer(third)
    bench.inference.abandon(second)  # its answer waits
    bench.inference.abandon(first)  # it has none
    bench.inference.abandon(first)
    assert bench.names() == ["3"]
    await asyncio.sleep(0)
    assert bench.cancels == 1
    bench.answer(first)
    assert bench.names() == ["3"]


async def test_whoever_is_told_may_submit_and_give_up(bench: Bench) -> None:
    later: list[Pending] = []
    first = bench.submit("1", then=lambda: (bench.inference.abandon(later[0]), bench.submit("4")))
    later += [bench.submit("2"), bench.submit("3")]
    other = bench.submit("other", "other", then=lambda: bench.inference.abandon(first))
    bench.submit("after", "other")
    for pending in later:
        bench.answer(pending)
    bench.answer(first)
    assert bench.names() == ["1", "3"]
    bench.answer(other)
    assert bench.names() == ["1", "3", "other"]


async def test_what_waits_in_a_worker_s_memory_is_given_back_with_its_request() -> None:
    bench = Bench(keeps_references=True)
    _, second, third = (bench.submit(name, "streams") for name in "123")
    refs = [PayloadRef("weir-worker-1_1_0.131072", number, 1, 64, 100_000) for number in range(2)]
    for pending, ref in zip((second, third), refs, strict=True):
        tensors = [Tensor("OUT", "UINT8", [100_000], ref)]
        bench.hear(pack_answer(pending.key, tensors, None, True, None, ("r", 0)))
    assert (bench.told, bench.released) == ([], [])
    bench.inference.abandon(second)
    await asyncio.sleep(0)
    assert bench.released == [("weir-worker-1_1_0.131072", 0, 1)], "and nothing of who still waits"


async def test_a_caller_that_fails_leaves_the_line_whole(bench: Bench) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    first, second = bench.submit("1", then=fail), bench.submit("2")
    bench.answer(second)
    bench.answer(first)
    third = bench.submit("3")
    bench.answer(third)
    assert bench.names() == ["1", "1", "2", "3"]  # the first has heard an error after its response


async def test_what_waits_takes_up_the_room_of_requests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calls.in_flight.MAX_IN_FLIGHT", 4)
    first, *others = (bench.submit(name) for name in "1234")
    for pending in others:
        bench.answer(pending)
    with pytest.raises(WeirError, match="Exceeds maximum queue size"):
        bench.submit("5")
    bench.answer(first)
    assert bench.names() == ["1", "2", "3", "4"]
    bench.submit("5")


async def test_a_stream_whose_turn_it_is_not_ends_when_too_much_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_order, "MAX_HELD_BYTES", 1000)
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


async def test_after_a_loss_nothing_leaves_before_everything_does_in_order(bench: Bench) -> None:
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


async def test_a_hit_comes_later_and_only_to_who_is_still_there() -> None:
    bench = Bench("local")
    bench.answer(bench.submit("1", "cached"))
    assert bench.names() == ["1"]
    pending = bench.submit("2", "cached")
    gone = bench.submit("3", "cached")
    assert bench.inference.in_flight == 2
    bench.inference.abandon(gone)
    bench.inference._outbox.resend_all()
    await asyncio.sleep(0)
    assert bench.told[1:] == [("2", b"y")]
    bench.inference.abandon(pending)
    assert bench.inference.in_flight == bench.cancels == 0
    assert len(bench.sent) == 0, "hits are not sent, nor sent again"


async def test_a_request_is_queued_when_the_shared_cache_knows_nothing() -> None:
    bench = Bench("nats")
    assert bench.cache is not None
    shared: Any = bench.cache._shared
    asked, gone = bench.submit("1", "cached"), bench.submit("2", "cached", b"z")
    bench.inference._outbox.resend_all()
    await asyncio.sleep(0)
    assert not bench.sent, "not before the cache has answered"
    bench.inference.abandon(gone)
    for reply in bench.lookups:
        shared._on_answer(Message(reply, "", b"", "404"))
    await asyncio.sleep(0)
    assert bench.sent == [asked.key]
    assert bench.cancels == 0
    bench.answer(asked)
    assert bench.told == [("1", b"y")]
    found = bench.submit("3", "cached")
    kept = pack_answers(1, [pack_answer(0, [Tensor("OUT", "UINT8", [1], b"k")])])
    shared._on_answer(Message(bench.lookups[-1], "", kept, ""))
    assert bench.told[1:] == [("3", b"k")]
    assert found.key not in bench.sent
    row = bench.cache.counters.snapshot()[0]
    assert (row["cache_hit"][0], row["cache_miss"][0]) == (1, 1)
    assert subjects.cache_answers("me") in bench.lookups[0]


async def test_what_is_given_up_before_it_has_left_does_not_leave(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calls.outbox.MAX_FRAMES_ON_THE_WAY", 1)
    first = bench.submit("1", "other")
    await asyncio.sleep(0)
    gone, later, alone = (bench.submit(name, "other") for name in "234")
    bench.inference.abandon(gone)
    bench.inference._outbox._on_publish_ack(Message("ack.me.1", "", b"{}", ""))
    await asyncio.sleep(0)
    assert bench.sent == [first.key, later.key, alone.key]
    last = bench.submit("5", "other")
    bench.inference.abandon(last)
    bench.inference._outbox._on_publish_ack(Message("ack.me.2", "", b"{}", ""))
    await asyncio.sleep(0)
    assert bench.sent == [first.key, later.key, alone.key], "a frame of nothing is not sent"
