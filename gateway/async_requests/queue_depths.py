"""`QueueDepths`: how far the durable queue of each model is, as JetStream tells of its consumer, at most so often."""

from __future__ import annotations

import time
from typing import NamedTuple

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from bus import durable_subjects as subjects
from bus.connection import Bus

FRESH_S = 0.5
"""So old may be what is told."""

_MAX_KEPT = 4096


class QueueDepth(NamedTuple):
    """Requests that `waiting` for a model, those being run among them; `taken` is the sequence of the last one taken up."""

    waiting: int = 0
    taken: int = 0


class _Kept:
    __slots__ = ("added", "depth", "known_s")

    def __init__(self, depth: QueueDepth, known_s: float) -> None:
        self.depth = depth
        self.known_s = known_s
        self.added = 0


class QueueDepths:
    """See the module. What is added here meanwhile is reckoned with."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: dict[str, _Kept] = {}

    async def of(self, model: str) -> QueueDepth:
        """How far the queue of `model` is. Raises NatsError, OSError or TimeoutError where the broker doesn't tell."""
        kept = self._kept.get(model)
        now_s = time.monotonic()
        if kept is None or now_s - kept.known_s > FRESH_S:
            depth = await self._ask(model)
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            kept = self._kept[model] = _Kept(depth, now_s)
        return QueueDepth(kept.depth.waiting + kept.added, kept.depth.taken)

    def added(self, model: str) -> None:
        """A request was stored."""
        kept = self._kept.get(model)
        if kept is not None:
            kept.added += 1

    async def _ask(self, model: str) -> QueueDepth:
        name = subjects.durable_consumer("event", model)
        try:
            told = await self._bus.jetstream.consumer_info(subjects.QUEUE_STREAM, name)
        except NotFoundError:
            return QueueDepth()  # nobody has taken the first one up
        taken = told.delivered.stream_seq if told.delivered is not None else 0
        return QueueDepth((told.num_pending or 0) + (told.num_ack_pending or 0), taken)


UNREACHABLE = (NatsError, OSError, TimeoutError)
"""What a broker that is away shows itself by."""
