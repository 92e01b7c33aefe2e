"""Each fetch of a payload ends once, with its content or its loss, whatever messages are lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.payloads.fetch_plan import (
    MAX_OUTSTANDING,
    NO_OWNER_TIMEOUT_S,
    PIECE_TIMEOUT_S,
    RETRY_S,
    FetchEnd,
    FetchPlan,
    Loss,
    PieceRequest,
)
from weir.schemas.core.tensors import PayloadRef

PIECE = 10


def ref(size: int, offset: int = 64) -> PayloadRef:
    return PayloadRef("weir-gateway-01234567-1.131072", 0, 3, offset, size)


def content_of(piece: PayloadRef) -> bytes:
    """What lies there: each byte tells its place."""
    return bytes((piece.offset + place) % 251 for place in range(piece.size))


class World:
    """Owners and a broker that lose, repeat and reorder what they are told to, by a seed."""

    def __init__(self, seed: int, loss: float) -> None:
        self.plan = FetchPlan(PIECE)
        self.dice = random.Random(seed)
        self.loss = loss
        self.now_s = 0.0
        self.asked: list[PieceRequest] = []
        self.asked_s: dict[tuple[int, int], float] = {}  # when what has not been delivered yet was asked first
        self.ends: dict[int, bytes | Loss] = {}
        self.stale: set[int] = set()
        self.away: set[int] = set()
        self.late: set[int] = set()
        self.events = 0
        self.begun = 0

    def begin(self, size: int) -> int:
        self.begun += 1
        number = self.begun
        actions = self.plan.begin(number, ref(size), self.now_s)
        self.take(actions)
        return number

    def take(self, actions: list[PieceRequest | FetchEnd]) -> None:
        self.events += 1
        for action in actions:
            if isinstance(action, PieceRequest):
                assert action.fetch not in self.ends
                self.asked.append(action)
                self.asked_s.setdefault((action.fetch, action.number), self.now_s)
            else:
                assert action.fetch not in self.ends, "it ends once"
                outcome = action.outcome
                waited_s = [self.now_s - at_s for (fetch, _), at_s in self.asked_s.items() if fetch == action.fetch]
                if max(waited_s, default=0.0) >= PIECE_TIMEOUT_S / 2:
                    self.late.add(action.fetch)  # this world has not delivered what it asked for in time
                self.ends[action.fetch] = outcome if isinstance(outcome, Loss) else bytes(outcome)
        assert 0 <= self.plan.outstanding <= MAX_OUTSTANDING

    def step(self) -> None:
        if self.asked and self.dice.random() < 0.9:
            ask = self.asked.pop(self.dice.randrange(len(self.asked)))
            self.asked_s.pop((ask.fetch, ask.number), None)
            if self.dice.random() < self.loss:
                return
            if self.dice.random() < 0.1:
                self.asked.append(ask)  # it comes twice
            if ask.fetch in self.away:
                self.take(self.plan.no_responder(ask.fetch, self.now_s))
            else:
                data = b"" if ask.fetch in self.stale else content_of(ask.piece)
                self.take(self.plan.received(ask.fetch, ask.number, data, self.now_s))
        else:
            self.now_s += self.dice.random()
            self.take(self.plan.tick(self.now_s, is_connected=self.dice.random() < 0.9))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 300), min_size=1, max_size=30), st.sampled_from([0.0, 0.05, 0.3]))
def test_each_fetch_ends_once_with_what_is_there(seed: int, sizes: list[int], loss: float) -> None:
    world = World(seed, loss)
    numbers: dict[int, int] = {}
    given_up: set[int] = set()
    for size in sizes:
        number = world.begin(size)
        numbers[number] = size
        kind = world.dice.random()
        if kind < 0.1:
            world.stale.add(number)
        elif kind < 0.2:
            world.away.add(number)
        elif kind < 0.3:
            given_up.add(number)
            world.take(world.plan.cancel(number))
        for _ in range(world.dice.randrange(5)):
            world.step()
    for _ in range(20_000):
        if not len(world.plan):
            break
        world.step()
    assert not len(world.plan), "each comes to an end"
    assert world.plan.outstanding == 0
    for number, size in numbers.items():
        if number in given_up and number not in world.ends:
            continue
        outcome = world.ends[number]
        if size == 0 or outcome == content_of(ref(size)):
            continue
        assert outcome is Loss.UNREACHABLE or (outcome is Loss.STALE and number in world.stale)
        assert loss or number in world.away | world.stale | world.late


def test_one_piece_is_taken_as_it_came() -> None:
    plan = FetchPlan(PIECE)
    number = 1
    (ask,) = plan.begin(number, ref(PIECE), 0.0)
    assert isinstance(ask, PieceRequest)
    data = content_of(ask.piece)
    (end,) = plan.received(number, 0, data, 0.0)
    assert isinstance(end, FetchEnd)
    assert end.outcome is data


def test_payloads_take_turns() -> None:
    plan = FetchPlan(PIECE)
    plan.begin(1, ref(1000), 0.0)
    actions = plan.begin(2, ref(PIECE), 0.0)
    assert [action.fetch for action in actions] == [2], "a large one leaves room for others"


def test_a_missing_piece_is_requested_again_until_the_fetch_fails() -> None:
    plan = FetchPlan(PIECE)
    number = 1
    plan.begin(number, ref(PIECE), 0.0)
    assert plan.tick(RETRY_S / 2, True) == []
    (again,) = plan.tick(RETRY_S, True)
    assert isinstance(again, PieceRequest)
    assert plan.tick(100.0, False) == [], "while the broker is away"
    assert plan.tick(100.0 + PIECE_TIMEOUT_S, True) == [FetchEnd(number, Loss.UNREACHABLE)]


def test_an_owner_without_subscription_may_reconnect_for_a_moment() -> None:
    plan = FetchPlan(PIECE)
    number = 1
    plan.begin(number, ref(PIECE), 1.0)
    assert plan.no_responder(number, 1.0) == []
    assert len(plan.tick(1.1, True)) == 1
    assert plan.no_responder(number, 1.0 + NO_OWNER_TIMEOUT_S) == [FetchEnd(number, Loss.UNREACHABLE)]
