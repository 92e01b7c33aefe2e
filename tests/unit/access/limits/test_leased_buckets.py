"""Token buckets leased by gateways: whatever is lost or dies, no more is let in than the limit and the stated error."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.access.limits import buckets as buckets_module
from weir.access.limits.buckets import Buckets
from weir.access.limits.leased_buckets import ASK_AGAIN_S, SLICE_S, LeasedBuckets, Refused
from weir.access.limits.token_bucket import TokenBucket
from weir.schemas.wire.rate_limits import Amounts, TokenGrant, TokenRow

TIMEOUT_S = 0.25


class World:
    """Gateways and the owner of the buckets on a fake clock. Messages take up to `delay_s`, and some are lost."""

    def __init__(self, gateways: int, rates: Amounts, seed: int, loss: float = 0.0, delay_s: float = 0.002) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.rates = rates
        self.loss, self.delay_s = loss, delay_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.buckets: Buckets | None = Buckets(-2.0)  # the owner has been one for a while
        self.let_in: list[tuple[float, int, float, float]] = []
        self.refused: list[Refused] = []
        self.waits_s: list[float] = []
        self.asks = 0
        self.alone_s = 0.0
        """The longest time in which a gateway had no answer."""
        self._alone_since: dict[int, float] = {}
        self.gateways: list[LeasedBuckets] = []
        for number in range(gateways):
            self.gateways.append(LeasedBuckets(partial(self.after, 0.0, partial(self._ask, number))))
            self._tick(number)

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def _tick(self, number: int) -> None:
        self.gateways[number].tick(self.now_s)
        self.after(SLICE_S, lambda: self._tick(number))

    def request(self, number: int, size: float = 0.0) -> None:
        gateway, cost, came_s = self.gateways[number], (1.0, size), self.now_s

        def settle(refused: Refused | None) -> bool:
            self.waits_s.append(self.now_s - came_s)
            if refused is None:
                self.let_in.append((self.now_s, number, *cost))
            else:
                self.refused.append(refused)
            return True

        outcome = gateway.take("tenant acme", self.rates, cost, self.now_s)
        if outcome is False:
            gateway.wait("tenant acme", cost, settle, self.now_s)
        else:
            settle(None if outcome is True else outcome)

    def load(self, number: int, per_s: float, from_s: float, to_s: float, size: float = 0.0) -> None:
        """Random arrivals of requests at one gateway."""
        at_s = from_s + self.random.expovariate(per_s)
        while at_s < to_s:
            self.after(at_s - self.now_s, lambda: self.request(number, size))
            at_s += self.random.expovariate(per_s)

    def _ask(self, number: int) -> None:
        gateway = self.gateways[number]
        rows = gateway.asks(self.now_s)
        if not rows:
            return
        self.asks += 1
        is_open = [True]

        def arrive() -> None:
            if self.buckets is None:
                self.after(self._delay_s(), end)  # nats-server: no responders
                return
            grants = [self.buckets.grant(row, self.now_s) for row in rows]
            if not self._is_lost():
                self.after(self._delay_s(), lambda: end(grants))

        def end(grants: list[TokenGrant] | None = None) -> None:
            if not is_open[0]:
                return
            is_open[0] = False
            since_s = self._alone_since.setdefault(number, self.now_s - TIMEOUT_S)
            self.alone_s = max(self.alone_s, self.now_s - since_s if grants is None else 0.0)
            if grants is not None:
                del self._alone_since[number]
            for place, row in enumerate(rows):
                if grants is None:
                    gateway.failed(row, len(self.gateways), self.now_s)
                else:
                    gateway.answered(row, grants[place], self.now_s)

        if not self._is_lost():
            self.after(self._delay_s(), arrive)
        self.after(TIMEOUT_S, end)

    def _is_lost(self) -> bool:
        return self.random.random() < self.loss

    def _delay_s(self) -> float:
        return self.random.uniform(0, self.delay_s)

    def excess(self, kind: int = 0) -> float:
        """The most that was let in within any time beyond what the rate gives in it."""
        rate, total, lowest, worst = self.rates[kind], 0.0, 0.0, 0.0
        for at_s, _, *cost in self.let_in:
            lowest = min(lowest, total - rate * at_s)
            total += cost[kind]
            worst = max(worst, total - rate * at_s - lowest)
        return worst

    def error(self, kind: int = 0) -> float:
        """The stated error: a slice for each gateway, and what the rate gives while a message travels."""
        rate = self.rates[kind]
        return len(self.gateways) * max(1.0, rate * SLICE_S) + 2 * rate * self.delay_s


@settings(deadline=None, max_examples=60)
@given(
    gateways=st.integers(1, 8),
    rate=st.sampled_from([0.5, 1.0, 7.0, 100.0, 1000.0]),
    load=st.floats(0.1, 5.0),
    loss=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    seed=st.integers(0, 1 << 30),
)
def test_no_more_is_let_in_than_the_limit_and_the_stated_error(
    gateways: int, rate: float, load: float, loss: float, seed: int
) -> None:
    world = World(gateways, (rate, 0.0), seed, loss)
    seconds = min(20.0, 3000 / (rate * load))
    for number in range(gateways):
        begin_s = world.random.uniform(0, seconds / 2)
        world.load(number, max(0.2, rate * load * world.random.random()), begin_s, seconds)
    world.run(seconds + 1)
    # Gateways whose messages are lost go on alone meanwhile, each with its part of the rate.
    alone = rate * (world.alone_s + ASK_AGAIN_S) + gateways if loss else 0.0
    assert world.excess() <= max(1.0, rate) + world.error() + alone


@settings(deadline=None, max_examples=40)
@given(gateways=st.integers(1, 8), rate=st.sampled_from([1.0, 20.0, 200.0]), seed=st.integers(0, 1 << 30))
def test_a_dead_owner_and_its_successor_let_in_no_more(gateways: int, rate: float, seed: int) -> None:
    world = World(gateways, (rate, 0.0), seed)
    for number in range(gateways):
        world.load(number, rate * 2, 0.0, 8.0)
    dies_s = world.random.uniform(1.0, 3.0)
    world.after(dies_s, lambda: setattr(world, "buckets", None))
    world.after(dies_s + 2.0, lambda: setattr(world, "buckets", Buckets(world.now_s)))
    world.run(9.0)
    # A gateway finds the successor within `ASK_AGAIN_S`, and goes on alone until then.
    assert world.excess() <= max(1.0, rate) + world.error() + gateways + rate * (ASK_AGAIN_S + TIMEOUT_S)
    while_dead = [row for row in world.let_in if dies_s + TIMEOUT_S < row[0] < dies_s + 2.0]
    if rate >= 20 * gateways:
        assert len(while_dead) >= 0.7 * rate * (2.0 - TIMEOUT_S)
    assert any(at_s > dies_s + 3.0 for at_s, *_ in world.let_in)


@pytest.mark.parametrize("rate", [10.0, 100.0, 2000.0])
def test_a_busy_gateway_gets_what_idle_ones_leave(rate: float) -> None:
    world = World(4, (rate, 0.0), 1)
    seconds = 6.0
    world.load(0, rate * 2, 0.0, seconds)
    for number in (1, 2, 3):
        world.load(number, 0.5, 0.0, 1.0)
    world.run(seconds)
    later = [row for row in world.let_in if row[0] > 2.0]
    assert len(later) == pytest.approx(rate * (seconds - 2.0), rel=0.03, abs=3)


@pytest.mark.parametrize("gateways", [1, 4, 8])
def test_gateways_under_load_let_in_the_limit_and_not_less(gateways: int) -> None:
    world = World(gateways, (100.0, 0.0), 2)
    for number in range(gateways):
        world.load(number, 100.0 if gateways > 1 else 300.0, 0.0, 31.0)
    world.run(31.0)
    later = [row for row in world.let_in if row[0] > 1.0]
    assert len(later) == pytest.approx(3000, rel=0.01)


@pytest.mark.parametrize("size", [0.0, 100.0])
def test_requests_wait_for_one_response_at_most_and_for_none_while_tokens_are_at_hand(size: float) -> None:
    world = World(2, (1000.0, 0.0), 3)
    world.load(0, 300.0, 0.0, 5.0, size)
    world.run(5.0)
    assert not world.refused
    assert max(world.waits_s) <= 4 * world.delay_s  # the rest of a response under way, and its own
    assert sum(wait_s > 0 for wait_s in world.waits_s) < 0.05 * len(world.waits_s)
    assert world.asks < len(world.waits_s) / 5


def test_a_burst_of_a_second_is_let_in_at_one_gateway() -> None:
    world = World(4, (50.0, 0.0), 4)
    for _ in range(60):
        world.request(1)
    world.run(0.1)
    assert 50 <= len(world.let_in) <= 51
    assert all(each.kind == "requests" and each.rate == 50.0 for each in world.refused)


def test_bytes_and_requests_are_counted_together() -> None:
    world = World(3, (1000.0, 10_000.0), 5)
    for number in range(3):
        world.load(number, 100.0, 0.0, 20.0, size=500.0)
    world.run(20.0)
    assert sum(size for *_, size in world.let_in) == pytest.approx(10_000 * 21, rel=0.05)
    assert {each.kind for each in world.refused} == {"bytes"}
    assert world.excess(1) <= 10_000 + world.error(1) + 3 * 500


def test_a_body_larger_than_a_burst_is_let_in_and_paid_for() -> None:
    world = World(1, (0.0, 1000.0), 6)
    for number in range(100):
        world.after(number * 0.1, lambda: world.request(0, 3000.0))
    world.run(10.0)
    assert len(world.let_in) == 4  # 3000 bytes each, at a burst of 1000 and 1000 a second
    assert world.excess(1) <= 3000


def test_what_is_used_without_asking_is_paid_for() -> None:
    world = World(1, (0.0, 1000.0), 7)
    world.request(0, 0.0)
    world.gateways[0].spend("tenant acme", (0.0, 5000.0), world.now_s)
    world.run(0.1)
    world.request(0, 10.0)
    world.run(0.2)
    assert world.refused[0].kind == "bytes"
    assert world.refused[0].wait_s == pytest.approx(3.91, abs=0.1)


def test_another_limit_applies_to_the_next_request() -> None:
    world = World(1, (10.0, 0.0), 8)
    world.load(0, 200.0, 0.0, 10.0)
    world.run(5.0)
    world.rates = (100.0, 0.0)
    world.run(10.0)
    later = [row for row in world.let_in if row[0] > 5.0]
    assert len(later) == pytest.approx(500, rel=0.05)


def test_a_gateway_forgets_idle_owners() -> None:
    gateway = LeasedBuckets(lambda: None)
    for number in range(100):
        gateway.take(f"key {number}", (1.0, 0.0), (1.0, 0.0), 0.0)
    gateway.tick(1.0)
    assert not gateway.is_idle
    gateway.tick(10.0)
    assert gateway.is_idle


def test_the_owner_drops_full_buckets_before_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "MAX_OWNERS", 10)
    buckets = Buckets(-10.0)

    def granted(owner: str, now_s: float) -> float:
        row = TokenRow(owner, (1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
        return buckets.grant(row, now_s).tokens[0]

    assert all(granted(f"key {number}", 0.0) for number in range(10))
    assert not granted("another", 0.5)
    assert granted("another", 1.5)
    assert len(buckets) == 1


def test_a_new_owner_of_the_buckets_begins_with_empty_ones() -> None:
    buckets = Buckets(100.0)
    row = TokenRow("key a", (10.0, 0.0), (100.0, 0.0), (1.0, 0.0))
    assert buckets.grant(row, 100.0).tokens[0] == 0
    assert buckets.grant(row, 100.5).tokens[0] == pytest.approx(5)


def test_a_bucket_fills_at_its_rate_up_to_its_burst() -> None:
    bucket = TokenBucket(4.0, 0.0)
    assert bucket.take(1, 1, 0.1) == 0
    assert bucket.wait_s(1, 0.1) == pytest.approx(0.15)
    assert bucket.take(9, 1, 0.5) == pytest.approx(2)
    assert bucket.level(100.0) == 4
    bucket.give_back(3, 100.0)
    assert bucket.level(100.0) == 4
    assert TokenBucket(0.5, 0.0, 9.0).level(0.0) == 1
