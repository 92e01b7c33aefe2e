"""How much of a container's memory is for requests."""

from __future__ import annotations

import pytest

from weir.runtime.limits import budgets
from weir.runtime.limits.budgets import PROCESS_BYTES, memory_for_requests_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "processes", "left"),
    [
        (2 * GIB, 1, 2 * GIB - PROCESS_BYTES),
        (2 * GIB, 6, 2 * GIB - 6 * PROCESS_BYTES),
        (GIB // 4, 6, GIB // 16),
        (64 * GIB, 6, 64 * GIB),  # the machine's
    ],
)
def test_it_is_what_the_processes_leave(limit: int, processes: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "available_memory_bytes", lambda: limit)
    monkeypatch.setattr(budgets, "machine_memory_bytes", lambda: 64 * GIB)
    assert memory_for_requests_bytes(processes) == left
