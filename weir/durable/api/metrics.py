"""Figures of durable requests for metrics.

`DurableCounters`: what this process counts, by model. Producers may name any model, so names that are not served share one
row, and so do models beyond `MAX_MODELS`: the number of time series is bounded, whatever is published.

`Backlog`: what the durable streams hold, as the broker reports it; the same at every gateway. It is read for a scrape, at
most every two seconds. Source: JetStream's stream info (with subjects) and consumer list.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.subjects import untoken
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.schemas.core.requests import Lane
from weir.schemas.wire.terminal import Outcome

logger = logging.getLogger("weir.gateway")

MAX_MODELS = 1000
"""Models with their own counters; further ones are counted together."""

OTHER_MODELS = "_other"
"""The name of their row."""

_LANE_NAMES = {lane: lane.name.lower() for lane in Lane}


class DurableCounters:
    """Counters that only grow, and the gauges `waiting` and `in_flight`, which `Backlog` sets.

    `is_known` returns whether a model exists; without it every name counts as a model.
    """

    def __init__(self, is_known: Callable[[str], bool] | None = None) -> None:
        self._is_known = is_known
        self._models: set[str] = set()
        self.accepted: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By model and lane: requests taken from the stream for the first time."""
        self.ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By model and outcome: terminal records that this process has stored."""
        self.retries: defaultdict[str, int] = defaultdict(int)
        """Requests that were retried after a failed attempt."""
        self.redelivered: defaultdict[str, int] = defaultdict(int)
        """Messages that the broker delivered again."""
        self.conflicts: defaultdict[str, int] = defaultdict(int)
        """Requests whose id had a terminal record already, of the same request or of another."""
        self.malformed = 0
        """Messages that are not valid requests."""
        self.waiting: dict[tuple[str, str], int] = {}
        """By model and lane: requests in the stream that were not delivered yet."""
        self.in_flight: dict[tuple[str, str], int] = {}
        """By model and lane: delivered requests without a terminal record."""
        self.oldest_ms: dict[tuple[str, str], int] = {}
        """By model and lane, of models this gateway owns: when the oldest of them was accepted, in unix milliseconds.
        """

    def accept(self, model: str, lane: Lane, requests: int = 1) -> None:
        """Counts requests that were delivered for the first time."""
        self.accepted[self.name_of(model), lane_name(lane)] += requests

    def end(self, model: str, outcome: Outcome) -> None:
        """Counts a stored terminal record."""
        self.ended[self.name_of(model), outcome.value] += 1

    def retry(self, model: str) -> None:
        """Counts a retry."""
        self.retries[self.name_of(model)] += 1

    def redeliver(self, model: str) -> None:
        """Counts a message that was delivered again."""
        self.redelivered[self.name_of(model)] += 1

    def conflict(self, model: str) -> None:
        """Counts a request whose id had a terminal record."""
        self.conflicts[self.name_of(model)] += 1

    def set_waiting(self, model: str, lane: Lane, count: int) -> None:
        """Sets the number of requests that were not delivered."""
        self._set(self.waiting, model, lane, count)

    def set_in_flight(self, model: str, lane: Lane, count: int) -> None:
        """Sets the number of delivered requests without a record."""
        self._set(self.in_flight, model, lane, count)

    def set_oldest(self, model: str, lane: Lane, accepted_ms: int) -> None:
        """Sets when the oldest request of an owned queue was accepted; 0 for none."""
        self._set(self.oldest_ms, model, lane, accepted_ms)

    def forget(self, model: str) -> None:
        """Removes the gauges of a model that another process owns now."""
        for gauge in (self.waiting, self.in_flight, self.oldest_ms):
            for key in [key for key in gauge if key[0] == model]:
                del gauge[key]

    def keep_only(self, queues: Collection[tuple[str, Lane]]) -> None:
        """Removes the gauges of all other queues."""
        kept = {(model, lane_name(lane)) for model, lane in queues}
        for gauge in (self.waiting, self.in_flight):
            for key in gauge.keys() - kept:
                del gauge[key]

    def name_of(self, model: str) -> str:
        """The name of the row in which `model` is counted."""
        if model in self._models:
            return model
        if len(self._models) >= MAX_MODELS or (self._is_known is not None and not self._is_known(model)):
            return OTHER_MODELS
        self._models.add(model)
        return model

    def _set(self, gauge: dict[tuple[str, str], int], model: str, lane: Lane, value: int) -> None:
        name = self.name_of(model)
        if name != OTHER_MODELS:  # a gauge of several models would have the value of the last one
            gauge[name, lane_name(lane)] = value


def lane_name(lane: Lane) -> str:
    """The label of a lane: "live", "event" or "batch"."""
    return _LANE_NAMES[lane]


MAX_AGE_S = 2.0
"""How long figures of the broker are cached."""

MAX_CONSUMERS = 4096
"""Consumers with gauges; further ones have none."""

_LANES = {"event": Lane.EVENT, "batch": Lane.BATCH}
_STREAMS = (subjects.QUEUE_STREAM, subjects.RESULT_STREAM, subjects.DEAD_STREAM)


class StreamSize(NamedTuple):
    """What a stream holds; `first_s` is when its oldest message was stored, in unix seconds, 0 for none."""

    messages: int
    size_bytes: int
    first_s: float


class Backlog:
    """Reads `sizes` and `dead_letters`, and sets `waiting` and `in_flight` of `counters`."""

    def __init__(self, bus: Bus, counters: DurableCounters) -> None:
        self._bus = bus
        self._counters = counters
        self._fresh_until_s = 0.0
        self.sizes: dict[str, StreamSize] = {}
        self.dead_letters: dict[str, int] = {}

    async def refresh(self) -> None:
        """Reads the figures, unless they are recent. While the broker is unavailable the last ones stay."""
        now_s = time.monotonic()
        if now_s < self._fresh_until_s or not self._bus.is_connected:
            return
        self._fresh_until_s = now_s + MAX_AGE_S  # before the requests: two scrapes at a time cause one
        try:
            for name in _STREAMS:
                await self._look_at_stream(name)
            await self._look_at_consumers()
        except BROKER_ERRORS as error:
            logger.debug("the sizes of the durable streams can't be read: %s: %s", type(error).__name__, error)

    async def _look_at_stream(self, name: str) -> None:
        info = await self._bus.jetstream.find_stream(
            name, subjects.DEAD_SUBJECTS if name == subjects.DEAD_STREAM else ""
        )
        if info is None:
            return
        state = info["state"]
        messages = int(state.get("messages", 0))
        first_s = datetime.fromisoformat(state["first_ts"]).timestamp() if messages else 0.0
        self.sizes[name] = StreamSize(messages, int(state.get("bytes", 0)), first_s)
        if name == subjects.DEAD_STREAM:
            dead: defaultdict[str, int] = defaultdict(int)
            for subject, count in (state.get("subjects") or {}).items():
                dead[self._counters.name_of(untoken(subject.partition(".")[2]))] += count
            self.dead_letters = dict(dead)

    async def _look_at_consumers(self) -> None:
        seen: set[tuple[str, Lane]] = set()
        listing = f"CONSUMER.LIST.{subjects.QUEUE_STREAM}"
        for info in await self._bus.jetstream.list_all(listing, "consumers", MAX_CONSUMERS):
            target = _queue_of_consumer(info.get("config") or {})
            if target is not None:
                seen.add(target)
                self._counters.set_waiting(*target, int(info.get("num_pending", 0)))
                self._counters.set_in_flight(*target, int(info.get("num_ack_pending", 0)))
        self._counters.keep_only(seen)


def _queue_of_consumer(config: Mapping[str, Any]) -> tuple[str, Lane] | None:
    """The (model, lane) of a consumer; None for one that Weir did not create."""
    filters = config.get("filter_subjects") or [config.get("filter_subject") or ""]
    for subject in filters:
        tokens = str(subject).split(".")
        if len(tokens) > 1 and tokens[0] in _LANES and tokens[1] not in ("*", ">"):
            return untoken(tokens[1]), _LANES[tokens[0]]
    return None
