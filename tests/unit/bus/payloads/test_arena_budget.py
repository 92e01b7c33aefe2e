"""The default budget of payloads follows the memory of the container, not only the size of `/dev/shm`."""

import pytest

from weir.bus.payloads import arena as payload_budget

MIB = 1 << 20


@pytest.mark.parametrize(
    "available,budget", [(1024 * MIB, 256 * MIB), (64 * MIB, 64 * MIB), (1 << 50, payload_budget.DEFAULT_BUDGET_BYTES)]
)
def test_the_default_is_at_most_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, budget: int
) -> None:
    class Shared:
        f_bavail, f_frsize = 1 << 20, 1 << 20

    monkeypatch.setattr(payload_budget, "memory_for_requests_bytes", lambda: available)
    monkeypatch.setattr(payload_budget.os, "statvfs", lambda _path: Shared)
    assert payload_budget.process_budget.__wrapped__().total_bytes == budget
