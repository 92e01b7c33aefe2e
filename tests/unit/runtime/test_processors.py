"""The processors that a process may use, by its affinity mask and its control groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weir.runtime.processors import finish_before_woken, processor_count, processors_by_core


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An affinity mask of sixteen processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def count(folder: Path, own: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "own").write_text(own)
    return processor_count(folder / "cgroup", folder / "own")


def test_without_a_quota_it_is_the_affinity_mask(tmp_path: Path) -> None:
    assert count(tmp_path, "garbage\n0::/\n", {"cpu.max": "max 100000"}) == 16
    assert processor_count(tmp_path / "none", tmp_path / "none") == 16


def test_version_2_takes_the_least_of_a_group_and_its_ancestors(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000", "cpu.max": "800000 100000"}
    assert count(tmp_path, "0::/a/b\n", files) == 3


def test_version_1_reads_the_cpu_controller(tmp_path: Path) -> None:
    files = {"cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "-1"}
    assert count(tmp_path, "4:cpu,cpuacct:/box\n1:name=systemd:/\n", files) == 2
    assert count(tmp_path, "4:memory:/box\n", files) == 16


def test_less_than_one_processor_is_one(tmp_path: Path) -> None:
    assert count(tmp_path, "0::/\n", {"cpu.max": "20000 100000"}) == 1


@pytest.mark.parametrize("text", ["", "100000", "max", "garbage 100000", "100000 0", "-1 100000"])
def test_a_malformed_quota_is_none(text: str, tmp_path: Path) -> None:
    assert count(tmp_path, "0::/\n", {"cpu.max": text}) == 16


def test_hyperthreads_of_a_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 9})
    for number, package, core in ((0, 0, 0), (1, 1, 0), (2, 0, 0), (3, 1, 0)):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert processors_by_core(tmp_path) == [0, 2, 9, 1, 3]


def test_without_a_topology_they_are_in_order(tmp_path: Path) -> None:
    assert processors_by_core(tmp_path) == list(range(16))


def in_a_thread(run: Callable[[], int]) -> int:
    """The result of `run` in a thread of its own, because a policy belongs to a thread."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


def policy_after(policy: int) -> int:
    """The policy after `finish_before_woken` in a thread with `policy`."""
    os.sched_setscheduler(0, policy, os.sched_param(0))
    finish_before_woken()
    return os.sched_getscheduler(0)


def test_the_default_policy_becomes_the_one_for_throughput() -> None:
    assert in_a_thread(lambda: policy_after(os.SCHED_OTHER)) == os.SCHED_BATCH


def test_a_policy_that_the_user_has_set_stays() -> None:
    assert in_a_thread(lambda: policy_after(os.SCHED_IDLE)) == os.SCHED_IDLE


def test_a_system_that_does_not_permit_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, param: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    finish_before_woken()
