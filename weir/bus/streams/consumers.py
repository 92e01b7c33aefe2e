"""`QueueConsumers`: the durable consumers of stream QUEUE. `recreate_consumer`: a takeover of any durable consumer.

QUEUE has one consumer for each lane of a model that had messages there. A new owner recreates the consumer: it deletes
it and creates one of the same name that has delivered nothing. That fences off the former owner, whose pull requests
end, and redelivers all messages that are not acknowledged, at once and in order. Messages that were delivered before
may have been started: a consumer keeps the last such sequence, its own and, in its metadata, that of its predecessors.

The name stays the same, so a former owner that was paused could request messages from the new consumer, which would be
missing here and be purged with those around them. So each consumer has a priority group of its own, and rejects
requests without it.

In a cluster the leader of JetStream's API chooses the server that leads a new consumer at random, and may choose one
that was just killed or hangs, because it detects that late. Such a consumer does not respond until the other servers
have elected another leader, for 4 to 9 s. A consumer that is created again gets another leader, so the first tries have
short timeouts.
Source: JetStream consumers (explicit acknowledgement, `filter_subjects`, metadata), priority groups (ADR-42);
nats-server's jetstream_cluster.go (`setPreferred`), raft.go (election timeouts); measured with 2.15.1.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from nats.errors import Error as NatsError
from nats.js.api import ConsumerInfo
from nats.js.errors import BadRequestError, NotFoundError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.jetstream import RETRY_FOR_S, is_transient

logger = logging.getLogger("weir.bus")

MAX_UNACKED = 65_536
"""Messages of one lane of a model that are delivered and not acknowledged; the rest is not delivered."""

_ACK_WAIT_S = 3600.0  # a takeover does not wait for it, and a gateway recognises a message that it gets twice
_TRIES = 3
_NO_OWNER = "nobody"
_STARTED, _OWNER, _UNKNOWN, _MODEL, _LANE = "weir-begun", "weir-owner", "weir-unknown", "weir-model", "weir-lane"


class AcquiredConsumer(NamedTuple):
    """A consumer that was taken over: the last sequence that may have been started, and the former owner ("" for none).

    Requests for messages must name `group`.
    """

    name: str
    started_sequence: int
    previous_owner: str
    group: str


class ConsumerRecord(NamedTuple):
    """An existing consumer. `is_unknown`: it was created to reject requests for a model that does not exist."""

    lane: str
    model: str
    is_unknown: bool
    pending: int


class QueueConsumers:
    """Takes over, creates and removes the consumers of stream QUEUE."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def acquire(self, lane: str, model: str, owner: str, is_unknown: bool = False) -> AcquiredConsumer:
        """Recreates the consumer for `owner`, which is a new value each time.

        Raises NatsError, OSError or TimeoutError while the broker is away.
        """
        name = subjects.durable_consumer(lane, model)
        group = _group(owner)
        started, previous = 0, ""
        for tries_left in reversed(range(_TRIES)):
            info = await self._info(name)
            if info is not None:
                metadata = info.config.metadata or {}
                delivered = info.delivered.stream_seq if info.delivered is not None else 0
                started = max(started, delivered or 0, _number(metadata.get(_STARTED, "")))
                previous = previous or metadata.get(_OWNER, "")
            metadata = {_STARTED: str(started), _OWNER: owner, **({_UNKNOWN: "1"} if is_unknown else {})}
            try:
                await recreate_consumer(self._bus, subjects.QUEUE_STREAM, _config(lane, model, metadata, group))
                break
            except BadRequestError:  # another process created it in between
                if not tries_left:
                    raise
        return AcquiredConsumer(name, started, previous, group)

    async def redeliver(self, lane: str, model: str, owner: str) -> bool:
        """Has the consumer that `owner` acquired deliver again everything that is not acknowledged, without recreating it.

        In a cluster that takes no election. Returns False where the consumer must be acquired instead: another owner has
        acquired it, it is gone, or nats-server is too old. Raises as `acquire`.
        """
        name, group = subjects.durable_consumer(lane, model), _group(owner)

        async def note_started(info: Mapping[str, Any]) -> None:
            # From then on the consumer has delivered nothing, so its metadata must say what may have been started.
            metadata = dict(info["config"].get("metadata") or {})
            delivered = int(info.get("delivered", {}).get("stream_seq", 0))
            if delivered > _number(metadata.get(_STARTED, "")):
                metadata = {key: value for key, value in metadata.items() if key.startswith("weir-")}
                config = _config(lane, model, {**metadata, _STARTED: str(delivered)}, group)
                question = {"stream_name": subjects.QUEUE_STREAM, "action": "update", "config": config}
                await self._bus.jetstream.ask(f"CONSUMER.CREATE.{subjects.QUEUE_STREAM}.{name}", question)

        return bool(await redeliver(self._bus, subjects.QUEUE_STREAM, name, group, note_started))

    async def ensure(self, lane: str, model: str) -> None:
        """Creates the consumer unless it exists."""
        if await self._info(subjects.durable_consumer(lane, model)) is None:
            try:
                await create_consumer(self._bus, subjects.QUEUE_STREAM, _config(lane, model, {}, _NO_OWNER))
            except BadRequestError:  # its owner has just created it
                await self._bus.jetstream.consumer_info(subjects.QUEUE_STREAM, subjects.durable_consumer(lane, model))

    async def drop(self, lane: str, model: str) -> None:
        """Removes the consumer, if it exists."""
        await delete_consumer(self._bus, subjects.QUEUE_STREAM, subjects.durable_consumer(lane, model))

    async def look_up(self, name: str) -> ConsumerRecord | None:
        """The consumer of this name; None if it does not exist or is not one of Weir."""
        info = await self._info(name)
        if info is None:
            return None
        metadata = info.config.metadata or {}
        lane, model = metadata.get(_LANE, ""), metadata.get(_MODEL, "")
        if lane not in ("event", "batch") or not model:
            return None
        return ConsumerRecord(lane, model, _UNKNOWN in metadata, info.num_pending or 0)

    async def _info(self, name: str) -> ConsumerInfo | None:
        try:
            info: ConsumerInfo = await self._bus.jetstream.consumer_info(subjects.QUEUE_STREAM, name)
            return info
        except NotFoundError:
            return None


def _group(owner: str) -> str:
    """The priority group of an owner's consumer."""
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()


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


CONSUMER_TRY_S = 0.6
"""Timeout of the first try to create a consumer in a cluster, which takes some hundredths of a second."""

_LATER_TRIES_S = (0.8, 1.0)
ELECTION_S = 10.0
"""Timeout of the last try, and of requests to an existing consumer: an election takes less."""

_MAX_ATTEMPTS = 2
_WAIT_S = 0.05


async def recreate_consumer(bus: Bus, stream: str, config: Mapping[str, Any]) -> str:
    """Replaces the durable consumer of this name by one with `config`, as JetStream's API takes it.

    Returns the server of a cluster that leads it, "" without a cluster. Raises APIError for a request that JetStream
    rejects (BadRequestError if another process has created the consumer in between), NatsError, OSError or TimeoutError
    while the broker is away.
    """
    if not bus.is_clustered:
        await delete_consumer(bus, stream, config["name"])
        return await create_consumer(bus, stream, config)
    until_s = time.monotonic() + RETRY_FOR_S
    try_s, later_s, is_deleted = CONSUMER_TRY_S, iter(_LATER_TRIES_S), False
    while True:
        try:
            if not is_deleted:  # else the old consumer would be taken for the new one
                await delete_consumer(bus, stream, config["name"], min(try_s, CONSUMER_TRY_S))
                is_deleted = True
            return await create_consumer(bus, stream, config, try_s)
        except (NatsError, TimeoutError) as error:
            if not is_transient(error) or time.monotonic() >= until_s:
                raise
            logger.debug(
                "stream %s: consumer %s is not created yet, trying again: %s",
                stream,
                config["name"],
                type(error).__name__,
            )
        if is_deleted:
            # The deletion of a consumer without a leader gets no response; the next one reports that it does not exist.
            is_deleted, try_s = False, next(later_s, ELECTION_S)
        await asyncio.sleep(_WAIT_S)


async def redeliver(
    bus: Bus,
    stream: str,
    name: str,
    group: str,
    prepare: Callable[[Mapping[str, Any]], Awaitable[None]] | None = None,
) -> str:
    """Has a consumer of a cluster redeliver all messages that are not acknowledged, as a recreated one would.

    The leader of the consumer does that, so no election is waited for. Returns the leader; "" if there is no such consumer
    with this priority group, it has no leader for `ELECTION_S`, or nats-server is too old or denies it: then it must be
    recreated. `prepare` is awaited with JetStream's information about the consumer before that; its errors count as those
    of the request itself.
    Source: JetStream's API CONSUMER.RESET, from nats-server 2.14 on.
    """
    until_s = time.monotonic() + ELECTION_S
    attempts = 0
    while time.monotonic() < until_s and attempts < _MAX_ATTEMPTS:
        try:
            info = await bus.jetstream.ask(f"CONSUMER.INFO.{stream}.{name}", once_s=CONSUMER_TRY_S)
            if info.get("config", {}).get("priority_groups") != [group]:
                return ""
            if prepare is not None:
                await prepare(info)
            leader, attempts = _leader(info), attempts + 1
            await bus.jetstream.ask(f"CONSUMER.RESET.{stream}.{name}", {}, CONSUMER_TRY_S)
            return leader
        except (NatsError, TimeoutError) as error:
            if not is_transient(error):
                return ""
        await asyncio.sleep(_WAIT_S)
    return ""


async def delete_consumer(bus: Bus, stream: str, name: str, once_s: float | None = None) -> None:
    """Deletes a consumer, if it exists. Raises as `recreate_consumer`; `once_s` as for `JetStream.ask`."""
    try:
        await bus.jetstream.ask(f"CONSUMER.DELETE.{stream}.{name}", once_s=once_s)
    except NotFoundError:
        pass


async def create_consumer(bus: Bus, stream: str, config: Mapping[str, Any], once_s: float | None = None) -> str:
    """Creates a consumer unless one has that name. Returns and raises as `recreate_consumer`; `once_s` as for
    `JetStream.ask`. (nats-py's ConsumerConfig has no priority groups.)
    """
    question = {"stream_name": stream, "action": "create", "config": config}
    return _leader(await bus.jetstream.ask(f"CONSUMER.CREATE.{stream}.{config['name']}", question, once_s))


async def leader_of_consumer(bus: Bus, stream: str, name: str) -> str:
    """The server of a cluster that leads a consumer, "" if it does not respond. Sends one request."""
    try:
        return _leader(await bus.jetstream.ask(f"CONSUMER.INFO.{stream}.{name}", once_s=CONSUMER_TRY_S))
    except BROKER_ERRORS:
        return ""


def _leader(answer: Mapping[str, Any]) -> str:
    cluster = answer.get("cluster")
    return str(cluster.get("leader", "")) if isinstance(cluster, dict) else ""
