"""`ControlGroup`: a group of processes with common limits, as those of a container. It needs root.

It lies below this process's groups, in version 1 (a folder for each controller) or version 2 of control groups. Source:
Linux, admin-guide/cgroup-v1 (memory, pids), scheduler/sched-bwc (`cpu.cfs_quota_us`) and admin-guide/cgroup-v2.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_REMOVED_WITHIN_S = 5.0
_PERIOD_US = 100_000


class NoControlGroups(Exception):
    """No group can be made here; the message says why."""


class ControlGroup:
    """One group; `folders` has its folder by controller: "memory", "cpu" or "pids"."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    def limit(self, memory_bytes: int = 0, processors: float = 0.0, processes: int = 0) -> None:
        """Sets those limits that are not 0."""
        if memory_bytes:
            self._write("memory", "memory.max", "memory.limit_in_bytes", str(memory_bytes))
        if processes:
            self._write("pids", "pids.max", "pids.max", str(processes))
        if processors:
            quota_us = int(processors * _PERIOD_US)
            if (self._folders["cpu"] / "cpu.max").exists():
                (self._folders["cpu"] / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (self._folders["cpu"] / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._folders["cpu"] / "cpu.cfs_quota_us").write_text(str(quota_us))

    def _write(self, controller: str, version_2: str, version_1: str, text: str) -> None:
        folder = self._folders[controller]
        (folder / (version_2 if (folder / version_2).exists() else version_1)).write_text(text)

    def add(self, pids: Sequence[int]) -> None:
        """Add processes. Memory they have allocated already is not counted; that of their children is."""
        for folder in self._folders.values():
            _move(folder, pids)

    @property
    def entering(self) -> str:
        """Commands of a shell, with which it joins the group; what it becomes, and starts, is born there."""
        return "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in dict.fromkeys(self._folders.values()))

    @property
    def kills(self) -> int:
        """Number of processes the kernel has killed in this group for want of memory."""
        folder = self._folders["memory"]
        is_unified = (folder / "memory.max").exists()
        text = (folder / ("memory.events" if is_unified else "memory.oom_control")).read_text()
        found = re.search(r"^oom_kill (\d+)", text, re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory that the group has used at a time, pages of tmpfs and of files included."""
        folder = self._folders["memory"]
        is_unified = (folder / "memory.peak").exists()
        return int((folder / ("memory.peak" if is_unified else "memory.max_usage_in_bytes")).read_text())

    @property
    def pids(self) -> list[int]:
        """The process ids in the group."""
        folder = next(iter(self._folders.values()))
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def control_group(controllers: Sequence[str] = ("memory",)) -> Iterator[ControlGroup]:
    """Create a group and remove it at the end; remaining processes move to this process's group.

    Raises NoControlGroups.
    """
    name = f"weir-tests-{os.getpid()}-{time.monotonic_ns()}"
    parents = {controller: _own_group(controller) for controller in controllers}
    folders = {controller: parent / name for controller, parent in parents.items()}
    try:
        try:
            for folder in dict.fromkeys(folders.values()):
                folder.mkdir()
        except OSError as error:
            raise NoControlGroups(f"no group of processes can be made: {error}") from error
        group = ControlGroup(folders)
        yield group
        for controller, parent in parents.items():
            _move(parent, [int(pid) for pid in (folders[controller] / "cgroup.procs").read_text().split()])
    finally:
        deadline_s = time.monotonic() + _REMOVED_WITHIN_S
        while any(folder.exists() for folder in folders.values()) and time.monotonic() < deadline_s:
            for folder in folders.values():
                with contextlib.suppress(OSError):  # processes that were killed have not ended yet
                    folder.rmdir()
            time.sleep(0.02)


def _own_group(controller: str) -> Path:
    """The parent folder for groups of `controller` below this process's group. Raises NoControlGroups without one."""
    if os.geteuid() != 0:
        raise NoControlGroups("groups of processes need root")
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and controller in options.split(","):
            return Path(place + paths.get(controller, "/"))
        if kind == "cgroup2":
            folder = Path(place + paths.get("", "/"))
            with contextlib.suppress(OSError):
                if controller in (folder / "cgroup.subtree_control").read_text().split():
                    return folder
    raise NoControlGroups(f"the kernel has no groups with a limit of {controller} here")


def _move(folder: Path, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))
