"""The limits of a process, from the files of its control groups in both versions."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from weir.runtime.limits import process_limits
from weir.runtime.limits.process_limits import computing_threads, find_limits, log_limits, process_limit, show_bytes
from weir.runtime.process_memory import machine_memory_bytes


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An affinity mask of sixteen processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def groups(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Where these files of control groups are, and the file that names the process's own groups."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "own").write_text(own)
    return folder / "cgroup", folder / "own"


VERSION_2 = ("0::/box\n", {"box/cpu.max": "350000 100000", "box/memory.max": str(256 << 20), "box/pids.max": "512"})
VERSION_1 = (
    "3:cpu,cpuacct:/box\n2:memory:/box\n1:pids:/box\n",
    {
        "cpu/box/cpu.cfs_quota_us": "350000",
        "cpu/box/cpu.cfs_period_us": "100000",
        "memory/box/memory.limit_in_bytes": str(256 << 20),
        "pids/box/pids.max": "512",
    },
)


@pytest.mark.parametrize(("own", "files"), [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_the_limits_of_a_container(own: str, files: dict[str, str], tmp_path: Path) -> None:
    places = groups(tmp_path, own, files)
    limits = find_limits(*places)
    assert (limits.processors, limits.machine_processors) == (3, 16)
    assert (limits.memory_bytes, limits.memory_is_limited) == (256 << 20, True)
    assert limits.processes == 512
    assert str(limits).startswith(
        "3 processors (CPU quota; 16 in all), 256 MiB of memory (control group), 512 processes"
    )
    assert computing_threads(*places) == 3


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    limits = find_limits(tmp_path, tmp_path / "none", tmp_path)
    assert (limits.processors, limits.memory_bytes, limits.memory_is_limited) == (16, machine_memory_bytes(), False)
    assert limits.processes is None
    assert "any number of processes and threads" in str(limits)
    status = os.statvfs(tmp_path)
    assert limits.shared_memory_bytes == status.f_blocks * status.f_frsize
    assert find_limits(tmp_path, tmp_path / "none", tmp_path / "missing").shared_memory_bytes == 0


def test_the_least_limit_of_processes_counts_and_max_is_none(tmp_path: Path) -> None:
    files = {"a/b/pids.max": "100", "a/pids.max": "64", "pids.max": "max"}
    assert process_limit(*groups(tmp_path, "0::/a/b\n", files)) == 64
    assert process_limit(*groups(tmp_path / "other", "0::/\n", {"pids.max": "max"})) is None


@pytest.mark.parametrize(("processes", "threads"), [("64", 2), ("10", 1), ("4096", 16)])
def test_few_processes_leave_a_pool_few_threads(processes: str, threads: int, tmp_path: Path) -> None:
    assert computing_threads(*groups(tmp_path, "0::/\n", {"pids.max": processes})) == threads


def test_the_line_names_the_limits_and_their_uses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("weir.test")
    caplog.set_level(logging.INFO)
    log_limits(logger, find_limits(*groups(tmp_path, "0::/\n", {"pids.max": "4096"})), threads_of_a_pool="16")
    (record,) = caplog.records
    assert record.message.startswith("limits: 16 processors, ")
    assert record.message.endswith("; threads of a pool: 16")


def test_a_low_limit_of_processes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_limits(logging.getLogger("weir.test"), find_limits(*groups(tmp_path, "0::/\n", {"pids.max": "64"})))
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "allows 64 processes and threads" in record.message
    assert str(process_limits.FEW_PROCESSES) in record.message


def test_sizes_for_people() -> None:
    assert [show_bytes(size) for size in (16 << 20, 512 << 20, 3 << 29)] == ["16 MiB", "512 MiB", "1.5 GiB"]
