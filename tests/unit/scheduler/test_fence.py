"""What comes while a scheduler is not sure of what it owns is put off, in order."""

from __future__ import annotations

from scheduler.fence import SURE_S, Fence


class Fenced:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.fence = Fence(lambda: self.now_s)
        self.seen: list[int] = []
        self.see = self.fence.guard(self.seen.append)


def test_it_is_open_until_signs_of_life_are_told_of() -> None:
    fenced = Fenced()
    fenced.now_s += 1e6
    fenced.see(1)
    assert fenced.seen == [1]
    assert fenced.fence.confirmed(fenced.now_s)
    fenced.now_s += SURE_S + 0.01
    fenced.see(2)
    assert fenced.seen == [1]


def test_a_late_confirmation_does_not_open_it() -> None:
    fenced = Fenced()
    assert fenced.fence.confirmed(100.0)
    fenced.now_s += SURE_S + 0.01
    assert not fenced.fence.confirmed(fenced.now_s)
    fenced.see(1)
    assert fenced.fence.open(fenced.now_s)
    assert fenced.seen == [1]


def test_what_was_put_off_comes_in_order_and_before_what_follows() -> None:
    fenced = Fenced()
    fenced.fence.shut()
    for number in range(5):
        fenced.see(number)
    assert not fenced.fence.open(fenced.now_s - SURE_S - 1), "the check took too long"
    assert fenced.seen == []
    assert fenced.fence.open(fenced.now_s)
    fenced.see(5)
    assert fenced.seen == list(range(6))


def test_a_pause_amid_what_was_put_off_shuts_it_again() -> None:
    fenced = Fenced()
    fenced.fence.shut()

    def stall(number: int) -> None:
        fenced.seen.append(number)
        fenced.now_s += SURE_S

    for number in range(3):
        fenced.fence.guard(stall)(number)
    assert not fenced.fence.open(fenced.now_s)
    assert fenced.seen == [0, 1]
    fenced.fence.open(fenced.now_s)
    assert fenced.seen == [0, 1, 2]
