"""Processes with a common memory limit: the kernel kills only the one with the most memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.faults.memory_group import memory_group
from tests.faults.report import Skipped
from tests.support.control_group import ControlGroup
from weir.runtime.child_processes import dies_with_parent

_EATS = "input(); x = bytearray(160 << 20); print(len(x), flush=True); input()"


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    try:
        with memory_group(64 << 20) as made:
            yield made
    except Skipped as reason:
        pytest.skip(str(reason))


def test_the_kernel_ends_who_eats(group: ControlGroup) -> None:
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
