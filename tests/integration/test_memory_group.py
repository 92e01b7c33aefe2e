"""Processes that may have so much memory together: the kernel ends the one that has most, and no other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.faults.line import Skipped
from benchmarks.faults.memory_group import MemoryGroup, memory_group
from bus.parent_death import dies_with_parent

_EATS = "input(); x = bytearray(160 << 20); print(len(x), flush=True); input()"


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group(64 << 20) as made:
            yield made
    except Skipped as reason:
        pytest.skip(str(reason))


def test_the_kernel_ends_who_eats(group: MemoryGroup) -> None:
    eats, waits = (
        subprocess.Popen(
            [sys.executable, "-I", "-c", _EATS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=dies_with_parent(),
        )
        for _ in range(2)
    )
    group.add([eats.pid, waits.pid])
    assert set(group.pids) == {eats.pid, waits.pid}
    eats.communicate(b"\n", 20)
    assert eats.returncode == -signal.SIGKILL
    assert group.kills == 1
    assert waits.poll() is None
    waits.kill()
    waits.communicate()
