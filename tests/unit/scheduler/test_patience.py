from __future__ import annotations

from scheduler.patience import Patience


def test_it_is_over_when_nobody_has_served_for_the_timeout():
    patience = Patience(100)
    assert not patience.is_over(5_000)
    assert not patience.is_over(5_099)
    assert patience.is_over(5_100)


def test_somebody_who_serves_in_between_renews_it():
    patience = Patience(100)
    assert not patience.is_over(0)
    patience.renew()
    assert not patience.is_over(150)
    assert not patience.is_over(249)
    assert patience.is_over(250)


def test_no_patience_at_all_is_over_at_once():
    assert Patience(0).is_over(7)
