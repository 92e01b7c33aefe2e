"""`return_free_memory`: gives memory that was freed back to the system.

glibc keeps freed blocks of less than some megabytes for later. After a flood of bodies a gateway would keep their memory
for ever, beside what the next flood takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


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
