"""`OwnCounters`: what a gateway counts of its response cache, told to all gateways that ask, itself among them."""

from __future__ import annotations

import time

from bus import subjects
from bus.connection import Bus, Message
from bus.reserved_subjects import may_answer
from calls.cache_counters import CacheCounters
from schemas.statistics import pack_counters


class OwnCounters:
    """Answers `statistics.query` with `counters`. A gateway without a cache has none, and nobody waits for it."""

    def __init__(self, bus: Bus, gateway_id: str, counters: CacheCounters) -> None:
        self._bus = bus
        self._id = gateway_id
        self._counters = counters
        self._born_ns = time.time_ns()

    async def start(self) -> None:
        """Listens, and tells that there is one more to be asked."""
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_query)
        self._bus.publish(subjects.LAST_COUNTERS, self._packed())

    def stop(self) -> None:
        """Says a last word: what was counted stays in the sums of the others."""
        self._bus.publish(subjects.LAST_COUNTERS, self._packed(leaving=True))

    def _on_query(self, message: Message) -> None:
        if may_answer(message, subjects.counters("")):
            self._bus.publish(message.reply, self._packed())

    def _packed(self, leaving: bool = False) -> bytes:
        return pack_counters(
            {"gateway": self._id, "born_ns": self._born_ns, "models": self._counters.snapshot(), "leaving": leaving}
        )
