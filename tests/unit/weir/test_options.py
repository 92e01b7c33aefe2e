"""Triton's spellings of truth values on the command line."""

import pytest

from weir.options import Switch, with_implied_values


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        (["serve", "--strict-readiness"], ["serve", "--strict-readiness=true"]),
        (["--strict-readiness", "--http-port", "1"], ["--strict-readiness=true", "--http-port", "1"]),
        (["--strict-readiness", "off"], ["--strict-readiness", "off"]),
        (["--strict-readiness=off"], ["--strict-readiness=off"]),
        (["--log-verbose", "--exit-on-error"], ["--log-verbose=1", "--exit-on-error=true"]),
        (["--log-verbose", "2"], ["--log-verbose", "2"]),
        (["--http-port", "--id", "x"], ["--http-port", "--id", "x"]),
        ([], []),
    ],
)
def test_bare_options_get_the_value_they_imply(given: list[str], completed: list[str]) -> None:
    assert with_implied_values(given) == completed


def test_switch_spellings() -> None:
    assert [word for word in Switch if word.on] == ["true", "1", "on"]
    assert [word for word in Switch if not word.on] == ["false", "0", "off"]
