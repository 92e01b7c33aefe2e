"""How much of a container's memory its roles may spend on requests, beside what they need by themselves."""

from __future__ import annotations

from weir.runtime.process_memory import available_memory_bytes, machine_memory_bytes

PROCESS_BYTES = 96 << 20
"""Memory that one process of Weir needs before the first request: measured 60 to 150 MiB, a part of it shared."""


def memory_for_requests_bytes(processes: int = 1) -> int:
    """What is left for requests of the memory limit of this process's control group, which `processes` of Weir share.

    A quarter of the limit at least. Without a limit it is the memory of the machine.
    """
    limit_bytes = available_memory_bytes()
    if limit_bytes >= machine_memory_bytes():
        return limit_bytes
    return max(limit_bytes // 4, limit_bytes - processes * PROCESS_BYTES)
