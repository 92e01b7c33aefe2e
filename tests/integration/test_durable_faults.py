"""Durable requests while processes of the server die: a short run of `benchmarks.durable_faults`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.durable_faults import Run, carry_out

REQUESTS = 3000
KILLS = 6


@pytest.mark.timeout(120)
def test_nothing_is_lost_answered_twice_or_wrong(tmp_path: Path) -> None:
    run = Run(requests=REQUESTS, seed=20, every_s=1.0, most_kills=KILLS, in_flight=64, rate=600, patience_s=20)
    asyncio.run(carry_out(run, tmp_path))
    print(run.line())
    assert run.verdict.promised == REQUESTS
    assert run.kills.total() == KILLS
    assert run.is_clean, f"{run.line()}\n{(tmp_path / 'log.txt').read_text()[-5000:]}"
    assert run.verdict.outcomes == {"succeeded": REQUESTS}
    assert sum(told.replies for told in run.told) > REQUESTS / 2
