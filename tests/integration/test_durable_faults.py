"""Durable requests while processes of the server die: a short run of `benchmarks.durable_faults`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.durable.served import ROLES
from benchmarks.durable_faults import Run, carry_out

REQUESTS = 3000
KILLS = 6
SEED = 173  # by which each role is killed, the gateway and nats-server twice


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_is_lost_answered_twice_or_wrong(tmp_path: Path) -> None:
    run = Run(requests=REQUESTS, seed=SEED, every_s=0.8, most_kills=KILLS, in_flight=64, rate=550, patience_s=20)
    asyncio.run(carry_out(run, tmp_path))
    print(run.line())
    assert run.verdict.promised == REQUESTS
    assert set(run.kills) == set(ROLES)
    assert run.is_clean, f"{run.line()}\n{(tmp_path / 'log.txt').read_text()[-5000:]}"
    assert run.verdict.outcomes == {"succeeded": REQUESTS}
    assert sum(told.replies for told in run.told) > REQUESTS / 2
