"""What connections and requests hold is charged to the client's address and released once."""

from weir.http_server.connection_memory import ConnectionMemory, RequestMemory, no_memory
from weir.runtime.memory_ledger import MemoryLedger


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
    memory.release()
    memory.release()
    assert ledger.total_bytes == 0


def test_without_room_the_client_may_retry() -> None:
    error = no_memory()
    assert (error.http_status, error.retry_after_s > 0) == (503, True)
