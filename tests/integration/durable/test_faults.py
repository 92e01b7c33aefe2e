"""Durable requests while processes are killed: a short run of `tests.faults.durable_kills`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.durable_kills import Run, carry_out
from tests.support.durable.restarting_server import ROLES

REQUESTS = 3000
KILLS = 6
SEED = 109  # by which each role is killed, the durable consumer twice


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
    assert sum(reply.replies for reply in run.told) > REQUESTS / 2
