"""The memory that a process may use is the least of its machine's and of what its cgroups allow."""

import os
from pathlib import Path

from weir.runtime.process_memory import available_memory_bytes

MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit(folder: Path, own: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "own").write_text(own)
    return available_memory_bytes(folder / "cgroup", folder / "own")


def test_version_2_takes_the_least_of_a_group_and_its_ancestors(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max", "a/memory.max": "4096000", "memory.max": "8192000"}
    assert limit(tmp_path, "0::/a/b\n", files) == 4096000


def test_version_1_reads_the_memory_controller(tmp_path: Path) -> None:
    files = {"memory/box/memory.limit_in_bytes": "5000000", "memory/memory.limit_in_bytes": "9223372036854771712"}
    assert limit(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/box\n1:name=systemd:/\n", files) == 5000000


def test_a_container_whose_own_path_is_the_hosts_reads_its_mount(tmp_path: Path) -> None:
    assert limit(tmp_path, "4:memory:/docker/1a2b\n", {"memory/memory.limit_in_bytes": "6000000"}) == 6000000
    assert limit(tmp_path, "0::/../..\n", {"memory.max": "7000000"}) == 7000000


def test_without_a_limit_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert limit(tmp_path, "garbage\n0::/\n", {"memory.max": "max"}) == MACHINE_BYTES
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") == MACHINE_BYTES
    assert 0 < available_memory_bytes() <= MACHINE_BYTES
