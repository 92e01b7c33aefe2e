"""A few seconds of mixed attacks cost honest clients no request (`python -m tests.faults.mixed_attack`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_honest_clients_lose_nothing_beside_attacks() -> None:
    command = [sys.executable, "-m", "tests.faults.mixed_attack", "--seconds=15", "--alone=3", "--seed=7"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
