"""`KillOnParentExit`: the processes that a child has started end with the parent, however that ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from weir.runtime.child_processes import KillOnParentExit

# A worker that ends, its child, and a process that the child has started.
WORKER = """
import os, signal, subprocess
from weir.runtime.child_processes import KillOnParentExit
group = KillOnParentExit()
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], pass_fds=[group.fd], start_new_session=True)
group.tie(child.pid)
os.read(0, 1)
{end}
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "group.close(); os.read(0, 1)"])
def test_a_grandchild_ends_with_the_worker(end: str) -> None:
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
            assert select.select([grandchild], [], [], 10)[0], "the grandchild still runs"
        finally:
            os.close(grandchild)
            worker.kill()
            worker.wait()


def test_close_without_a_process_and_twice() -> None:
    group = KillOnParentExit()
    group.close()
    group.close()
    assert group.fd == -1
