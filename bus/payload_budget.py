"""How much shared memory the payload arenas of a process may hold together, slots that wait to be used again included."""

from __future__ import annotations

import os
import threading
from functools import cache

from bus.identity import SHARED_MEMORY_DIRECTORY
from runtime.memory_limit import available_memory_bytes

DEFAULT_BUDGET_BYTES = 4 << 30
"""The most of a process that was not told otherwise. Less where half of what `/dev/shm` has free, or a quarter of the
memory of the container or machine, is less: the kernel counts this memory as the container's too."""

_LEAST_DEFAULT_BYTES = 64 << 20


class PayloadBudget:
    """See the module. For any thread."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return self._held_bytes

    def take(self, size: int) -> bool:
        """Whether there is still so much, which is held from then on."""
        with self._lock:
            if self._held_bytes + size > self.total_bytes:
                return False
            self._held_bytes += size
            return True

    def give_back(self, size: int) -> None:
        """So much is held no more."""
        with self._lock:
            self._held_bytes -= size


@cache
def process_budget() -> PayloadBudget:
    """That of this process."""
    try:
        told = os.statvfs(SHARED_MEMORY_DIRECTORY)
        free_bytes = told.f_bavail * told.f_frsize
    except OSError:
        free_bytes = 0
    share_bytes = min(free_bytes // 2, available_memory_bytes() // 4)
    return PayloadBudget(min(DEFAULT_BUDGET_BYTES, max(share_bytes, _LEAST_DEFAULT_BYTES)))


def limit_payloads(total_bytes: int) -> None:
    """An operator has said how much it is; 0: has not."""
    if total_bytes:
        process_budget().total_bytes = total_bytes
