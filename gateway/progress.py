"""`Progress`: whether a transfer goes on. A client that stalls must not hold memory, or a connection, for ever.

In each `PERIOD_S` at least `LEAST_BYTES` must be transferred, or all that is left; that is about 550 bytes a second. A
connection is looked at every `LOOK_INTERVAL_S`, so no timer is set per request.

Responses are judged more patiently, for a program may pause between two responses that it reads: `UNREAD_PERIOD_S`, unless
the memory ledger is more than half full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from runtime.containment import contained
from runtime.free_memory import return_free_memory
from runtime.memory_ledger import MemoryLedger
from schemas.errors import ErrorCode, WeirError

PERIOD_S = 30.0
LEAST_BYTES = 16 * 1024
"""The least part of a request's body, or of its head, that must arrive in each `PERIOD_S`."""

UNREAD_PERIOD_S = 300.0
"""In which a client must read `LEAST_BYTES` of the responses that wait for it; `PERIOD_S` where memory is short."""

LOOK_INTERVAL_S = 10.0

_RETURN_BYTES = 64 << 20  # freed since the last look: what is less is soon used again


class Progress:
    """One direction of one connection. Any object, compared by identity, tells one transfer from the next one."""

    __slots__ = ("_bytes", "_since_s", "_transfer")

    def __init__(self) -> None:
        self._bytes = 0
        self._since_s = 0.0
        self._transfer = 0

    def is_stalled(self, now_s: float, transfer: object, transferred_bytes: int, period_s: float = PERIOD_S) -> bool:
        """Whether less than `LEAST_BYTES` were transferred in the last `period_s`. `transferred_bytes` are all so far."""
        gained_bytes = transferred_bytes - self._bytes
        if id(transfer) != self._transfer or not 0 <= gained_bytes < LEAST_BYTES:
            self._transfer, self._bytes, self._since_s = id(transfer), transferred_bytes, now_s
            return False
        return now_s - self._since_s >= period_s

    def reset(self) -> None:
        """Nothing is being transferred."""
        self._transfer = 0


class Watched(Protocol):
    """A connection that ends itself when its client stalls."""

    def check_progress(self, now_s: float) -> None:
        """Looks at the transfers of the connection; `now_s` is monotonic."""


class StalledRequest(WeirError):
    """The body of a request stopped arriving: HTTP 408, over gRPC DEADLINE_EXCEEDED."""

    def __init__(self) -> None:
        text = f"the request stalled: less than {LEAST_BYTES} bytes of it arrived in {PERIOD_S:.0f} s"
        super().__init__(ErrorCode.UNAVAILABLE, text)

    @property
    def http_status(self) -> int:
        """See WeirError."""
        return 408

    @property
    def grpc_status(self) -> int:
        """See WeirError."""
        return 4


async def end_stalled_connections(connections: Callable[[], Iterable[Watched]], ledger: MemoryLedger) -> None:
    """Looks at all connections every `LOOK_INTERVAL_S`, until it is cancelled.

    Returns the memory to the system that a flood of requests has left behind, as far as the `ledger` saw one.
    """
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        now_s = time.monotonic()
        for connection in list(connections()):
            _check(connection, now_s)
        if ledger.recent_peak_bytes - ledger.total_bytes >= _RETURN_BYTES:
            ledger.recent_peak_bytes = ledger.total_bytes
            await asyncio.to_thread(return_free_memory)


@contained()
def _check(connection: Watched, now_s: float) -> None:
    connection.check_progress(now_s)
