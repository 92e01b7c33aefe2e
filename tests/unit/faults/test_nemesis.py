"""The random faults follow from the seed alone, and every suspended process is resumed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.faults.nemesis import Habits, Kind, Nemesis

NAMES = ["gateway-0", "scheduler-0", "worker-0", "worker-1", "nats-server-0"]


def acted(seed: int, every_s: float, until_s: float, step_s: float) -> list[tuple[float, Kind, tuple[str, ...], str]]:
    nemesis = Nemesis(seed, NAMES, Habits(every_s=every_s, until_s=until_s, steps=("batched",)))
    now_s, actions = 0.0, []
    while nemesis.next_s is not None:
        now_s = max(now_s + step_s, nemesis.next_s)
        actions += [(now_s, *action) for action in nemesis.due(now_s)]
    return actions


@given(st.integers(0, 1 << 31), st.floats(0.2, 5), st.floats(1, 60), st.floats(0, 2))
def test_what_it_stops_goes_on_and_it_ends(seed: int, every_s: float, until_s: float, step_s: float) -> None:
    stopped: Counter[str] = Counter()
    for when_s, kind, names, step in acted(seed, every_s, until_s, step_s):
        assert names
        assert set(names) <= set(NAMES)
        assert len(set(names)) == len(names)
        assert step in ("", "batched")
        for name in names:
            stopped[name] += (kind is Kind.STOP) - (kind is Kind.CONTINUE)
        if kind not in (Kind.CONTINUE, Kind.KILL):  # a second kill may be due a moment later
            assert when_s < until_s + step_s
    assert not +stopped


@given(st.integers(0, 1 << 31))
def test_a_seed_says_all_of_it(seed: int) -> None:
    assert acted(seed, 1.0, 30.0, 0.1) == acted(seed, 1.0, 30.0, 0.1)


def test_all_kinds_of_faults_come_to_all() -> None:
    actions = acted(7, 1.0, 500.0, 0.0)
    assert {kind for _, kind, _, _ in actions} == set(Kind)
    assert {name for _, _, names, _ in actions for name in names} == set(NAMES)
    assert any(step for *_, step in actions)
    assert any(len(names) > 1 for _, _, names, _ in actions)
