"""Random events of a lane on a fake clock: no request overtakes another that it must wait for, and none is kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weir.bus.nats.connection import Message
from weir.bus.nats.jetstream import DeliveryInfo
from weir.durable.requests.durable_queue import MAX_CANCELLED, DurableQueue
from weir.durable.requests.headers import DurableHeaders
from weir.durable.requests.request import DurableRequest, Stage
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.requests import Lane

VERSIONS = ("1", "2")


def request_of(sequence: int, version: str = "", tenant: str = "") -> DurableRequest:
    message = Message("event.m", f"ack.{sequence}", b"body", "")
    request = DurableRequest.of(message, DeliveryInfo(sequence, sequence, 1, 0, 0), Lane.EVENT, ("m", version), print)
    request.headers = DurableHeaders(tenant=tenant)
    return request


class LaneMachine(RuleBasedStateMachine):
    """A lane whose requests are read, parked, run, retried and ended in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = DurableQueue("m", {}, {})
        self.held: list[DurableRequest] = []
        self.lines: dict[int, str | int] = {}  # the sequences that the bodies name
        self.admitted = 0  # the sequence of the latest
        self.served = set(VERSIONS)
        self.now_ms = 1000
        self.sequence = 0

    @rule(
        version=st.sampled_from(VERSIONS),
        tenant=st.sampled_from(["a", "b"]),
        in_ms=st.sampled_from([0, 0, 5, 50]),
        line=st.sampled_from([0, 0, 7, 8]),
        is_read=st.booleans(),
    )
    def deliver(self, version: str, tenant: str, in_ms: int, line: int, is_read: bool) -> None:
        self.sequence += 1
        request = request_of(self.sequence, version, tenant)
        request.attempt_history.deadline_ms = self.now_ms + in_ms if in_ms else 0
        self.held.append(request)
        self.queue.receive(request)
        self.lines[request.delivery.sequence] = f"{line} of {version}" if line else 0
        if is_read:
            self.read(request)

    def read(self, request: DurableRequest) -> None:
        request.stage = Stage.READ
        self.admit()

    def admit(self) -> None:
        while (request := self.queue.admit()) is not None:
            assert request.delivery.sequence > self.admitted
            self.admitted = request.delivery.sequence
            assert all(e.stage is not Stage.RECEIVED for e in self.held if e.delivery.sequence < self.admitted)
            assert self.queue.register(request)
            self.queue.note_expiry(request)
            self.resume(request)

    def resume(self, request: DurableRequest) -> None:
        if self.queue.is_away(request.version) or request.version not in self.served:
            self.queue.park(request)
            return
        assert not any(
            e.stage is Stage.PARKED and e.version == request.version
            for e in self.held
            if e.delivery.sequence < request.delivery.sequence
        )
        if not request.is_counted:
            assert self.queue.count(request, None) is None
        line = self.lines[request.delivery.sequence]
        if line and not request.sequence:
            request.sequence = line
            if not self.queue.sequences.join(line, request):
                return
        self.queue.make_ready(request)

    @rule(chance=st.integers(0, 99), has_outcome=st.booleans())
    def go_on(self, chance: int, has_outcome: bool) -> None:
        """A request is read, fails, is tried again, has its outcome, or its record is stored."""
        if not self.held:
            return
        request = self.held[chance % len(self.held)]
        if request.stage is Stage.ENDING:
            self.end(request)
        elif request.stage is Stage.BACKING_OFF:
            request.stage = Stage.READ
            self.resume(request)
        elif has_outcome:
            request.stage = Stage.ENDING
        elif request.stage is Stage.RECEIVED:
            self.read(request)
        elif request.stage is Stage.RUNNING:
            request.stage = Stage.BACKING_OFF

    @rule(version=st.sampled_from(VERSIONS))
    def change_workers(self, version: str) -> None:
        self.served ^= {version}

    @rule()
    def retry(self) -> None:
        for request in self.queue.retry():
            self.resume(request)
        parked = {request.version for request in self.held if request.stage is Stage.PARKED}
        assert parked.isdisjoint(self.served)

    @rule()
    def run_next(self) -> None:
        ready = [request for request in self.held if request.stage is Stage.READY]
        request = self.queue.next()
        assert (request is None) is not bool(ready)
        if request is None:
            return
        assert request in ready
        earlier = [e for e in self.held if e.delivery.sequence < request.delivery.sequence]
        assert not (request.sequence and any(e.sequence == request.sequence for e in earlier))
        request.stage = Stage.RUNNING

    @rule(ms=st.integers(1, 30))
    def wait(self, ms: int) -> None:
        self.now_ms += ms
        due = [
            request
            for request in self.held
            if request.delivery.sequence <= self.admitted
            and request.attempt_history.is_expired(self.now_ms)
            and request.stage in (Stage.READ, Stage.PARKED, Stage.READY, Stage.BACKING_OFF)
        ]
        expired = self.queue.expired(self.now_ms)
        assert {id(each) for each in expired} == {id(each) for each in due}
        for request in expired:
            request.stage = Stage.ENDING

    def end(self, request: DurableRequest) -> None:
        request.stage = Stage.ENDED
        assert self.queue.remove(request)
        assert not self.queue.remove(request)
        self.held.remove(request)
        following = self.queue.sequences.leave(request.sequence, request)
        if following is not None and following.stage is Stage.READ:
            self.queue.make_ready(following)
        self.admit()

    @rule(is_lost=st.sampled_from([False] * 15 + [True]))
    def lose_the_lane(self, is_lost: bool) -> None:
        if is_lost:
            for request in self.held:
                request.stage = Stage.ENDED
            self.queue.clear()
            self.held.clear()

    @invariant()
    def holds_what_has_not_ended(self) -> None:
        assert list(self.queue) == self.held
        parked = {request.version for request in self.held if request.stage is Stage.PARKED}
        assert all(self.queue.is_away(version) for version in parked)

    def teardown(self) -> None:
        while self.held:
            self.held[0].stage = Stage.ENDING
            self.end(self.held[0])
        assert not list(self.queue.retry())
        kept = vars(self.queue)
        assert not any(kept[name] for name in kept if name not in ("_weights", "sequences"))
        assert len(self.queue.sequences) == 0


TestLane = LaneMachine.TestCase
TestLane.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_cancelled_id_is_remembered_until_its_request_arrives() -> None:
    queue = DurableQueue("m", {}, {})
    first, second = request_of(1), request_of(2)
    first.name("r")
    second.name("r")
    assert queue.cancel("r") is None
    assert not queue.register(first)
    assert queue.register(second)
    assert queue.cancel("r") is second


def test_the_oldest_cancelled_ids_are_forgotten() -> None:
    queue = DurableQueue("m", {}, {})
    for number in range(MAX_CANCELLED + 1):
        queue.cancel(f"r{number}")
    kept, forgotten = request_of(1), request_of(2)
    kept.name("r1")
    forgotten.name("r0")
    assert not queue.register(kept)
    assert queue.register(forgotten)


def test_a_parked_request_expires_at_its_age() -> None:
    queue = DurableQueue("m", {}, {})
    request = request_of(1)
    queue.receive(request)
    request.attempt_history.max_age_ms = 20
    queue.park(request)
    assert (queue.expired(19), queue.expired(20)) == ([], [request])


@pytest.mark.parametrize(("is_checked", "maybe_started", "has_room"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_a_full_queue_takes_what_was_checked_or_may_have_run(
    is_checked: bool, maybe_started: bool, has_room: bool
) -> None:
    queue = DurableQueue("m", {}, {})
    request = request_of(1)
    request.maybe_started = bool(maybe_started)
    error = queue.count(request, None if is_checked else QueueBounds(0, 0, 0))
    assert (error is None) is has_room
    assert request.is_counted is has_room
