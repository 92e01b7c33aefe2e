"""`LogLimiter` logs each cause once an interval, and counts what it left out."""

from __future__ import annotations

import logging

import pytest

from weir.runtime import log_limiter
from weir.runtime.log_limiter import LogLimiter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_one_line_each_second_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limiter = LogLimiter(logging.getLogger("test"), clock=clock)
    assert [limiter.warning("full", "queue %s is full", "a") for _ in range(5)] == [True, False, False, False, False]
    assert limiter.warning("lost", "connection lost")
    clock.now_s += 1.0
    assert limiter.warning("full", "queue %s is full", "b")
    assert messages(caplog) == [
        "queue a is full",
        "connection lost",
        "queue b is full (4 more like this in the last 1 s)",
    ]


def test_causes_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limiter, "MAX_CAUSES", 3)
    limiter = LogLimiter(logging.getLogger("test"), clock=Clock())
    for cause in "abcd":
        limiter.warning(cause, cause)
    assert not limiter.warning("d", "d")
    assert limiter.warning("a", "a")  # it was forgotten
