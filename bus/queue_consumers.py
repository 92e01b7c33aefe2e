"""The durable consumers of stream QUEUE: one for each lane of a model that has had messages there.

Whoever takes a consumer makes it anew. That fences off the owner before, whose pulls end, and has everything that is not
acknowledged delivered again, at once and in order. What was delivered before may have been begun: a consumer remembers up
to where that was, by itself and, for those in whose place it stands, in its metadata.

Its name stays the same, so an owner before who was paused, or whose connection was, could ask the new one for messages:
they would be missing here, and be purged with those around them. So each is made with a priority group of its own, and
refuses whoever does not name it.
Source: JetStream consumers (explicit acknowledgement, `filter_subjects`, metadata), priority groups (ADR-42).
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from nats.js.api import ConsumerInfo
from nats.js.errors import BadRequestError, NotFoundError

from bus import durable_subjects as subjects
from bus.connection import Bus
from bus.consumer_renewal import create_consumer, delete_consumer, make_anew

MAX_UNACKED = 65_536
"""Messages of one lane of a model that are delivered and not acknowledged; the rest is not delivered."""

_ACK_WAIT_S = 3600.0  # a takeover doesn't wait for it, and what is delivered twice to one gateway is recognised
_TRIES = 3
_NOBODY = "nobody"
_BEGUN, _OWNER, _UNKNOWN, _MODEL, _LANE = "weir-begun", "weir-owner", "weir-unknown", "weir-model", "weir-lane"


class TakenConsumer(NamedTuple):
    """A consumer that was taken: the last sequence that may have been begun before, and who had it ("" for nobody).

    `group` is what must be named to get messages from it.
    """

    name: str
    begun_sequence: int
    previous_owner: str
    group: str


class KnownConsumer(NamedTuple):
    """A consumer that there is. `is_unknown`: it was made to put away requests for a model that there isn't."""

    lane: str
    model: str
    is_unknown: bool
    pending: int


class QueueConsumers:
    """See the module."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def take(self, lane: str, model: str, owner: str, is_unknown: bool = False) -> TakenConsumer:
        """Makes the consumer anew. Raises NatsError, OSError or TimeoutError while the broker is away.

        `owner` is another one each time.
        """
        name = subjects.durable_consumer(lane, model)
        group = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()
        begun, previous = 0, ""
        for tries_left in reversed(range(_TRIES)):
            info = await self._info(name)
            if info is not None:
                metadata = info.config.metadata or {}
                delivered = info.delivered.stream_seq if info.delivered is not None else 0
                begun = max(begun, delivered or 0, _number(metadata.get(_BEGUN, "")))
                previous = previous or metadata.get(_OWNER, "")
            told = {_BEGUN: str(begun), _OWNER: owner, **({_UNKNOWN: "1"} if is_unknown else {})}
            try:
                await make_anew(self._bus, subjects.QUEUE_STREAM, _config(lane, model, told, group))
                break
            except BadRequestError:  # another made it in between
                if not tries_left:
                    raise
        return TakenConsumer(name, begun, previous, group)

    async def ensure(self, lane: str, model: str) -> None:
        """Makes the consumer unless there is one."""
        if await self._info(subjects.durable_consumer(lane, model)) is None:
            try:
                await create_consumer(self._bus, subjects.QUEUE_STREAM, _config(lane, model, {}, _NOBODY))
            except BadRequestError:  # its owner has just made it
                await self._bus.jetstream.consumer_info(subjects.QUEUE_STREAM, subjects.durable_consumer(lane, model))

    async def drop(self, lane: str, model: str) -> None:
        """Removes the consumer, if it is there."""
        await delete_consumer(self._bus, subjects.QUEUE_STREAM, subjects.durable_consumer(lane, model))

    async def look_up(self, name: str) -> KnownConsumer | None:
        """What the consumer of this name is for; None where it isn't there or isn't one of ours."""
        info = await self._info(name)
        if info is None:
            return None
        metadata = info.config.metadata or {}
        lane, model = metadata.get(_LANE, ""), metadata.get(_MODEL, "")
        if lane not in ("event", "batch") or not model:
            return None
        return KnownConsumer(lane, model, _UNKNOWN in metadata, info.num_pending or 0)

    async def _info(self, name: str) -> ConsumerInfo | None:
        try:
            info: ConsumerInfo = await self._bus.jetstream.consumer_info(subjects.QUEUE_STREAM, name)
            return info
        except NotFoundError:
            return None


def _config(lane: str, model: str, metadata: dict[str, str], group: str) -> dict[str, Any]:
    name = subjects.durable_consumer(lane, model)
    return {
        "name": name,
        "durable_name": name,
        "filter_subjects": list(subjects.durable_filters(lane, model)),
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": int(_ACK_WAIT_S * 1e9),
        "max_ack_pending": MAX_UNACKED,
        "max_waiting": 64,
        "priority_policy": "overflow",
        "priority_groups": [group],
        "metadata": {_LANE: lane, _MODEL: model, **metadata},
    }


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
