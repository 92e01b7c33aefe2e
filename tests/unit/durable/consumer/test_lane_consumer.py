"""What becomes of the messages of one lane: each ends by itself, whatever it contains, and nothing of it is kept then."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest

from tests.support.gateway.durable_lane import OneLane, answer_with_input, body_of, one_lane
from tests.support.waiting import eventually
from weir.bus.nats.jetstream import StoredMessage
from weir.durable.consumer.lane_consumer import LaneConsumer
from weir.durable.consumer.runner import RequestRunner
from weir.durable.records.recorder import Recorder
from weir.durable.requests.request import DurableRequest
from weir.runtime.containment import SITES, failures
from weir.schemas.core.errors import unavailable
from weir.schemas.core.requests import InferResponse

FAULTY = "faulty"

LAST_RESORTS = {
    "_on_unexpected_error",
    "_record_minimal",
    "fail_unexpected",
    "cancel",
    "release_object",
    "_mark_ending",
    "_store",
    "_acknowledge",
    "_finish",
}
"""What ends a request after an exception, and so must not raise itself."""

STEPS = [
    (owner, name)
    for owner in (LaneConsumer, RequestRunner, Recorder)
    for name, step in vars(owner).items()
    if isfunction(step) and "DurableRequest" in step.__annotations__.values() and name not in LAST_RESORTS
]
"""The functions that handle a request, whoever calls them."""


def replace_step(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replaces a step; within what contains its exceptions, if it is an entry point."""
    site = SITES.get(f"{owner.__module__}:{owner.__qualname__}.{name}")
    if site is None:
        monkeypatch.setattr(owner, name, wrap(vars(owner)[name]))
    else:
        monkeypatch.setattr(site, "function", wrap(site.function))


async def test_requests_are_answered_recorded_and_acknowledged() -> None:
    async with one_lane() as lane:
        for number in range(3):
            lane.deliver(body_of(number), Nats_Msg_Id=f"r{number}", Weir_Reply_To="answers")
        assert await lane.settled("r0", "r1", "r2") == dict.fromkeys(("r0", "r1", "r2"), "succeeded")
        assert len(lane.broker.answers) == 3


def concerns_faulty(*arguments: Any) -> bool:
    return any(isinstance(argument, DurableRequest) and argument.headers.id == FAULTY for argument in arguments)


def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises for one request."""

    def call(*arguments: Any, **named: Any) -> Any:
        if concerns_faulty(*arguments):
            raise RuntimeError("raised by the test")
        return function(*arguments, **named)

    return call


async def ask_everything(lane: OneLane) -> None:
    """Has the faulty request, among others, go every way that there is."""
    lane.broker.objects["object"] = body_of(1)
    lane.model.answer = lambda request: None if request.id == "no answer" else answer_with_input(request)
    passed = str(int(time.time() * 1000) - 5)
    ways: list[tuple[bytes, dict[str, str]]] = [
        (body_of(1), {}),
        (b"{no json", {}),
        (b"", {"Weir_Object": "object"}),
        (b"", {"Weir_Object": "nowhere"}),
        (body_of(1), {"Weir_Deadline_Ms": passed}),
        (body_of(1), {"Weir_Tenant": "t", "Weir_Reply_To": "answers"}),
    ]
    for number, (body, headers) in enumerate(ways):
        ids = [f"before{number}", f"after{number}"]
        lane.broker.results.clear()
        lane.deliver(body_of(1), Nats_Msg_Id=ids[0])
        lane.deliver(body, Nats_Msg_Id=FAULTY, **headers)
        lane.deliver(body_of(1), Nats_Msg_Id=ids[1])
        outcomes = await lane.settled(*ids)
        assert set(outcomes.values()) == {"succeeded"}
    # As one that may have been begun by an owner before, which is looked up first.
    lane.broker.results.clear()
    lane.begin(started_sequence=1000)
    lane.deliver(body_of(1), Nats_Msg_Id="before")
    lane.deliver(body_of(1), Nats_Msg_Id=FAULTY)
    lane.deliver(body_of(1), Nats_Msg_Id="after")
    assert set((await lane.settled("before", "after")).values()) == {"succeeded"}


def test_there_are_steps() -> None:
    assert len(STEPS) > 25


@pytest.mark.parametrize(("owner", "name"), STEPS)
async def test_an_exception_ends_one_request_and_no_other(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_step(monkeypatch, owner, name, faulty)
    async with one_lane() as lane:
        await ask_everything(lane)  # all are acknowledged, the faulty one as well
        assert not len(lane.recorder)


async def test_a_body_that_breaks_its_parser_goes_to_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_arguments: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr("weir.durable.consumer.runner.read_body", parse)
    async with one_lane() as lane:
        lane.deliver(body_of(1), Nats_Msg_Id="r")
        assert await lane.settled("r") == {"r": "dead-lettered"}
        assert lane.broker.dead == [("r", body_of(1))]


def held_requests() -> int:
    gc.collect()
    return sum(type(found) is DurableRequest for found in gc.get_objects())


async def test_nothing_is_kept_of_a_request_with_a_deadline_once_it_has_ended() -> None:
    deadline = str(int(time.time() * 1000) + 3_600_000)
    async with one_lane() as lane:
        for number in range(20):
            lane.deliver(body_of(number), Nats_Msg_Id=f"r{number}", Weir_Deadline_Ms=deadline)
        await lane.settled(*(f"r{number}" for number in range(20)))
        assert held_requests() == 0


async def test_deadlines_of_requests_that_have_ended_are_not_kept_for_ever() -> None:
    deadline = str(int(time.time() * 1000) + 3_600_000)
    async with one_lane() as lane:
        for number in range(5000):
            lane.deliver(b"{", Nats_Msg_Id=f"r{number}", Weir_Deadline_Ms=deadline)
            if number % 100 == 0:
                await eventually(lambda: not len(lane.intake))
        assert len(lane.intake._queue._expiries_ms) == len(lane.intake)


async def test_the_next_owner_sends_an_answer_again_under_the_same_name() -> None:
    async with one_lane() as lane:
        lane.deliver(body_of(7), Nats_Msg_Id="r", Weir_Reply_To="answers")
        await lane.settled("r")
        record = lane.broker.results["result.m.r"]
        [(_, first, body)] = lane.broker.answers
    async with one_lane() as lane:
        lane.broker.results["result.m.r"] = record
        lane.begin(started_sequence=1)
        lane.deliver(body_of(7), Nats_Msg_Id="r", Weir_Reply_To="answers")
        await lane.settled("r")
        [(_, second, again)] = lane.broker.answers
        lane.deliver(body_of(8), Nats_Msg_Id="r", Weir_Reply_To="answers")  # another request under this id
        await lane.settled("r")
        third = lane.broker.answers[-1][1]
    assert (second["nats-msg-id"], again) == (first["nats-msg-id"], body)
    assert (second["weir-outcome"], second["weir-final"]) == ("succeeded", "true")
    assert third["weir-status"] == "409"
    assert third["nats-msg-id"] != first["nats-msg-id"]


async def test_the_next_owner_sends_earlier_responses_too() -> None:
    async with one_lane() as lane:
        for number in range(2):
            headers = {"weir-id": "r", "weir-response": str(number)}
            subject = f"result.m.r.{number}"
            lane.broker.results[subject] = StoredMessage(subject, number + 1, 0, headers, b"", b"%d" % number)
        headers = {"weir-id": "r", "weir-outcome": "succeeded", "weir-responses": "3", "weir-ended-ms": "5"}
        lane.broker.results["result.m.r"] = StoredMessage("result.m.r", 3, 0, headers, b"", b"2")
        lane.begin(started_sequence=1)
        lane.deliver(body_of(7), Nats_Msg_Id="r", Weir_Reply_To="answers")
        await lane.settled("r")
        assert [body for _, _, body in lane.broker.answers] == [b"0", b"1", b"2"]
        assert [told["weir-final"] for _, told, _ in lane.broker.answers] == ["false", "false", "true"]
        assert len({told["nats-msg-id"] for _, told, _ in lane.broker.answers}) == 3


async def test_a_request_is_not_done_with_before_its_answer_has_left() -> None:
    async with one_lane() as lane:
        lane.broker.is_connected = False
        lane.deliver(body_of(7), Nats_Msg_Id="r", Weir_Reply_To="answers")
        await eventually(lambda: lane.outcome("r"))
        await eventually(lambda: len(lane.outbox))
        assert (len(lane.intake), lane.broker.answers) == (1, [])
        lane.broker.is_connected = True
        await lane.settled("r")
        assert len(lane.broker.answers) == 1


async def test_what_is_held_is_charged_to_the_ledger_and_released_at_the_end() -> None:
    async with one_lane() as lane:
        lane.model.is_holding = True
        lane.broker.objects["object"] = body_of(1)
        lane.deliver(body_of(1), Nats_Msg_Id="plain")
        lane.deliver(b"", Nats_Msg_Id="large", Weir_Object="object")
        await eventually(lambda: len(lane.model.open) == 2)
        assert lane.ledger.held_bytes["durable"] > len(body_of(1))
        assert lane.broker.held_objects == 1
        for key in list(lane.model.open):
            lane.model.end(key, unavailable("try again"))
        assert lane.broker.held_objects == 0  # while it waits for its next attempt
        await eventually(lambda: len(lane.model.open) == 2)
        for key in list(lane.model.open):
            lane.model.end(key, InferResponse("m", "1", "", []))
        assert await lane.settled("plain", "large") == {"plain": "succeeded", "large": "succeeded"}
        assert (lane.ledger.total_bytes, lane.broker.held_objects) == (0, 0)


async def test_a_lane_that_is_dropped_holds_nothing() -> None:
    async with one_lane() as lane:
        lane.model.is_holding = True
        lane.broker.objects["object"] = body_of(1)
        lane.deliver(b"", Nats_Msg_Id="large", Weir_Object="object")
        await eventually(lambda: lane.model.open)
        lane.intake.drop()
        assert (lane.ledger.total_bytes, lane.broker.held_objects) == (0, 0)


async def test_a_request_behind_a_lost_delivery_waits_until_all_are_delivered_again() -> None:
    async with one_lane() as lane:
        first = lane.deliver(body_of(1), Weir_Id="first")
        lane.lose_delivery()
        last = lane.deliver(body_of(3), sequence=3, Weir_Id="last")
        assert lane.intake.pull.consumer_lost
        await lane.settled("first")
        assert (lane.outcome("last"), len(lane.intake)) == ("", 0)
        assert lane.broker.acked.isdisjoint({2, last})
        lane.redeliver()
        lane.deliver(body_of(2), sequence=2, Weir_Id="lost")
        lane.deliver(body_of(3), sequence=last, Weir_Id="last")
        lane.intake.resume()
        assert not lane.intake.pull.consumer_lost
        await lane.settled("first", "lost", "last")
        assert lane.broker.acked >= {first, 2, last}


async def test_nothing_is_asked_for_while_the_ledger_is_full() -> None:
    async with one_lane() as lane:
        others = [lane.ledger.account(name) for name in ("a", "b")]
        for other in others:
            assert other.charge("http", 31 << 20)
        asked = lane.broker.pulls
        lane.begin()
        assert lane.broker.pulls == asked
        others[0].close()
        lane.intake.tick(time.monotonic())
        assert lane.broker.pulls == asked + 1


HEADER_NAMES = (
    "Weir-Tenant", "Weir-Deadline-Ms", "Weir-Priority", "Weir-Reply-To", "Weir-Sequence-Id", "Weir-Sequence-Start",
    "Weir-Result-Ttl-Secs", "Weir-Object", "Content-Type", "Inference-Header-Content-Length", "traceparent", "Weir-Id",
)  # fmt: skip
VALUES = (
    b"", b"0", b"7", "²".encode(), b"9" * 5000, b"-1", b"1e9", b"\xff\xfe", b"a b", b"$JS.API.STREAM.PURGE.QUEUE", b"x.*",
    b"application/msgpack", b"true", b"object", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01", b"\x00", "é".encode() * 300,
)  # fmt: skip
BODIES = (
    body_of(1), b"", b"{", b"[" * 5000, b"\x93" * 100, b'{"inputs":7}', b'{"id":"\\ud800","inputs":[]}', b"\xff" * 50,
    b'{"inputs":[{"name":"IN","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":99}}]}',
    b'{"id":"%s","inputs":[]}' % (b"x" * 300),
    b'{"inputs":[{"name":"IN","datatype":"BYTES","shape":[9223372036854775807]}]}',
)  # fmt: skip
SUBJECTS = (
    "event.m",
    "event.m.v1",
    "event.m.v",
    "event.m.v²",
    "event.m.job.x",
    "event.m.job.x.v1",
    "event.m.v9" + "9" * 40,
)


async def test_whatever_a_message_contains_it_ends_with_a_record() -> None:
    chance, before = random.Random(3), failures()
    async with one_lane() as lane:
        lane.broker.objects["object"] = body_of(1)
        sent: dict[int, str] = {}
        for number in range(600):
            lines = [b"%s: %s" % (name.encode(), chance.choice(VALUES)) for name in chance.sample(HEADER_NAMES, 2)]
            lines.append(b"Nats-Msg-Id: m%d" % number)
            block = b"NATS/1.0\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"
            sequence = lane.deliver_raw(chance.choice(BODIES), chance.choice(SUBJECTS), block)
            sent[sequence] = f"m{number}"
        await eventually(lambda: not len(lane.intake))
        lane.intake.acks.flush()
        await eventually(lambda: lane.broker.acked >= set(sent))
        ends = {subject: record.headers["weir-outcome"] for subject, record in lane.broker.results.items()}
        assert len(ends) >= len(sent) * 0.8  # the rest came under ids that others had, or that were none
        assert set(ends.values()) == {"succeeded", "failed", "dead-lettered", "expired"}
        assert lane.ledger.total_bytes == 0
        assert failures() == before
