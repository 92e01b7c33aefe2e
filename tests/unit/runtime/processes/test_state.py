"""Whether a process stands still, seen with real processes, and frozen control groups as the kernel describes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from weir.runtime.processes.state import ProcessIdentity, look_at, own_identity


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def identity_of(pid: int) -> ProcessIdentity:
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ProcessIdentity(pid, own_identity().namespace, started)


def stands_still(process: ProcessIdentity) -> bool:
    state = look_at(process)
    assert state is not None
    return state.stands_still


def test_this_process_runs() -> None:
    own = own_identity()
    assert own == identity_of(os.getpid())
    state = look_at(own)
    assert state is not None
    assert not state.stands_still
    assert state.cpu_ticks > 0


def test_a_stopped_process_stands_still_until_it_continues(other: subprocess.Popen[bytes]) -> None:
    process = identity_of(other.pid)
    assert not stands_still(process)
    other.send_signal(signal.SIGSTOP)
    wait_until(lambda: stands_still(process))
    other.send_signal(signal.SIGCONT)
    wait_until(lambda: not stands_still(process))


def test_an_ended_process_is_not_seen(other: subprocess.Popen[bytes]) -> None:
    process = identity_of(other.pid)
    other.kill()
    other.wait()
    assert look_at(process) is None


def test_another_process_of_the_same_pid_is_not_taken_for_it(other: subprocess.Popen[bytes]) -> None:
    process = identity_of(other.pid)
    other.send_signal(signal.SIGSTOP)
    wait_until(lambda: stands_still(process))
    assert look_at(process._replace(started=process.started - 1)) is None
    assert look_at(process._replace(namespace=process.namespace + 1)) is None
    assert look_at(process._replace(started=0)) is None


FROZEN_GROUPS = (
    ("0::/pods/one\n", "pods/one/cgroup.events", "populated 1\nfrozen 1\n"),
    ("0::/pods/one\n", "unified/pods/one/cgroup.events", "populated 1\nfrozen 1\n"),
    ("4:memory:/a\n3:freezer:/pods/one\n", "freezer/pods/one/freezer.state", "FROZEN\n"),
)


@pytest.mark.parametrize(("groups", "file", "content"), FROZEN_GROUPS)
def test_a_process_of_a_frozen_group_stands_still(groups: str, file: str, content: str, tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self" / "ns").mkdir(parents=True)
    (proc / "self" / "ns" / "pid").touch()
    (proc / "70").mkdir()
    (proc / "70" / "stat").write_text("70 (a ) b) S " + " ".join(map(str, range(4, 30))))
    (proc / "70" / "cgroup").write_text(groups)
    process = ProcessIdentity(70, (proc / "self" / "ns" / "pid").stat().st_ino, 22)

    def look() -> tuple[bool, int] | None:
        return look_at(process, proc, cgroups)

    assert look() == (False, 14 + 15)
    (cgroups / file).parent.mkdir(parents=True)
    (cgroups / file).write_text(content)
    assert look() == (True, 14 + 15)
    (cgroups / file).write_text(content.replace("frozen 1", "frozen 0").replace("FROZEN", "THAWED"))
    assert look() == (False, 14 + 15)
