"""What connections and requests hold is charged to the client's address and released once."""

import pytest

from weir.gateway.connection_memory import ConnectionMemory, RequestMemory, no_memory, principal_of
from weir.runtime.memory_ledger import MemoryLedger


@pytest.mark.parametrize(
    ("address", "principal"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "unknown"),
        (None, "unknown"),
        ("not an address", "unknown"),
    ],
)
def test_a_principal_is_an_address_or_a_site(address: str | None, principal: str) -> None:
    assert principal_of(address) == principal


def test_a_closed_connection_holds_nothing() -> None:
    ledger, slots = MemoryLedger(1000), MemoryLedger(1000)
    memory = ConnectionMemory(ledger, slots, "192.0.2.7")
    assert memory.account.charge("http", 100)
    assert memory.slots.charge("http", 200)
    memory.close()
    assert (ledger.total_bytes, slots.total_bytes) == (0, 0)


def test_a_request_releases_what_it_has_charged() -> None:
    ledger = MemoryLedger(1000)
    memory = RequestMemory(ledger.account("a"))
    assert memory.charge("http", 100)
    assert memory.charge("decompressed", 50)
    assert not memory.charge("decompressed", 5000)
    memory.release_some("http", 70)
    memory.release_some("http", 70)  # only 30 are left
    assert ledger.held_bytes.get("http", 0) == 0
    memory.release()
    memory.release()
    assert ledger.total_bytes == 0


def test_without_room_the_client_may_retry() -> None:
    error = no_memory()
    assert (error.http_status, error.retry_after_s > 0) == (503, True)
