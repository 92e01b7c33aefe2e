"""`ConnectionMemory`: the memory that one client connection holds, charged to the client's address."""

from __future__ import annotations

from weir.runtime.memory_ledger import Account, MemoryLedger
from weir.schemas.core.errors import WeirError, overloaded


class ConnectionMemory:
    """The ledger accounts of one connection. Call `close` when the connection is lost.

    `account` counts ordinary memory: received bodies, decompressed content, responses that are not sent yet. `slots`
    counts the payload slots in which bodies are still arriving.
    """

    __slots__ = ("account", "slots")

    def __init__(self, ledger: MemoryLedger, arriving_slots: MemoryLedger, principal: str) -> None:
        self.account: Account = ledger.account(principal)
        self.slots: Account = arriving_slots.account(principal)

    def close(self) -> None:
        """Releases what the connection holds."""
        self.account.close()
        self.slots.close()


MEMORY_KEY = "weir.memory"
"""The key under which the ASGI scope of an HTTP request holds its `RequestMemory`."""


class RequestMemory:
    """The memory that one ASGI request holds; released when the response is complete."""

    __slots__ = ("_held", "account")

    def __init__(self, account: Account) -> None:
        self.account = account
        self._held: dict[str, int] = {}

    def charge(self, kind: str, size_bytes: int) -> bool:
        """Charges `size_bytes` of `kind` to the connection's account. Returns False, and charges nothing, without room."""
        if not self.account.charge(kind, size_bytes):
            return False
        self._held[kind] = self._held.get(kind, 0) + size_bytes
        return True

    def release(self) -> None:
        """Releases everything that is still charged."""
        for kind, size_bytes in self._held.items():
            self.account.release(kind, size_bytes)
        self._held.clear()


def no_memory() -> WeirError:
    """An UNAVAILABLE error (HTTP 503 with Retry-After): the memory ledger has no room for the request."""
    return overloaded("the server holds too many unfinished requests and unread responses; try again later")
