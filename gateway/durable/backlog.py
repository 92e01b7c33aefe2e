"""`Backlog`: what lies in the durable streams, as the broker tells it: the same at every gateway.

Asked for when the metrics are, and not again within two seconds.
Source: JetStream's stream info (with subjects) and consumer list, whose pages have 256 consumers.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from nats.errors import Error as NatsError

from bus import durable_subjects as subjects
from bus.connection import Bus
from bus.subjects import untoken
from gateway.durable.counters import DurableCounters
from schemas.lanes import Lane

logger = logging.getLogger("weir.gateway")

MAX_AGE_S = 2.0
"""For so long what was told is told again."""

MAX_CONSUMERS = 4096
"""Consumers that are looked at; those beyond have no gauges."""

_LANES = {"event": Lane.EVENT, "batch": Lane.BATCH}
_STREAMS = (subjects.QUEUE_STREAM, subjects.RESULT_STREAM, subjects.DEAD_STREAM)


class StreamSize(NamedTuple):
    """What a stream holds; `first_s` is when its oldest message was stored, in unix seconds, 0 where there is none."""

    messages: int
    size_bytes: int
    first_s: float


class Backlog:
    """See the module. Sets `waiting` and `in_flight` of `counters`; `sizes` and `dead_letters` are here."""

    def __init__(self, bus: Bus, counters: DurableCounters) -> None:
        self._bus = bus
        self._counters = counters
        self._fresh_until_s = 0.0
        self.sizes: dict[str, StreamSize] = {}
        self.dead_letters: dict[str, int] = {}

    async def refresh(self) -> None:
        """Asks the broker, unless it was asked just now; while it is away, what it said last stands."""
        now_s = time.monotonic()
        if now_s < self._fresh_until_s or not self._bus.is_connected:
            return
        self._fresh_until_s = now_s + MAX_AGE_S  # ahead of asking: two scrapes ask once
        try:
            for name in _STREAMS:
                await self._look_at_stream(name)
            await self._look_at_consumers()
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("the durable streams did not tell what they hold: %s: %s", type(error).__name__, error)

    async def _look_at_stream(self, name: str) -> None:
        question = {"subjects_filter": subjects.DEAD_SUBJECTS} if name == subjects.DEAD_STREAM else None
        state = (await self._bus.ask(f"$JS.API.STREAM.INFO.{name}", question)).get("state")
        if not isinstance(state, dict):
            return
        messages = int(state.get("messages", 0))
        first_s = datetime.fromisoformat(state["first_ts"]).timestamp() if messages else 0.0
        self.sizes[name] = StreamSize(messages, int(state.get("bytes", 0)), first_s)
        if name == subjects.DEAD_STREAM:
            dead: defaultdict[str, int] = defaultdict(int)
            for subject, count in (state.get("subjects") or {}).items():
                dead[self._counters.name_of(untoken(subject.partition(".")[2]))] += count
            self.dead_letters = dict(dead)

    async def _look_at_consumers(self) -> None:
        offset, total = 0, 1
        seen: set[tuple[str, Lane]] = set()
        while offset < min(total, MAX_CONSUMERS):
            page = await self._bus.ask(f"$JS.API.CONSUMER.LIST.{subjects.QUEUE_STREAM}", {"offset": offset})
            consumers = page.get("consumers") or []
            total = int(page.get("total", 0))
            offset += len(consumers)
            for info in consumers:
                target = _target(info.get("config") or {})
                if target is not None:
                    seen.add(target)
                    self._counters.set_waiting(*target, int(info.get("num_pending", 0)))
                    self._counters.set_in_flight(*target, int(info.get("num_ack_pending", 0)))
            if not consumers:
                break
        self._counters.keep_only(seen)


def _target(config: Mapping[str, Any]) -> tuple[str, Lane] | None:
    """(model, lane) whose messages go to this consumer; None for one that is not ours."""
    filters = config.get("filter_subjects") or [config.get("filter_subject") or ""]
    for subject in filters:
        tokens = str(subject).split(".")
        if len(tokens) > 1 and tokens[0] in _LANES and tokens[1] not in ("*", ">"):
            return untoken(tokens[1]), _LANES[tokens[0]]
    return None
