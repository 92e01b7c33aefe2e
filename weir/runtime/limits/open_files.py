"""`raise_open_files`: a role may open as many files, connections included, as the system lets it.

Many systems set a soft limit of 1024 for old programs that call select(2), and a hard one far above it; a gateway with
1500 connections needs more than the soft one. Source: setrlimit(2).
"""

from __future__ import annotations

import contextlib
import resource

MAX_OPEN_FILES = 1 << 20
"""What the limit of open files is raised to at most: some programs walk through all descriptors that they may have, and a
container's limit may be a billion."""


def open_files_limit() -> int:
    """The soft limit of this process; `MAX_OPEN_FILES` where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> int:
    """Raises this process's soft limit of open files to its hard limit, at most `MAX_OPEN_FILES`; returns the limit.

    The processes that it starts inherit the limit. A higher soft limit stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return open_files_limit()
