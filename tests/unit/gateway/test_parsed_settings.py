"""The default limits of a gateway's ledgers depend on the memory that it may use."""

import pytest

from weir.gateway import parsed_settings as memory_limits
from weir.gateway.settings import GatewaySettings

MIB = 1 << 20


@pytest.mark.parametrize(
    "available,limit,largest",
    [(64 << 30, 512 * MIB, 2**31 - 1), (1024 * MIB, 256 * MIB, 512 * MIB), (32 * MIB, 16 * MIB, 64 * MIB)],
)
def test_the_ledger_takes_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, available: int, limit: int, largest: int
) -> None:
    monkeypatch.setattr(memory_limits, "memory_for_requests_bytes", lambda: available)
    ledger = memory_limits.request_ledger(GatewaySettings(nats_url=""))
    assert (ledger.limit_bytes, ledger.largest_request_bytes) == (limit, largest)
    chosen = memory_limits.request_ledger(GatewaySettings(nats_url="", gateway_memory_byte_size=5 * MIB))
    assert chosen.limit_bytes == 5 * MIB


def test_arriving_bodies_reserve_at_most_half_of_the_slots() -> None:
    ledger = memory_limits.arriving_slots_ledger(100)
    account = ledger.account("a")
    assert account.charge("http", 50)
    assert not account.charge("http", 1)
