"""A failure of one request of a message, or of a frame, ends that request alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway.inference import Bench
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Message
from weir.bus.payloads.fetch_plan import Loss, Outcome
from weir.calls import dispatch as inference_module
from weir.calls.catalog import ServedModel
from weir.calls.responses.outputs import RemoteOutputFetcher
from weir.calls.traffic.counters import TrafficCounters
from weir.calls.traffic.shadow import ShadowCopies
from weir.calls.traffic.split import TrafficSplit
from weir.runtime.containment import SITES
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.traffic import TrafficRule
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.calls import ResponseEnvelope, pack_end, pack_response
from weir.schemas.wire.codec import WIRE_VERSION, encode
from weir.schemas.wire.traffic import ShadowRule


@pytest.fixture
async def bench() -> Bench:
    return Bench()


def response(key: int, final: bool = True, run: Any = None) -> tuple[Any, ...]:
    return pack_response(key, [Tensor("OUT", "UINT8", [1], b"y")], None, final, None, run)


def deliver(bench: Bench, *rows: Any, version: Any = 1) -> None:
    """Delivers a message with these rows, whether or not they are well-formed."""
    bench.inference._on_responses(Message("reply.me", "", encode((WIRE_VERSION, version, rows)), ""))


def raising(error: type[Exception] = RecursionError) -> Any:
    def raise_error(*_: object) -> None:
        raise error("injected")

    return raise_error


class Slot:
    """Held by a request; counts how often it is freed."""

    freed = 0

    def free(self) -> None:
        self.freed += 1


@pytest.mark.parametrize("model", ["plain", "ordered"])
async def test_an_exception_of_one_caller_does_not_affect_other_responses(bench: Bench, model: str) -> None:
    first = bench.submit("1", model, then=raising())
    others = [bench.submit(name, model) for name in "23456"]
    first.slots = (slot := Slot(),)
    deliver(bench, *(response(pending.key) for pending in (first, *others)))
    assert bench.told[1] == ("1", "error")
    assert bench.names() == ["1", "1", "2", "3", "4", "5", "6"]
    assert slot.freed == 1
    assert bench.inference.in_flight == 0


@pytest.mark.parametrize("model", ["plain", "streams"])
async def test_a_stream_whose_caller_raises_has_ended_and_is_cancelled(bench: Bench, model: str) -> None:
    first, second = bench.submit("1", model, then=raising(ValueError)), bench.submit("2", model)
    deliver(bench, response(first.key, False, ("r", 0)), response(second.key, True, ("q", 0)))
    assert bench.names() == ["1", "1", "2"]
    assert bench.told[1] == ("1", "error")
    assert bench.inference.in_flight == 0
    deliver(bench, pack_end(first.key, None, ("r", 1)))
    await asyncio.sleep(0)
    assert (bench.names(), bench.cancels) == (["1", "1", "2"], 1)


@pytest.mark.parametrize(
    "row",
    [
        lambda key: (key,),
        lambda key: (key, [["OUT", "NO SUCH TYPE", [1], b"y"]], None),
        lambda key: (key, [["OUT", "UINT8", [1], b"y"]], 7),
        lambda key: (key, [["OUT", "UINT8", [1], b"y"]], None, "not a bool"),
        lambda key: (key, 2, {"not": "a text"}),
    ],
)
async def test_a_response_that_cannot_be_decoded_ends_its_own_request(bench: Bench, row: Any) -> None:
    first, bad, last = (bench.submit(name, "plain") for name in "123")
    deliver(bench, response(first.key), row(bad.key), response(last.key))
    assert sorted(bench.told) == [("1", b"y"), ("2", "error"), ("3", b"y")]
    assert bench.inference.malformed_messages == 1


async def test_only_the_row_without_a_key_is_dropped(bench: Bench) -> None:
    first, last = bench.submit("1", "plain"), bench.submit("2", "plain")
    deliver(bench, response(first.key), None, [], ["key"], {}, response(last.key))
    assert bench.names() == ["1", "2"]
    assert bench.inference.malformed_messages == 4


@pytest.mark.parametrize("rows", [7, None, {1: 2}, "text"])
async def test_a_malformed_message_is_dropped(bench: Bench, rows: Any) -> None:
    bench.submit("1", "plain")
    bench.inference._on_responses(Message("reply.me", "", encode((WIRE_VERSION, 1, rows)), ""))
    assert (bench.told, bench.inference.malformed_messages) == ([], 1)


SITES_OF_ONE_RESPONSE = [
    "weir.calls.dispatch:RequestDispatcher._on_response",
    "weir.calls.responses.delivery:ResponseDispatcher.deliver",
]


@pytest.mark.parametrize("site", SITES_OF_ONE_RESPONSE)
@pytest.mark.parametrize("model", ["plain", "ordered"])
async def test_an_exception_while_one_response_is_handled_ends_its_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, site: str, model: str
) -> None:
    pendings = [bench.submit(name, model) for name in "123"]
    function = SITES[site].function

    failed: list[Any] = []

    def failing_for_the_second(self: Any, *rest: Any, **named: Any) -> Any:
        if not failed and any(getattr(each, "key", None) == pendings[1].key for each in rest):
            failed.append(rest)
            raise RecursionError("injected")
        return function(self, *rest, **named)

    monkeypatch.setattr(SITES[site], "function", failing_for_the_second)
    deliver(bench, *(response(pending.key) for pending in pendings))
    assert {"1", "3"} <= set(bench.names())
    assert bench.inference.in_flight == 0


async def test_a_response_that_cannot_be_completed_is_an_internal_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = bench.submit("1", "plain"), bench.submit("2", "plain")
    first.slots = (slot := Slot(),)
    outcome = bench.inference._outputs.outcome

    def failing_for_the_first(pending: Any, *rest: Any) -> Any:
        if pending is first:
            raise MemoryError("injected")
        return outcome(pending, *rest)

    monkeypatch.setattr(bench.inference._outputs, "outcome", failing_for_the_first)
    deliver(bench, response(first.key), response(second.key))
    assert bench.told == [("1", "error"), ("2", b"y")]
    assert slot.freed == 1


@pytest.mark.parametrize("method", ["look_up", "hit", "store"])
async def test_with_a_failing_cache_requests_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("local")
    bench.answer(bench.submit("1", "cached"))
    site = SITES.get(f"weir.calls.cache.response_cache:ResponseCache.{method}")
    if site is not None:
        monkeypatch.setattr(site, "function", raising())
    else:
        monkeypatch.setattr(bench.cache, method, raising())
    pending = bench.submit("2", "cached", b"z" if method == "store" else b"x")
    await asyncio.sleep(0)
    bench.answer(pending)
    assert (bench.told, bench.inference.in_flight) == ([("1", b"y"), ("2", b"y")], 0)


async def test_a_request_that_cannot_be_packed_fails_and_its_frame_is_sent_without_it(bench: Bench) -> None:
    bench.submit("1", "plain")
    request = InferRequest("plain", inputs=[Tensor("IN", "UINT8", [1], b"x")])
    request.deadline_ms = 1 << 70
    bench.inference.submit(request, lambda outcome, final: bench.told.append(("bad", outcome)))
    bench.submit("3", "plain")
    await asyncio.sleep(0)
    assert bench.sent == [1, 3]
    assert [(name, outcome.code.name) for name, outcome in bench.told] == [("bad", "INTERNAL")]
    assert bench.inference.in_flight == 2


async def test_frames_that_cannot_be_sent_do_not_affect_other_models(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = bench.submit("1", "plain")
    monkeypatch.setattr(broken.model, "queue", "bad")
    subject_of = bench.live_layout.subject_of

    def failing(queue: str) -> str:
        if queue == "plain":
            raise ZeroDivisionError("injected")
        return subject_of(queue)

    monkeypatch.setattr(bench.live_layout, "subject_of", failing)
    other = bench.submit("2", "other")
    await asyncio.sleep(0)
    assert (bench.sent, bench.told) == ([other.key], [("1", "error")])


async def test_a_request_that_cannot_be_accepted_frees_what_it_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_module, "pack_body", raising(TypeError))
    slot = Slot()
    bench.inference._regions = type("Regions", (), {"hold": lambda *_: slot})()  # type: ignore[assignment]
    request = InferRequest("plain", inputs=[Tensor("IN", "UINT8", [1], b"x")])
    request.regions = ("region",)
    with pytest.raises(TypeError):
        bench.inference.submit(request, lambda *_: None)
    assert (slot.freed, bench.inference.in_flight) == (1, 0)


async def test_a_lost_stream_of_responses_is_cancelled_in_its_queue(bench: Bench) -> None:
    """With partitions that is the queue that its frame went to, not the one that goes by the model's name."""
    names = [str(number) for number in range(8)]
    for pending in [bench.submit(name, "spread") for name in names]:
        await asyncio.sleep(0)
        deliver(bench, response(pending.key, False, ("r", 0)))
        bench.inference._on_response(1, ResponseEnvelope(pending.key, [], None, None, False, None, "r", 1), False)
        await asyncio.sleep(0)
        assert isinstance(pending.queue, LiveQueue)
        assert bench.cancelled.pop() == pending.queue.cancel_subject
    assert bench.told == [(name, what) for name in names for what in (b"y", "error")]


async def test_a_stream_that_is_cancelled_and_listened_to_goes_on_to_its_end(bench: Bench) -> None:
    pending = bench.submit("1", "plain")
    await asyncio.sleep(0)
    deliver(bench, response(pending.key, False, ("r", 0)))
    bench.inference.cancel_and_listen(pending)
    await asyncio.sleep(0)
    assert bench.cancels == 1
    deliver(bench, response(pending.key, False, ("r", 1)), response(pending.key, True, ("r", 2)))
    assert bench.told == [("1", b"y")] * 3
    bench.inference.cancel_and_listen(pending)
    await asyncio.sleep(0)
    assert (bench.cancels, bench.inference.in_flight) == (1, 0)


async def test_a_request_without_responses_that_is_cancelled_and_listened_to_ends_at_once(bench: Bench) -> None:
    heard: list[Any] = []
    request = InferRequest("plain", inputs=[Tensor("IN", "UINT8", [1], b"x")])
    pending = bench.inference.submit(request, lambda *response: heard.append(response))
    await asyncio.sleep(0)
    bench.inference.cancel_and_listen(pending)
    await asyncio.sleep(0)
    deliver(bench, response(pending.key))
    ((error, is_final),) = heard
    assert (error.code, is_final, bench.cancels, bench.inference.in_flight) == (ErrorCode.CANCELLED, True, 1, 0)


async def test_what_waits_for_earlier_responses_is_not_ended_by_a_late_cancellation(bench: Bench) -> None:
    first, second = bench.submit("1"), bench.submit("2")
    await asyncio.sleep(0)
    deliver(bench, response(second.key))
    bench.inference.cancel_and_listen(second)
    deliver(bench, response(first.key))
    await asyncio.sleep(0)
    assert (bench.told, bench.cancels) == ([("1", b"y"), ("2", b"y")], 0)


class Fetcher:
    """Fetches nothing until it is told to; `fails` makes each fetch raise."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.ends: list[Any] = []

    def fetch(self, _ref: PayloadRef, on_end: Any) -> None:
        if self.fails:
            raise OSError("injected")
        self.ends.append(on_end)

    def end(self, outcome: Outcome) -> None:
        self.ends.pop(0)(outcome)


def remote(key: int) -> tuple[Any, ...]:
    ref = PayloadRef("weir-worker-1@elsewhere_1_0.131072", 0, 1, 64, 100_000)
    return pack_response(key, [Tensor("OUT", "UINT8", [100_000], ref)])


async def test_a_failing_fetch_loses_only_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr("weir.calls.responses.outputs.lies_elsewhere", lambda _segment: True)
    monkeypatch.setattr("weir.calls.dispatch.MAX_RERUNS", 0)
    remote_answers: RemoteOutputFetcher = bench.inference._remote
    first, second = bench.submit("1", "plain"), bench.submit("2", "plain")
    remote_answers._fetcher = Fetcher(fails=True)  # type: ignore[assignment]
    deliver(bench, remote(first.key), response(second.key))
    assert bench.told == [("1", "error"), ("2", b"y")]
    assert not remote_answers.by_key


async def test_a_response_that_can_t_be_fetched_at_all_is_an_error_and_the_request_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, fetcher, heard = Bench(), Fetcher(), list[Any]()
    monkeypatch.setattr("weir.calls.responses.outputs.lies_elsewhere", lambda _segment: True)
    bench.inference._remote._fetcher = fetcher  # type: ignore[assignment]
    request = InferRequest("plain", inputs=[Tensor("IN", "UINT8", [1], b"x")])
    pending = bench.inference.submit(request, lambda *response: heard.append(response))
    ref = PayloadRef("weir-worker-01234567-1_1.131072", 0, 1, 64, 100_000)
    deliver(bench, pack_response(pending.key, [Tensor("OUT", "UINT8", [100_000], ref)]))
    fetcher.end(Loss.NO_ADDRESS)
    ((error, is_final),) = heard
    assert (error.code, is_final, bench.inference.in_flight) == (ErrorCode.UNAVAILABLE, True, 0)
    assert "--payload-listen" in error.message
    await asyncio.sleep(0)
    assert len(bench.released) == 1


async def test_a_fetched_response_that_cannot_be_completed_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setattr("weir.calls.responses.outputs.lies_elsewhere", lambda _segment: True)
    fetcher = Fetcher()
    bench.inference._remote._fetcher = fetcher  # type: ignore[assignment]
    first, second = bench.submit("1", "plain", then=raising()), bench.submit("2", "plain")
    deliver(bench, remote(first.key), remote(second.key))
    fetcher.end(b"a")
    fetcher.end(b"b")
    assert bench.told == [("1", b"a"), ("1", "error"), ("2", b"b")]
    third = bench.submit("3", "plain")
    deliver(bench, remote(third.key))
    monkeypatch.setattr(bench.inference._outputs, "outcome", raising())
    fetcher.end(b"c")
    assert bench.told[3:] == [("3", "error")]
    assert bench.inference.in_flight == 0


@pytest.mark.parametrize("is_within_reach", [True, False])
@pytest.mark.parametrize(("without_room", "code"), [(2 << 20, ErrorCode.UNAVAILABLE), (1 << 20, ErrorCode.INVALID_ARG)])
async def test_what_no_message_takes_is_tried_again_once_there_is_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, without_room: int, code: ErrorCode, is_within_reach: bool
) -> None:
    monkeypatch.setattr(bench, "place", lambda *_: [], raising=False)
    monkeypatch.setattr(bench, "bytes_without_room", lambda *_: without_room, raising=False)
    monkeypatch.setattr(bench, "is_within_reach", lambda _model: is_within_reach, raising=False)
    inputs = [{"name": "IN", "data_type": "TYPE_UINT8", "dims": [-1]}]
    config = ModelConfig.model_validate({"name": "wide", "input": inputs})
    bench.models["wide"] = ServedModel("wide", config, [1], {}, {1: "load"})
    request = InferRequest("wide", inputs=[Tensor("IN", "UINT8", [2 << 20], bytes(2 << 20))])
    with pytest.raises(WeirError) as caught:
        bench.inference.submit(request, lambda response: None)
    assert caught.value.code is code
    assert bool(caught.value.retry_after_s) == (code is ErrorCode.UNAVAILABLE)
    is_named = "--payload-listen" in caught.value.message
    assert is_named == (code is ErrorCode.INVALID_ARG and not is_within_reach)
    assert bench.inference.in_flight == 0


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_copy_holds_the_slots_of_its_request(
    bench: Bench, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, counters, shadow = Slot(), TrafficCounters(), ShadowRule(2, 1.0)
    counters.copies = ShadowCopies(counters, bench.inference.submit_copy)
    split = TrafficSplit("ordered", TrafficRule({1: 1.0}), [1, 2], counters, shadow=shadow)
    monkeypatch.setattr(bench.models["ordered"], "split", split)
    monkeypatch.setattr(bench, "hold", lambda *_: [slot])
    live = bench.submit("1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert bench.sent == [live.key, live.key + 1]
    if is_cancelled:
        bench.inference.cancel(live)
    else:
        deliver(bench, response(live.key))
    assert slot.freed == 0
    deliver(bench, response(live.key + 1), version=2)
    assert (slot.freed, counters.copies._count, bench.inference.in_flight) == (1, 0, 0)
    assert bench.told == ([] if is_cancelled else [("1", b"y")])
    counted = [("ordered", 2, "shadow")] if is_cancelled else [("ordered", 1, "split"), ("ordered", 2, "shadow")]
    assert list(counters.arms) == counted
