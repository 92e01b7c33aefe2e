"""How much memory this process may use: the limit of its container, or what the machine has.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`memory.max`) and cgroup-v1/memory.rst (`memory.limit_in_bytes`).

`return_free_memory`: gives memory that was freed back to the system.

glibc keeps freed blocks of less than some megabytes for later. After a flood of bodies a gateway would keep their memory
for ever, beside what the next flood takes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory_bytes(cgroups: Path = _CGROUPS, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """The least of the machine's physical memory and the memory limits of this process's cgroup and its ancestors."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *_limits(cgroups, own_cgroups)])


def _limits(cgroups: Path, own_cgroups: Path) -> Iterator[int]:
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return  # no Linux, or no /proc
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            for mount in (cgroups, cgroups / "unified"):
                yield from _limits_up(mount, path, "memory.max")
        elif "memory" in controllers.split(","):  # version 1
            yield from _limits_up(cgroups / "memory", path, "memory.limit_in_bytes")


def _limits_up(mount: Path, path: str, file_name: str) -> Iterator[int]:
    # Inside a container the path may name a folder of the host that is not mounted here; the mount itself is then the
    # container's own cgroup.
    folder = mount / path.lstrip("/")
    while folder.is_relative_to(mount):
        try:
            text = (folder / file_name).read_text().strip()
        except OSError:
            text = ""
        if text.isdigit():  # "max" is no limit
            yield int(text)
        if folder == mount:
            return
        folder = folder.parent


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
