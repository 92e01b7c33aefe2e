"""What a process has started goes with its worker, however that ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from worker.process_group import GroupTie

# A worker, which is killed; its child, which knows of nothing; and what that has started.
WORKER = """
import os, signal, subprocess
from worker.process_group import GroupTie
tie = GroupTie()
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], pass_fds=[tie.fd], start_new_session=True)
tie.tie(child.pid)
os.read(0, 1)
{end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "tie.close(); os.read(0, 1)"])
def test_what_a_process_has_started_ends_with_the_worker(end: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER.format(end=end)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker.stdin, worker.stdout:
        grandchild = os.pidfd_open(int(worker.stdout.readline()))
        try:
            worker.stdin.write("x")
            worker.stdin.flush()
            assert select.select([grandchild], [], [], 10)[0], "it runs on"
        finally:
            os.close(grandchild)
            worker.kill()
            worker.wait()


def test_a_tie_that_holds_nothing_is_closed_like_any_other() -> None:
    tie = GroupTie()
    tie.close()
    tie.close()
    assert tie.fd == -1
