"""`memory_group`: a group of processes with a common memory limit, as those of a container.

When the limit is exceeded, the kernel kills the process with the most memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.faults.report import Skipped
from tests.support.control_group import ControlGroup, NoControlGroups, control_group


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[ControlGroup]:
    """Create a group and remove it at the end; remaining processes move to this process's group. May raise Skipped."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(control_group())
        except NoControlGroups as reason:
            raise Skipped(str(reason)) from reason
        group.limit(memory_bytes=limit_bytes)
        yield group
