"""Levels of a sweep from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.perf.load.levels import MAX_LEVELS, Level, Mode, parse_levels


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4", [4]),
        ("1,2,8", [1, 2, 8]),
        ("1:4", [1, 2, 3, 4]),
        ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]),
        ("1:100:x10", [1, 10, 100]),
        ("3:20:x2", [3, 6, 12]),
        ("100:1000:300", [100, 400, 700, 1000]),
        ("5:5", [5]),
    ],
)
def test_levels(text: str, values: list[float]) -> None:
    assert parse_levels(Mode.CONCURRENCY, text) == [Level(Mode.CONCURRENCY, value) for value in values]


def test_a_rate_may_be_a_fraction() -> None:
    assert [level.value for level in parse_levels(Mode.RATE, "0.5:2:0.5")] == [0.5, 1.0, 1.5, 2.0]


def test_the_last_level_is_reached_in_spite_of_rounding() -> None:
    assert parse_levels(Mode.RATE, "0.1:0.3:0.1")[-1].value == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not a number"),
        ("x", "'x' is not a number"),
        ("0", "0 is not above 0"),
        ("-1:4", "-1 is not above 0"),
        ("4:1", "1 is below 4"),
        ("1:2:3:4", "at most three parts"),
        ("1:8:x1", "factor must be above 1"),
        ("1:8:0", "0 is not above 0"),
        ("1:nan", "nan is not above 0"),
        ("inf", "inf is not above 0"),
        ("1:1000000", f"more than {MAX_LEVELS} levels"),
        ("1.5", "whole number"),
        ("20000", "whole number from 1 to 10000"),
    ],
)
def test_what_names_no_levels_is_rejected(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_levels(Mode.CONCURRENCY, text)


@given(st.text(":,x.0123456789e", max_size=12))
def test_any_text_gives_bounded_ascending_levels_or_an_error(text: str) -> None:
    try:
        levels = parse_levels(Mode.RATE, text)
    except ValueError:
        return
    assert 1 <= len(levels) <= MAX_LEVELS
    assert all(level.value > 0 for level in levels)
    if ":" in text:
        assert [level.value for level in levels] == sorted(level.value for level in levels)
