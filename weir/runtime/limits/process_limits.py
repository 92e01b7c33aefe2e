"""What this process may use of its machine or container: found at its start, printed in one line, and heeded.

`find_limits` reads the CPU quota, the limits of memory and of processes of the control groups, the limit of open files,
and the size of `/dev/shm`; `log_limits` prints them with what a role makes of them. `computing_threads` is the number of
threads for one pool that computes.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`pids.max`) and cgroup-v1/pids.rst.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from weir.runtime.control_groups import CGROUPS, OWN_CGROUPS, limits_of
from weir.runtime.limits.open_files import open_files_limit
from weir.runtime.process_memory import available_memory_bytes, machine_memory_bytes
from weir.runtime.processors import processor_count

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size alone is read
"""Where payloads and clients' regions lie."""

FEW_PROCESSES = 128
"""A limit of processes and threads below this is warned of: `weir serve` with one model has 20 at rest (measured), and each
role starts some tens more under load."""

PROCESSES_PER_THREAD = 32
"""One pool of threads takes at most one in 32 of the processes and threads that the control group allows, since each
instance of a model may have a pool."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of one process. `memory_is_limited` and `processes` (None: no limit) are its control groups'.

    `machine_processors` are those of the affinity mask, `processors` what the CPU quota leaves of them.
    """

    processors: int
    machine_processors: int
    memory_bytes: int
    memory_is_limited: bool
    processes: int | None
    open_files: int
    shared_memory_bytes: int

    def __str__(self) -> str:
        processors = f"{self.processors} processor{'s' * (self.processors != 1)}"
        if self.processors < self.machine_processors:
            processors += f" (CPU quota; {self.machine_processors} in all)"
        memory = f"{show_bytes(self.memory_bytes)} of memory{' (control group)' * self.memory_is_limited}"
        processes = "any number of" if self.processes is None else str(self.processes)
        return (
            f"{processors}, {memory}, {processes} processes and threads, {self.open_files} open files, "
            f"{show_bytes(self.shared_memory_bytes)} in {SHARED_MEMORY}"
        )


def find_limits(
    cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS, shared_memory: Path = SHARED_MEMORY
) -> ProcessLimits:
    """The limits of this process now."""
    memory_bytes = available_memory_bytes(cgroups, own_cgroups)
    return ProcessLimits(
        processors=processor_count(cgroups, own_cgroups),
        machine_processors=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        memory_is_limited=memory_bytes < machine_memory_bytes(),
        processes=process_limit(cgroups, own_cgroups),
        open_files=open_files_limit(),
        shared_memory_bytes=_size_of(shared_memory),
    )


def process_limit(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> int | None:
    """How many processes and threads this process's control group, or one above it, may have; None without a limit."""
    found = limits_of("pids", ("pids.max",), ("pids.max",), cgroups, own_cgroups)
    return min((int(text) for (text,) in found if text.isdigit()), default=None)  # "max" is no limit


def computing_threads(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The number of threads for one pool that computes: one for each processor, within the limit of threads."""
    processors, processes = processor_count(cgroups, own_cgroups), process_limit(cgroups, own_cgroups)
    return processors if processes is None else max(1, min(processors, processes // PROCESSES_PER_THREAD))


def log_limits(logger: logging.Logger, limits: ProcessLimits, **used: str) -> None:
    """Logs the limits and what they are used for in one line: `used` has what, with `_` for blanks, and how much."""
    uses = "".join(f"; {name.replace('_', ' ')}: {value}" for name, value in used.items())
    logger.info("limits: %s%s", limits, uses)
    if limits.processes is not None and limits.processes < FEW_PROCESSES:
        logger.warning(
            "the control group allows %d processes and threads; where they do not suffice models fail to load, and "
            "processes end: raise the limit (`pids`) to %d or more",
            limits.processes,
            FEW_PROCESSES,
        )


def show_bytes(size_bytes: int) -> str:
    """A size for people: "512 MiB", "2.5 GiB"."""
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _size_of(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize
