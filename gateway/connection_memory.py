"""`ConnectionMemory`: the memory that one client connection holds, charged to the client's address."""

from __future__ import annotations

import ipaddress

from weir.runtime.memory_ledger import Account, MemoryLedger
from weir.schemas.core.errors import WeirError, overloaded

_SITE_PREFIX = 64  # bits of an IPv6 address that identify a site: its hosts choose the rest freely


class ConnectionMemory:
    """The ledger accounts of one connection. Call `close` when the connection is lost.

    `account` counts ordinary memory: received bodies, decompressed content, responses that are not sent yet. `slots`
    counts the payload slots in which bodies are still arriving.
    """

    __slots__ = ("account", "slots")

    def __init__(self, ledger: MemoryLedger, arriving_slots: MemoryLedger, address: str | None) -> None:
        principal = principal_of(address)
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

    __slots__ = ("_account", "_held")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._held: dict[str, int] = {}

    def charge(self, kind: str, size_bytes: int) -> bool:
        """Charges `size_bytes` of `kind` to the connection's account. Returns False, and charges nothing, without room."""
        if not self._account.charge(kind, size_bytes):
            return False
        self._held[kind] = self._held.get(kind, 0) + size_bytes
        return True

    def release_some(self, kind: str, size_bytes: int) -> None:
        """Releases part of what was charged before the response is complete."""
        size_bytes = min(size_bytes, self._held.get(kind, 0))
        self._held[kind] = self._held.get(kind, 0) - size_bytes
        self._account.release(kind, size_bytes)

    def release(self) -> None:
        """Releases everything that is still charged."""
        for kind, size_bytes in self._held.items():
            self._account.release(kind, size_bytes)
        self._held.clear()


def principal_of(address: str | None) -> str:
    """The name under which a client's memory is counted: its IPv4 address, or the /64 network of its IPv6 address."""
    try:
        ip = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return "unknown"
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), _SITE_PREFIX), strict=False))


def no_memory() -> WeirError:
    """An UNAVAILABLE error (HTTP 503 with Retry-After): the memory ledger has no room for the request."""
    return overloaded("the server holds too many unfinished requests and unread responses; try again later")
