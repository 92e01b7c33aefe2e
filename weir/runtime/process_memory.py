"""How much memory this process may use: the limit of its container, or what the machine has.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`memory.max`) and cgroup-v1/memory.rst (`memory.limit_in_bytes`).

`keep_freed_memory` has the C library keep freed blocks of up to 32 MiB for later ones. By default glibc maps blocks of more
than 128 KiB anew, or gives the end of the heap back as soon as 128 KiB of it are free, and the kernel clears each page
again: a request of 1 MB costs a gateway almost twice the CPU time. `return_free_memory` gives freed memory back to the
system. Without it a gateway would keep the memory of a flood of bodies for ever, beside what the next flood takes.
Source: mallopt(3); `M_MMAP_THRESHOLD` is at most 32 MiB.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from weir.runtime.control_groups import CGROUPS, OWN_CGROUPS, limits_of


def available_memory_bytes(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The least of the machine's physical memory and the memory limits of this process's cgroup and its ancestors."""
    limits = limits_of("memory", ("memory.max",), ("memory.limit_in_bytes",), cgroups, own_cgroups)
    return min([machine_memory_bytes(), *(int(text) for (text,) in limits if text.isdigit())])  # "max" is no limit


def machine_memory_bytes() -> int:
    """The physical memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

KEPT_BLOCK_BYTES = 32 << 20
"""The largest freed block that is kept for later."""

KEPT_HEAP_BYTES = 64 << 20
"""How much free memory at the end of the heap is kept for later."""


def keep_freed_memory() -> None:
    """Keeps freed blocks for later ones, from now on. Does nothing with a C library that has no `mallopt`.

    What the environment sets (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`) stays.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        mallopt(_M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)


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
