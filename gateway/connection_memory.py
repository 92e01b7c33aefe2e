"""`ConnectionMemory`: what one client connection holds of a gateway's memory, and whose connection it is."""

from __future__ import annotations

import ipaddress

from runtime.memory_ledger import Account, MemoryLedger
from schemas.errors import WeirError, overloaded

_SITE_PREFIX = 64  # bits of an IPv6 address that one site is given: its hosts choose the rest as they like


class ConnectionMemory:
    """The accounts of one connection; `close` when it is lost.

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
"""Where the ASGI scope of a request that came over HTTP holds its `RequestMemory`."""


class RequestMemory:
    """What one request that ASGI serves holds; released when it is answered."""

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
        """So much of what was charged is gone before the request is answered."""
        size_bytes = min(size_bytes, self._held.get(kind, 0))
        self._held[kind] = self._held.get(kind, 0) - size_bytes
        self._account.release(kind, size_bytes)

    def release(self) -> None:
        """Releases all of it."""
        for kind, size_bytes in self._held.items():
            self._account.release(kind, size_bytes)
        self._held.clear()


def principal_of(address: str | None) -> str:
    """The client behind an IP address, as far as memory is shared out: the address, or the /64 network of an IPv6 one."""
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
    """An UNAVAILABLE error (HTTP 503, with Retry-After): the memory ledger has no room for the request."""
    return overloaded("the server holds too many unfinished requests and unread responses; try again later")
