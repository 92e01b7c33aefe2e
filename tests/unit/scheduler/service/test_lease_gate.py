"""Events are buffered, in order, while a scheduler is not sure of its queues."""

from __future__ import annotations

from weir.scheduler.service.lease_gate import LEASE_S, LeaseGate


class Fenced:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.lease_gate = LeaseGate(lambda: self.now_s)
        self.seen: list[int] = []
        self.see = self.lease_gate.guard(self.seen.append)


def test_the_gate_is_open_until_the_first_heartbeat() -> None:
    gated = Fenced()
    gated.now_s += 1e6
    gated.see(1)
    assert gated.seen == [1]
    assert gated.lease_gate.renew(gated.now_s)
    gated.now_s += LEASE_S + 0.01
    gated.see(2)
    assert gated.seen == [1]


def test_a_late_confirmation_does_not_open_it() -> None:
    gated = Fenced()
    assert gated.lease_gate.renew(100.0)
    gated.now_s += LEASE_S + 0.01
    assert not gated.lease_gate.renew(gated.now_s)
    gated.see(1)
    assert gated.lease_gate.reopen(gated.now_s)
    assert gated.seen == [1]


def test_buffered_events_run_in_order_before_later_ones() -> None:
    gated = Fenced()
    gated.lease_gate.close()
    for number in range(5):
        gated.see(number)
    assert not gated.lease_gate.reopen(gated.now_s - LEASE_S - 1), "the check took too long"
    assert gated.seen == []
    assert gated.lease_gate.reopen(gated.now_s)
    gated.see(5)
    assert gated.seen == list(range(6))


def test_a_pause_while_buffered_events_run_closes_the_gate_again() -> None:
    gated = Fenced()
    gated.lease_gate.close()

    def stall(number: int) -> None:
        gated.seen.append(number)
        gated.now_s += LEASE_S

    for number in range(3):
        gated.lease_gate.guard(stall)(number)
    assert not gated.lease_gate.reopen(gated.now_s)
    assert gated.seen == [0, 1]
    gated.lease_gate.reopen(gated.now_s)
    assert gated.seen == [0, 1, 2]
