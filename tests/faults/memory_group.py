"""`memory_group`: a group of processes with a common memory limit, as those of a container.

It is a control group below the one of this process. When the limit is exceeded, the kernel kills the process with the most
memory. Source: Linux, admin-guide/cgroup-v1/memory and cgroup-v2 (`memory.max`).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.report import Skipped

_REMOVED_WITHIN_S = 5.0


class MemoryGroup:
    """A control group with a common memory limit."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        is_unified = (folder / "memory.max").exists()
        self._kills = folder / ("memory.events" if is_unified else "memory.oom_control")
        (folder / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def add(self, pids: Sequence[int]) -> None:
        """Add processes. Memory they have allocated already is not counted; that of their children is."""
        _move(self._folder, pids)

    @property
    def kills(self) -> int:
        """Number of processes the kernel has killed in this group."""
        found = re.search(r"^oom_kill (\d+)", self._kills.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def pids(self) -> list[int]:
        """The process ids in the group."""
        return [int(pid) for pid in (self._folder / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Create a group and remove it at the end; remaining processes move to this process's group. May raise Skipped."""
    parent = _own_group()
    folder = parent / f"weir-faults-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise Skipped(f"no group of processes can be made: {error}") from error
    try:
        group = MemoryGroup(folder, limit_bytes)
        yield group
        _move(parent, group.pids)
    finally:
        deadline_s = time.monotonic() + _REMOVED_WITHIN_S
        while folder.exists() and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # some have been told to end, but have not ended yet
                folder.rmdir()
            time.sleep(0.02)


def _own_group() -> Path:
    """The parent folder for memory groups below this process's group. Raises Skipped if there is none."""
    if os.geteuid() != 0:
        raise Skipped("groups of processes need root")
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(place + paths.get("memory", "/"))
        if kind == "cgroup2":
            folder = Path(place + paths.get("", "/"))
            if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                return folder
    raise Skipped("the kernel has no groups with a limit of memory here")


def _move(folder: Path, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))
