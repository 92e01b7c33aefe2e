"""`StallDetector`: detects transfers that have stalled, so that no client holds memory or a connection without end.

In each `STALL_PERIOD_S` at least `MIN_PROGRESS_BYTES` must be transferred, or all that is left; that is about 550 bytes a
second. Connections are checked every `CHECK_INTERVAL_S`, so no timer is set per request.

Responses have more time, because a program may pause between two responses that it reads: `UNREAD_PERIOD_S`, unless the
memory ledger is more than half full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from weir.runtime.containment import contained
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.process_memory import return_free_memory
from weir.schemas.core.errors import ErrorCode, WeirError

STALL_PERIOD_S = 30.0
MIN_PROGRESS_BYTES = 16 * 1024
"""How much of a request's head or body must arrive in each `STALL_PERIOD_S`."""

UNREAD_PERIOD_S = 300.0
"""The time in which a client must read `MIN_PROGRESS_BYTES` of its responses; `STALL_PERIOD_S` when memory is short."""

CHECK_INTERVAL_S = 10.0

_RETURN_BYTES = 64 << 20  # freed since the last check; less is soon used again


class StallDetector:
    """Watches one transfer at a time: call `reset` where another one begins."""

    __slots__ = ("_bytes", "_since_s")

    def __init__(self) -> None:
        self._bytes = 0
        self._since_s: float | None = None

    def is_stalled(self, now_s: float, transferred_bytes: int, period_s: float = STALL_PERIOD_S) -> bool:
        """Whether fewer than `MIN_PROGRESS_BYTES` were transferred in the last `period_s`.

        `transferred_bytes` is the total so far.
        """
        gained_bytes = transferred_bytes - self._bytes
        if self._since_s is None or not 0 <= gained_bytes < MIN_PROGRESS_BYTES:
            self._bytes, self._since_s = transferred_bytes, now_s
            return False
        return now_s - self._since_s >= period_s

    def reset(self) -> None:
        """Forgets the transfer: nothing is being transferred now."""
        self._since_s = None


class MonitoredConnection(Protocol):
    """A connection that closes itself when its client stalls."""

    def check_progress(self, now_s: float) -> None:
        """Checks the transfers of the connection; `now_s` is monotonic."""


class StalledRequestError(WeirError):
    """A request stopped arriving: HTTP 408, over gRPC DEADLINE_EXCEEDED."""

    def __init__(self) -> None:
        text = f"the request stalled: less than {MIN_PROGRESS_BYTES} bytes of it arrived in {STALL_PERIOD_S:.0f} s"
        super().__init__(ErrorCode.UNAVAILABLE, text)

    @property
    def http_status(self) -> int:
        """The HTTP status of the response."""
        return 408

    @property
    def grpc_status(self) -> int:
        """The number of the gRPC status of the response."""
        return 4


async def end_stalled_connections(
    connections: Callable[[], Iterable[MonitoredConnection]], ledger: MemoryLedger
) -> None:
    """Checks all connections every `CHECK_INTERVAL_S`, until it is cancelled.

    After a flood of requests, as seen by `ledger`, it also returns free memory to the operating system.
    """
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now_s = time.monotonic()
        for connection in list(connections()):
            _check(connection, now_s)
        if ledger.recent_peak_bytes - ledger.total_bytes >= _RETURN_BYTES:
            ledger.recent_peak_bytes = ledger.total_bytes
            await asyncio.to_thread(return_free_memory)


@contained()
def _check(connection: MonitoredConnection, now_s: float) -> None:
    connection.check_progress(now_s)
