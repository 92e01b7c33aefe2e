"""The version of each request: shares, sticky values, sequences, and versions that are not ready."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.calls.traffic.counters import TrafficCounters
from weir.calls.traffic.split import NAMED, SPLIT, STICKY, TrafficSplit
from weir.schemas.config.traffic import TrafficRule
from weir.schemas.core.errors import Reason, WeirError
from weir.schemas.core.requests import SEQUENCE_START, InferRequest, Lane
from weir.schemas.wire.traffic import ShadowRule

REQUESTS = 100_000
USERS = [f"user-{number}" for number in range(REQUESTS)]

weights = st.dictionaries(
    st.integers(1, 9), st.floats(0, 100).map(lambda x: round(x, 2)), min_size=1, max_size=4
).filter(lambda found: sum(found.values()) > 0.1)


def split_of(
    rule: dict[int, float], *ready: int, start: float = 0.5, sticky: str = "", state: bool = False
) -> TrafficSplit:
    return TrafficSplit("m", TrafficRule(rule, sticky), ready or tuple(rule), TrafficCounters(), state, start)


@settings(max_examples=10, deadline=None)
@given(weights, st.floats(0, 1))
def test_each_version_gets_its_share_of_100_000_requests(rule: dict[int, float], start: float) -> None:
    split = split_of(rule, start=start)
    found = Counter(split.next_version() for _ in range(REQUESTS))
    for version, share in split.shares.items():
        assert abs(found[version] / REQUESTS - share) < 0.0005


@pytest.mark.parametrize("rule", [{1: 90, 2: 10}, {1: 50, 2: 50}, {1: 1, 2: 1, 3: 1}, {1: 99.5, 2: 0.5}])
def test_each_version_gets_its_share_of_100_000_users(rule: dict[int, float]) -> None:
    split = split_of(rule)
    found = Counter(map(split.version_of, USERS))
    for version, share in split.shares.items():
        assert abs(found[version] / REQUESTS - share) < 0.005


@settings(max_examples=30, deadline=None)
@given(weights, st.integers(1, 9), st.floats(0.01, 100))
def test_a_version_that_gets_more_takes_users_and_loses_none(rule: dict[int, float], version: int, more: float) -> None:
    before = split_of(rule)
    after = split_of({**rule, version: rule.get(version, 0.0) + more})
    for user in USERS[:500]:
        assert after.version_of(user) in (before.version_of(user), version)


@settings(max_examples=30, deadline=None)
@given(weights.filter(lambda rule: sum(map(bool, rule.values())) > 1), st.data())
def test_only_users_of_a_version_that_is_not_ready_move(rule: dict[int, float], data: st.DataObject) -> None:
    away = data.draw(st.sampled_from([version for version, weight in rule.items() if weight]))
    whole, rest = split_of(rule), split_of(rule, *(version for version in rule if version != away))
    assert rest.unready == [away]
    assert rest.shares[away] == 0
    assert sum(rest.shares.values()) == pytest.approx(1)
    for user in USERS[:500]:
        version = whole.version_of(user)
        assert rest.version_of(user) == version if version != away else rest.version_of(user) != away


@settings(max_examples=20, deadline=None)
@given(weights, st.floats(0, 1))
def test_a_version_without_weight_gets_nothing(rule: dict[int, float], start: float) -> None:
    split = split_of({**rule, 10: 0.0}, start=start)
    assert 10 not in {split.next_version() for _ in range(300)} | set(map(split.version_of, USERS[:300]))


def test_models_place_the_same_users_differently() -> None:
    rule, counters = TrafficRule({1: 50, 2: 50}), TrafficCounters()
    one, other = TrafficSplit("a", rule, [1, 2], counters), TrafficSplit("b", rule, [1, 2], counters)
    same = sum(one.version_of(user) == other.version_of(user) for user in USERS[:10_000])
    assert 4_500 < same < 5_500


def version_of(split: TrafficSplit, key: str = "", **fields: object) -> tuple[str, str]:
    """(version, arm)"""
    request = InferRequest("m", **fields)  # type: ignore[arg-type]
    arm = split.route(request, key)
    return request.model_version, arm


def test_a_named_version_stays() -> None:
    assert version_of(split_of({2: 1.0}), model_version="1") == ("1", NAMED)


def test_a_request_gets_a_version_by_weight() -> None:
    assert version_of(split_of({2: 1.0})) == ("2", SPLIT)


def test_the_header_keeps_a_user_on_one_version() -> None:
    split = split_of({1: 50, 2: 50}, sticky="header:x-user")
    for user in USERS[:20]:
        found = {version_of(split, user) for _ in range(10)}
        assert found == {(str(split.version_of(user)), STICKY)}


def test_the_parameter_keeps_a_user_on_one_version() -> None:
    split = split_of({1: 50, 2: 50}, sticky="parameter:user")
    for user in range(20):
        found = {version_of(split, parameters={"user": user}) for _ in range(10)}
        assert found == {(str(split.version_of(str(user))), STICKY)}
    assert version_of(split, parameters={"other": "x"})[1] == SPLIT


def test_a_sequence_starts_on_one_version_and_the_scheduler_continues_it() -> None:
    split = split_of({1: 50, 2: 50}, state=True)
    started = version_of(split, correlation_id=7, sequence_flags=SEQUENCE_START)
    assert started == (str(split.version_of("\0007")), STICKY)
    assert version_of(split, correlation_id=7) == ("", STICKY)


def test_a_correlation_id_of_a_model_without_state_is_sticky() -> None:
    split = split_of({1: 50, 2: 50})
    assert len({version_of(split, correlation_id="talk")[0] for _ in range(20)}) == 1


def test_requests_are_rejected_while_no_version_of_the_rule_is_ready() -> None:
    with pytest.raises(WeirError, match="split between versions of which none is at ready state: 1, 2") as caught:
        split_of({1: 1, 2: 1}, 3).route(InferRequest("m"))
    assert caught.value.reason is Reason.NOT_READY


def test_copies_are_made_of_a_share_of_live_requests() -> None:
    rule = TrafficRule({1: 1.0})
    split = TrafficSplit("m", rule, [1, 2], TrafficCounters(), shadow=ShadowRule(2, 0.2))
    found = [split.shadow_of(InferRequest("m", "1")) for _ in range(1000)]
    assert set(found) == {0, 2}
    assert abs(found.count(2) - 200) <= 2


@pytest.mark.parametrize(
    "fields",
    [{"model_version": "2"}, {"correlation_id": 5}, {"regions": ("mine",)}, {"lane": Lane.EVENT}, {"lane": Lane.BATCH}],
)
def test_some_requests_are_never_copied(fields: dict[str, object]) -> None:
    split = TrafficSplit("m", TrafficRule({1: 1.0}), [1, 2], TrafficCounters(), shadow=ShadowRule(2, 1.0))
    request = InferRequest("m", **{"model_version": "1", **fields})  # type: ignore[arg-type]
    assert split.shadow_of(request) == 0


def test_a_version_that_is_not_ready_gets_no_copies() -> None:
    split = TrafficSplit("m", TrafficRule({1: 1.0}), [1], TrafficCounters(), shadow=ShadowRule(2, 1.0))
    assert split.shadow_of(InferRequest("m", "1")) == 0
