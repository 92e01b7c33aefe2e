"""`look_at`: whether another process of this host stands still, from Linux (proc_pid_stat(5), cgroups(7)).

A process stands still while a signal (SIGSTOP) or a debugger has stopped it, or while its control group is frozen, as by
`docker pause`. Its connections stay open, so that nothing else tells it from a process that is merely silent.

A pid alone does not identify a process: it is used again after the process has ended, and in another pid namespace it
is another process. `ProcessIdentity` adds the namespace and the start time, which only that process has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")

# Fields of /proc/<pid>/stat after the name, which may contain any character.
_STATE, _UTIME, _STIME, _START = 0, 11, 12, 19
_STOPPED = ("T", "t")  # by a signal; by a debugger


class ProcessIdentity(NamedTuple):
    """A process: its pid, the inode of the pid namespace in which it has that pid, and its start in clock ticks since boot.

    `started` is 0 for a process that could not find out its own.
    """

    pid: int
    namespace: int
    started: int


class ProcessState(NamedTuple):
    """Whether a process stands still, and the processor time it has used, in clock ticks."""

    stands_still: bool
    cpu_ticks: int


def own_identity(proc: Path = _PROC) -> ProcessIdentity:
    """The identity of this process."""
    fields = _stat(proc / "self")
    return ProcessIdentity(os.getpid(), _own_namespace(proc), 0 if fields is None else int(fields[_START]))


def look_at(process: ProcessIdentity, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> ProcessState | None:
    """The state of a process of this host; None if it has ended or cannot be seen from here."""
    if not process.started or process.namespace != _own_namespace(proc):
        return None
    fields = _stat(proc / str(process.pid))
    if fields is None or int(fields[_START]) != process.started:
        return None
    stands_still = fields[_STATE] in _STOPPED or _is_frozen(proc / str(process.pid), cgroups)
    return ProcessState(stands_still, int(fields[_UTIME]) + int(fields[_STIME]))


@cache
def _own_namespace(proc: Path) -> int:
    try:
        return os.stat(proc / "self" / "ns" / "pid").st_ino
    except OSError:  # no Linux, or no /proc
        return 0


def _stat(folder: Path) -> list[str] | None:
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > _START else None


def _is_frozen(folder: Path, cgroups: Path) -> bool:
    """Whether the control group of a process, or one above it, is frozen."""
    for file, word in _freezer_files(folder, cgroups):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue  # the group is not mounted here
        if word in lines:
            return True
    return False


def _freezer_files(folder: Path, cgroups: Path) -> Iterator[tuple[Path, str]]:
    """The files that tell whether its groups are frozen, and the line that says so."""
    try:
        groups = (folder / "cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = (*group.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            for mount in (cgroups, cgroups / "unified"):
                yield mount / path.lstrip("/") / "cgroup.events", "frozen 1"
        elif "freezer" in controllers.split(","):  # version 1
            yield cgroups / "freezer" / path.lstrip("/") / "freezer.state", "FROZEN"
