"""`RunningBatch`: a batch from its arrival at a worker until the last of its requests has its last answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from bus.fetch_plan import Outcome
from schemas.messages import BatchMessage
from schemas.tensors import PayloadRef


class RunningBatch:
    """The batch's `message`, when it came, and which of its entries were cancelled meanwhile.

    The event loop makes and cancels it, any thread may ask. `has_deadlines` says that entries have one: most have none,
    and then nobody looks. `fetched` is what of it lay on other hosts, or why that could not be brought, None for nothing.
    """

    __slots__ = ("cancelled", "fetched", "has_deadlines", "message", "on_cancel", "received_ns")

    def __init__(self, message: BatchMessage) -> None:
        self.message = message
        self.received_ns = time.monotonic_ns()
        self.has_deadlines = False
        for entry in message.entries:
            if entry.deadline_ms:
                self.has_deadlines = True
        self.cancelled: frozenset[int] = frozenset()
        """Positions of entries whose callers have given up."""
        self.fetched: Mapping[PayloadRef, Outcome] | None = None
        self.on_cancel: Callable[[], None] | None = None
        """Called in the event loop when there are more of those."""

    def is_late(self, position: int) -> bool:
        """Whether the deadline of an entry has passed: nobody waits for its answer any more."""
        return self.has_deadlines and 0 < self.message.entries[position].deadline_ms <= time.time_ns() // 1_000_000

    def cancel(self, gateway: str, keys: Iterable[int]) -> None:
        """The callers of these requests have given up."""
        wanted = {(gateway, key) for key in keys}
        self.cancelled |= {
            position for position, entry in enumerate(self.message.entries) if (entry.gateway, entry.key) in wanted
        }
        if self.on_cancel is not None:
            self.on_cancel()
