"""`benchmarks.scheduler_core` runs: its figures are of few rounds here, and not checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import scheduler_core
from benchmarks.scheduler_core import CASES, Case, best_s, decisions, service_us_per_request


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def best_of_two(call: Callable[[], object], calls: int, at_most_s: float = 1.0) -> float:
        return best_s(call, calls, 2, at_most_s)

    monkeypatch.setattr(scheduler_core, "ROUNDS", 2)
    monkeypatch.setattr(scheduler_core, "best_s", best_of_two)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.instances < 10 and case.live < 1000], ids=lambda case: case.name
)
def test_a_policy_decides(case: Case) -> None:
    rate, batch = decisions(case)
    assert rate > 0
    assert batch >= 1


@pytest.mark.parametrize("batch_size", [1, 32])
async def test_the_service_answers_each_request(batch_size: int) -> None:
    assert await service_us_per_request(batch_size) > 0
