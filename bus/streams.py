"""The streams and consumers of Weir: what each is declared as, made when missing.

Source: NATS JetStream's work-queue retention (a message is removed when it is acknowledged; each subject belongs to one
consumer) and discard policy "new" (a full stream refuses publishes with an error instead of dropping).
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import BadRequestError, NotFoundError, ServerError

from bus import subjects
from bus.connection import Bus
from bus.consumer_renewal import make_anew
from bus.live_queues import LiveQueue
from schemas.errors import Reason, WeirError, unavailable

logger = logging.getLogger("weir.bus")

LIVE_MAX_BYTES = 512 << 20
_LEAST_LIVE_BYTES = 64 << 20
STATES_MAX_BYTES = 512 << 20
STATES_TTL_S = 3600.0
"""How long a checkpoint is kept of a sequence whose end nobody has told."""

MAX_QUEUES_OF_STREAM = 65_536
"""Queues that lie in one stream. nats-server 2.15 takes 1 000 consumers where a stream doesn't say how many it may have."""

MAX_UNACKED_FRAMES = 8192
_ACK_WAIT_S = 600.0


class TakenQueue(NamedTuple):
    """The consumer of a queue that was taken, and the server of a cluster that leads it; "" where there is no cluster."""

    consumer: str
    leader: str


async def ensure_streams(bus: Bus) -> None:
    """Makes the streams of live requests and the buckets that all roles know unless they exist.

    Takes the layout of the streams that is recorded (`bus.live_layout`). Safe to call from several at once.
    """
    await ensure_live_streams(bus)
    for bucket in (subjects.REGISTRY_BUCKET, subjects.MODELS_BUCKET, subjects.SETTINGS_BUCKET):
        await ensure_bucket(bus, bucket)


async def ensure_live_streams(bus: Bus) -> None:
    """The streams of live requests alone: of a cluster without one of its servers a bucket may have no leader for long."""
    layout = bus.live_layout
    await ensure_stream(bus, _live_stream(0, layout.to_make, bus.replicas, layout.to_record()))
    # Another may have made it, with another layout.
    layout.learn((await bus.jetstream.stream_info(subjects.LIVE_STREAM)).config.metadata)
    for number in range(1, layout.streams):
        await ensure_stream(bus, _live_stream(number, layout.streams, bus.replicas))


def _live_stream(number: int, streams: int, replicas: int, metadata: dict[str, str] | None = None) -> StreamConfig:
    return StreamConfig(
        name=subjects.live_stream(number),
        subjects=[subjects.live_subjects(number)],
        storage=StorageType.MEMORY,
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        max_bytes=max(LIVE_MAX_BYTES // streams, _LEAST_LIVE_BYTES),
        max_consumers=MAX_QUEUES_OF_STREAM,
        num_replicas=replicas,
        metadata=metadata,
    )


async def ensure_regions_bucket(bus: Bus) -> None:
    """Makes the bucket of clients' shared-memory regions unless it exists. Safe to call from several gateways at once."""
    await ensure_bucket(bus, subjects.REGIONS_BUCKET)


async def ensure_response_cache(bus: Bus, size_bytes: int, ttl_s: float) -> None:
    """Makes the bucket of the shared response cache unless it exists. Safe to call from several roles at once.

    It is a bucket to other clients of NATS too, but for what becomes of a full one: the oldest answers go. Raises
    WeirError (UNAVAILABLE) when the broker has no room for it.
    """
    config = StreamConfig(
        name=subjects.CACHE_STREAM,
        subjects=[subjects.cached(">")],
        storage=StorageType.MEMORY,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=size_bytes,
        max_age=ttl_s,
        max_msgs_per_subject=1,
        allow_rollup_hdrs=True,
        allow_direct=True,
        deny_delete=True,
        num_replicas=bus.replicas,
    )
    try:
        await ensure_stream(bus, config)
    except ServerError as error:
        raise _no_room("a response cache", error) from error
    found = (await bus.jetstream.stream_info(subjects.CACHE_STREAM)).config
    if (found.max_bytes, found.max_age or 0) != (size_bytes, ttl_s):
        logger.warning(
            "the shared response cache is there already, with %s bytes and a ttl of %s s: that of whoever "
            "made it holds",
            found.max_bytes,
            found.max_age or 0,
        )


async def ensure_states_bucket(bus: Bus) -> None:
    """Makes the bucket of the states of sequences unless it exists. Safe to call from several workers at once.

    Raises WeirError (UNAVAILABLE) when the broker has no room for it.
    """
    try:
        await ensure_bucket(bus, subjects.STATES_BUCKET, STATES_TTL_S, STATES_MAX_BYTES)
    except ServerError as error:
        raise _no_room("the states of sequences", error) from error


def _no_room(what: str, error: ServerError) -> WeirError:
    return unavailable(f"the message broker has no room for {what}: {error.description}", Reason.BROKER_FULL)


async def ensure_bucket(bus: Bus, bucket: str, ttl_s: float | None = None, max_bytes: int | None = None) -> None:
    """Makes a bucket in memory unless it exists. Safe to call from several at once."""
    try:
        await bus.jetstream.stream_info(f"KV_{bucket}")
    except NotFoundError:
        await bus.jetstream.create_key_value(
            KeyValueConfig(
                bucket=bucket,
                history=1,
                storage=StorageType.MEMORY,
                ttl=ttl_s,
                max_bytes=max_bytes,
                replicas=bus.replicas,
            )
        )


async def ensure_stream(bus: Bus, config: StreamConfig) -> bool:
    """Makes a stream unless it exists; returns whether it did not. Safe to call from several at once."""
    assert config.name is not None  # noqa: S101 - a constant of the caller
    try:
        await bus.jetstream.stream_info(config.name)
    except NotFoundError:
        try:
            await bus.jetstream.add_stream(config)
        except BadRequestError:
            # Another role made it in between; if that is not the reason, this raises.
            await bus.jetstream.stream_info(config.name)
        return True
    return False


async def take_live_consumer(bus: Bus, queue: LiveQueue, epoch: int = 0) -> TakenQueue:
    """Takes over a queue: every frame not yet acknowledged is delivered again, to the caller.

    A frame that a previous owner had pulled would otherwise wait for `ack_wait`; a consumer made anew knows of no
    delivery. It delivers only to who names `epoch` (`live_pull_group`): what an owner before, who was paused, asks for
    would be missing here. Raises NatsError, OSError or TimeoutError.
    """
    name = queue.consumer
    config: dict[str, Any] = {
        "name": name,
        "durable_name": name,
        "filter_subject": bus.live_layout.subject(queue),
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": int(_ACK_WAIT_S * 1e9),
        "max_ack_pending": MAX_UNACKED_FRAMES,
        "max_waiting": 64,
    }
    if epoch:
        config |= {"priority_policy": "overflow", "priority_groups": [live_pull_group(epoch)]}
    return TakenQueue(name, await make_anew(bus, bus.live_layout.stream(queue), config))


def live_pull_group(epoch: int) -> str:
    """The priority group (ADR-42) that the owner from `epoch` on names when it asks for frames; "" for none."""
    return str(epoch) if epoch else ""
