"""Connections to owners are tried one at a time, after pauses that grow, and never beyond the bound."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.links.dial_policy import (
    FIRST_PAUSE_S,
    IDLE_S,
    MAX_OWNERS,
    MAX_PAUSE_S,
    MAX_TCP_LINKS_OPENED,
    TRY_TIMEOUT_S,
    DialPolicy,
)

OWNERS = ("gateway-01234567-1", "worker-01234567-2", "worker-89abcdef-3")


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 150))
def test_tries_whatever_becomes_of_them(seed: int, steps: int) -> None:
    dice, ways, now_s = random.Random(seed), DialPolicy(), 0.0
    trying: dict[int, tuple[str, float]] = {}
    connected: dict[str, int] = {}
    rests_until_s = dict.fromkeys(OWNERS, 0.0)
    for _ in range(steps):
        now_s += dice.choice((0.0, 0.1, 1.0, 7.0, 70.0))
        for idle in ways.tick(now_s):
            assert connected.pop(idle)
        for number, (owner, since_s) in list(trying.items()):
            if now_s - since_s >= TRY_TIMEOUT_S:
                assert not ways.owner_of(number)
                assert not ways.opened(number, now_s)
                rests_until_s[owner] = now_s + FIRST_PAUSE_S
                del trying[number]
        owner = dice.choice(OWNERS)
        assert ways.is_open(owner) == (owner in connected)
        number = ways.wanted(owner, now_s)
        if number:
            assert owner not in connected
            assert all(known != owner for known, _ in trying.values())
            assert now_s >= rests_until_s[owner], "it rests at least for the first pause"
            trying[number] = owner, now_s
        else:
            busy = owner in connected or any(known == owner for known, _ in trying.values())
            assert busy or now_s < rests_until_s[owner] + MAX_PAUSE_S, "no pause is longer than the longest"
        if trying and dice.random() < 0.6:
            number = dice.choice(list(trying))
            owner = trying.pop(number)[0]
            assert ways.owner_of(number) == owner
            if dice.random() < 0.5:
                assert ways.opened(number, now_s)
                connected[owner] = number
            else:
                ways.failed(number, now_s)
                rests_until_s[owner] = now_s + FIRST_PAUSE_S
        if connected and dice.random() < 0.5:
            owner = dice.choice(list(connected))
            if dice.random() < 0.5:
                ways.served(owner, now_s)
            else:
                ways.failed(connected.pop(owner), now_s)
                rests_until_s[owner] = now_s + FIRST_PAUSE_S
        assert ways.connections == len(trying) + len(connected)


def test_pauses_grow_until_a_connection_has_served() -> None:
    ways, now_s, owner = DialPolicy(), 0.0, OWNERS[0]

    def pause_s() -> float:
        since_s, at_s = now_s, now_s
        while not (number := ways.wanted(owner, at_s)):
            at_s += 0.5
        ways.failed(number, at_s)
        return at_s - since_s

    pauses = []
    for _ in range(9):
        pauses.append(pause_s())
        now_s += pauses[-1]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S]
    now_s += MAX_PAUSE_S
    number = ways.wanted(owner, now_s)
    assert ways.opened(number, now_s)
    ways.served(owner, now_s)
    ways.failed(number, now_s)
    assert pause_s() == FIRST_PAUSE_S


def test_a_connection_that_opens_and_breaks_each_time_is_tried_less_and_less() -> None:
    ways, now_s, owner = DialPolicy(), 0.0, OWNERS[0]
    for pause_s in (1.0, 2.0, 4.0):
        number = ways.wanted(owner, now_s)
        assert ways.opened(number, now_s)
        ways.failed(number, now_s)
        assert not ways.wanted(owner, now_s + pause_s - 0.1)
        now_s += pause_s


def test_an_idle_connection_is_closed_and_may_be_made_again_at_once() -> None:
    ways = DialPolicy()
    number = ways.wanted(OWNERS[0], 0.0)
    assert ways.opened(number, 0.0)
    ways.used(OWNERS[0], 5.0)
    assert ways.tick(IDLE_S) == []
    assert ways.tick(5.0 + IDLE_S) == [OWNERS[0]]
    ways.failed(number, 5.0 + IDLE_S)  # its end is heard of later
    assert ways.wanted(OWNERS[0], 5.0 + IDLE_S)


def test_connections_and_what_is_known_of_owners_are_bounded() -> None:
    ways = DialPolicy()
    numbers = [ways.wanted(f"owner-{n}", 0.0) for n in range(MAX_TCP_LINKS_OPENED + 1)]
    assert all(numbers[:-1])
    assert not numbers[-1]
    for number in numbers[:-1]:
        ways.failed(number, 0.0)
    for n in range(MAX_OWNERS):
        ways.failed(ways.wanted(f"other-{n}", 0.0), 0.0)
    assert not ways.wanted("one more", 0.5), "all that are known still rest"
    assert ways.wanted("one more", FIRST_PAUSE_S)
