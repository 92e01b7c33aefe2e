"""When a level of load is measured long enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.perf.load.stability import StabilityRule, Verdict, WindowFigures

RULE = StabilityRule(share=0.1, max_windows=6)
FIGURES = st.builds(WindowFigures, st.floats(0, 1e6), st.floats(0, 100))


def windows(*per_s: float, latency_s: float = 0.01) -> list[WindowFigures]:
    return [WindowFigures(value, latency_s) for value in per_s]


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([], Verdict.GO_ON),
        (windows(100, 100), Verdict.GO_ON),
        (windows(100, 100, 100), Verdict.STABLE),
        (windows(90, 100, 110), Verdict.STABLE),
        (windows(85, 100, 115), Verdict.GO_ON),
        (windows(10, 100, 100, 100), Verdict.STABLE),
        (windows(100, 50, 100, 50, 100, 50), Verdict.UNSTABLE),
        (windows(0, 0, 0), Verdict.GO_ON),
        ([*windows(100, 100), WindowFigures(100, 0.02)], Verdict.GO_ON),
    ],
)
def test_verdicts(measured: list[WindowFigures], verdict: Verdict) -> None:
    assert RULE.decide(measured) is verdict


def test_fewer_windows_than_three_are_compared_where_only_those_are_allowed() -> None:
    assert StabilityRule(0.1, 1).decide(windows(5)) is Verdict.STABLE
    assert StabilityRule(0.1, 2).decide(windows(5, 50)) is Verdict.UNSTABLE


@given(st.lists(FIGURES, max_size=6), st.floats(0.01, 1), st.integers(1, 6))
def test_a_measurement_ends_and_stable_means_that_the_last_windows_agree(
    measured: list[WindowFigures], share: float, max_windows: int
) -> None:
    rule = StabilityRule(share, max_windows)
    verdict = rule.decide(measured)
    if len(measured) >= max_windows:
        assert verdict is not Verdict.GO_ON
    if verdict is Verdict.STABLE:
        for values in zip(*measured[-rule.counted :], strict=True):
            assert max(values) <= min(values) * (1 + share) / (1 - share + 1e-12) + 1e-9 or share == 1
