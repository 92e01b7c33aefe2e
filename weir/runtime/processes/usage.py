"""`process_usage`: the processor time and memory of this process, from Linux (proc_pid_stat(5))."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Fields of /proc/<pid>/stat after the name, which may contain any character: utime, stime, cutime, cstime, rss.
_TIMES = slice(11, 15)
_RSS = 21


def process_usage(with_children: bool = False) -> dict[str, float] | None:
    """Returns processor seconds (including those of ended children) and resident bytes; None where /proc is missing.

    The form is that of `weir.schemas.wire.statistics.ProcessReading`. `with_children` adds running child processes, such
    as the processes of Python models. Memory shared by several processes counts for each of them.
    """
    ticks = pages = 0
    waiting = [os.getpid()]
    seen: set[int] = set()
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[_TIMES]))
            pages += int(fields[_RSS])
        except (OSError, ValueError, IndexError):
            continue  # the process has just ended
        if with_children:
            waiting += _children(pid)
    return {"cpu_s": ticks / _TICKS_PER_S, "resident_bytes": pages * _PAGE_BYTES} if ticks or pages else None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return found
