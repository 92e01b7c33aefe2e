"""How much memory this process may use: the limit of its container, or what the machine has.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`memory.max`) and cgroup-v1/memory.rst (`memory.limit_in_bytes`).

`return_free_memory`: gives memory that was freed back to the system.

glibc keeps freed blocks of less than some megabytes for later. After a flood of bodies a gateway would keep their memory
for ever, beside what the next flood takes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from runtime.control_groups import CGROUPS, OWN_CGROUPS, limits_of


def available_memory_bytes(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The least of the machine's physical memory and the memory limits of this process's cgroup and its ancestors."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = limits_of("memory", ("memory.max",), ("memory.limit_in_bytes",), cgroups, own_cgroups)
    return min([machine_bytes, *(int(text) for (text,) in limits if text.isdigit())])  # "max" is no limit


def return_free_memory() -> None:
    """Returns what can be returned; takes some 0.1 ms per MiB. Does nothing with a C library that has no `malloc_trim`."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function
