"""A short run of `make faults`: kills at steps of a request, then random faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.cases.mix import short
from tests.faults.scene import Task

SEED = 23  # by which the scheduler and nats-server are killed at once
KILLS = (("worker", "answered"), ("scheduler", "batched"))


@pytest.mark.timeout(120)
def test_nothing_is_lost_answered_twice_or_wrong_whatever_happens(tmp_path: Path) -> None:
    line = asyncio.run(short(Task(seed=SEED, folder=tmp_path), KILLS, count=1))
    print(line.text())
    assert line.is_passed, line.text()
    assert line.requests > 50
    assert line.faults.total() >= len(KILLS) + 1
