"""The configuration of Weir's streams, buckets and consumers, and functions that create them.

Live requests are in work queues in memory: a message is removed when it is acknowledged, each subject belongs to one
consumer, and a full stream rejects publishes (discard policy "new"). Durable requests are in files: QUEUE, RESULT,
DEAD, and the object stores of bodies that are larger than a message. A message that nats-server has acknowledged there
is on disk if it syncs first (`sync_interval: always`), as the embedded one does.
Source: NATS JetStream: retention, discard policies, `discard_new_per_subject`, per-message TTL (ADR-43).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import BadRequestError, NotFoundError, ServerError

from weir.bus.naming import durable_subjects, subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus
from weir.bus.streams.consumers import recreate_consumer
from weir.schemas.core.errors import Reason, WeirError, unavailable

logger = logging.getLogger("weir.bus")


LIVE_MAX_BYTES = 512 << 20
_MIN_LIVE_BYTES = 64 << 20
STATES_MAX_BYTES = 512 << 20
STATES_TTL_S = 3600.0
"""How long the checkpoint of a sequence is kept that never ended."""

MAX_QUEUES_OF_STREAM = 65_536
"""Queues in one stream. nats-server 2.15 allows 1 000 consumers of a stream without a limit of its own."""

MAX_UNACKED_FRAMES = 8192
_ACK_WAIT_S = 600.0


class Bucket(NamedTuple):
    """A key-value bucket. nats-server publishes the entries that it has stored if it `is_followed` (`weir.bus.kv.view`)."""

    name: str
    storage: StorageType = StorageType.MEMORY
    ttl_s: float | None = None
    max_bytes: int | None = None
    is_followed: bool = True


REGISTRY_BUCKET = Bucket(subjects.REGISTRY_BUCKET, is_followed=False)  # its views receive writes as they are sent
MODELS_BUCKET, SETTINGS_BUCKET = Bucket(subjects.MODELS_BUCKET), Bucket(subjects.SETTINGS_BUCKET)
ACCESS_KEYS_BUCKET = Bucket(subjects.ACCESS_KEYS_BUCKET, StorageType.FILE)
_STATES_BUCKET = Bucket(subjects.STATES_BUCKET, StorageType.MEMORY, STATES_TTL_S, STATES_MAX_BYTES, is_followed=False)
_JOBS_BUCKET = Bucket(durable_subjects.JOBS_BUCKET, StorageType.FILE)


class AcquiredQueue(NamedTuple):
    """The consumer of an acquired queue, and the server of a cluster that leads it, "" without a cluster."""

    consumer: str
    leader: str


async def ensure_streams(bus: Bus) -> None:
    """Creates the streams of live requests and the buckets of all roles unless they exist. Safe to call concurrently.

    Adopts the recorded layout of the streams (`weir.bus.naming.live_queues`).
    """
    await ensure_live_streams(bus)
    for bucket in (REGISTRY_BUCKET, MODELS_BUCKET, SETTINGS_BUCKET):
        await ensure_bucket(bus, bucket)


async def ensure_live_streams(bus: Bus) -> None:
    """Creates the streams of live requests only: a bucket of a cluster that lost a server may have no leader for long."""
    layout = bus.live_layout
    await ensure_stream(bus, _live_stream(0, layout.to_create, bus.replicas, layout.to_record()))
    # Another process may have created it, with another layout.
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
        max_bytes=max(LIVE_MAX_BYTES // streams, _MIN_LIVE_BYTES),
        max_consumers=MAX_QUEUES_OF_STREAM,
        num_replicas=replicas,
        metadata=metadata,
    )


async def ensure_regions_bucket(bus: Bus) -> None:
    """Creates the bucket of clients' shared-memory regions unless it exists. Safe to call concurrently."""
    await ensure_bucket(bus, Bucket(subjects.REGIONS_BUCKET))


async def ensure_response_cache(bus: Bus, size_bytes: int, ttl_s: float) -> None:
    """Creates the bucket of the shared response cache unless it exists. Safe to call concurrently.

    Unlike other buckets it drops its oldest values when it is full. Raises WeirError (UNAVAILABLE) if the broker has no
    room for it.
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
        raise _broker_full("a response cache", error) from error
    found = (await bus.jetstream.stream_info(subjects.CACHE_STREAM)).config
    if (found.max_bytes, found.max_age or 0) != (size_bytes, ttl_s):
        logger.warning(
            "the shared response cache exists already, with %s bytes and a ttl of %s s: these values of its creator apply",
            found.max_bytes,
            found.max_age or 0,
        )


async def ensure_states_bucket(bus: Bus) -> None:
    """Creates the bucket of sequence states unless it exists. Safe to call concurrently.

    Raises WeirError (UNAVAILABLE) if the broker has no room for it.
    """
    try:
        await ensure_bucket(bus, _STATES_BUCKET)
    except ServerError as error:
        raise _broker_full("the states of sequences", error) from error


def _broker_full(what: str, error: ServerError) -> WeirError:
    return unavailable(f"the message broker has no room for {what}: {error.description}", Reason.BROKER_FULL)


async def ensure_bucket(bus: Bus, bucket: Bucket) -> None:
    """Creates a bucket unless it exists. Safe to call concurrently."""
    name, republish = bucket.name, None
    if bucket.is_followed:
        republish = RePublish(src=f"$KV.{name}.>", dest=subjects.stored_entry(name, ">"))
    if await bus.jetstream.find_stream(f"KV_{name}") is None:
        await bus.jetstream.create_key_value(
            KeyValueConfig(
                bucket=name,
                history=1,
                storage=bucket.storage,
                ttl=bucket.ttl_s,
                max_bytes=bucket.max_bytes,
                replicas=bus.replicas,
                republish=republish,
            )
        )


async def ensure_stream(bus: Bus, config: StreamConfig) -> bool:
    """Creates a stream unless it exists; returns whether it did not. Safe to call concurrently."""
    assert config.name is not None  # noqa: S101 - a constant of the caller
    try:
        await bus.jetstream.stream_info(config.name)
    except NotFoundError:
        try:
            await bus.jetstream.add_stream(config)
        except BadRequestError:
            # Another role has created it meanwhile; for any other reason this raises.
            await bus.jetstream.stream_info(config.name)
        return True
    return False


async def acquire_live_consumer(bus: Bus, queue: LiveQueue, epoch: int = 0) -> AcquiredQueue:
    """Takes over a queue: frames that are not acknowledged are redelivered to the caller.

    Otherwise frames that a former owner pulled would wait for `ack_wait`; a recreated consumer has delivered nothing. It
    rejects requests without `epoch` (`live_pull_group`), so that a former owner that was paused takes no frames. Raises
    NatsError, OSError or TimeoutError.
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
    return AcquiredQueue(name, await recreate_consumer(bus, bus.live_layout.stream(queue), config))


def live_pull_group(epoch: int) -> str:
    """The priority group (ADR-42) of the owner since `epoch`, "" for none."""
    return str(epoch) if epoch else ""


DUPLICATE_WINDOW_S = 120.0
"""How long QUEUE remembers a `Nats-Msg-Id`."""

DEAD_TTL_S = 7 * 86400.0
QUEUE_MAX_BYTES = RESULT_MAX_BYTES = 8 << 30
"""The default sizes of QUEUE and RESULT."""

DEAD_MAX_BYTES = 1 << 30
"""The default size of DEAD; the oldest letters are dropped beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The limits of QUEUE (messages of a subject, bytes of all, age), of RESULT (age, bytes) and of DEAD (bytes).

    `queue_max_age_s` is how long a request may wait. JetStream reserves these bytes when it creates the streams.
    """

    max_messages: int
    max_bytes: int
    result_ttl_s: float
    result_max_bytes: int
    queue_max_age_s: float = 7 * 86400.0
    dead_max_bytes: int = DEAD_MAX_BYTES


def sizes_of_streams(store_bytes: int) -> tuple[int, int, int]:
    """The sizes of QUEUE, RESULT and DEAD for a JetStream that may store `store_bytes`: the defaults if they fit.

    A seventh and more is left for the bodies of large requests, the states of jobs, and models that are pushed.
    """
    most_bytes = store_bytes * 2 // 5
    return min(QUEUE_MAX_BYTES, most_bytes), min(RESULT_MAX_BYTES, most_bytes), min(DEAD_MAX_BYTES, store_bytes // 20)


def durable_streams(limits: QueueLimits, replicas: int = 1) -> tuple[StreamConfig, ...]:
    """The configuration of the three streams, in the order of their creation."""
    queue = StreamConfig(
        name=durable_subjects.QUEUE_STREAM,
        subjects=list(durable_subjects.QUEUE_SUBJECTS),
        storage=StorageType.FILE,
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        max_msgs_per_subject=limits.max_messages,
        max_bytes=limits.max_bytes,
        max_consumers=MAX_QUEUES_OF_STREAM,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
        allow_atomic=True,
        num_replicas=replicas,
    )
    result = StreamConfig(
        name=durable_subjects.RESULT_STREAM,
        subjects=[durable_subjects.RESULT_SUBJECTS],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=limits.result_ttl_s,
        max_bytes=limits.result_max_bytes,
        max_msgs_per_subject=1,
        allow_direct=True,
        allow_msg_ttl=True,
        allow_atomic=True,
        num_replicas=replicas,
    )
    dead = StreamConfig(
        name=durable_subjects.DEAD_STREAM,
        subjects=[durable_subjects.DEAD_SUBJECTS],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=DEAD_TTL_S,
        max_bytes=limits.dead_max_bytes,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
        num_replicas=replicas,
    )
    return queue, result, dead


async def ensure_durable_streams(bus: Bus, limits: QueueLimits) -> list[str]:
    """Creates the streams and object stores unless they exist; returns the streams that did not. Safe to call
    concurrently.
    """
    made: list[str] = []
    for config in durable_streams(limits, bus.replicas):
        if await ensure_stream(bus, config):
            made.append(str(config.name))
    await _ensure_stores(bus, limits)
    return made


AUDIT_MAX_BYTES = 64 << 20
"""The default size of AUDIT; the oldest events are dropped beyond it."""

AUDIT_MAX_AGE_S = 30 * 86400.0
"""How long an audit event is kept."""


async def ensure_audit_stream(bus: Bus, max_bytes: int) -> None:
    """Creates the stream of audit events unless it exists, else sets its size. Safe to call concurrently.

    Raises NatsError, OSError or TimeoutError; ServerError where the broker has no room for it.
    """
    config = StreamConfig(
        name=subjects.AUDIT_STREAM,
        subjects=[subjects.AUDIT_SUBJECTS],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=max_bytes,
        max_age=AUDIT_MAX_AGE_S,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
        deny_delete=True,
        num_replicas=bus.replicas,
    )
    if not await ensure_stream(bus, config):
        found = (await bus.jetstream.stream_info(subjects.AUDIT_STREAM)).config
        if found.max_bytes != max_bytes:
            await bus.jetstream.update_stream(found.evolve(max_bytes=max_bytes))


async def _ensure_stores(bus: Bus, limits: QueueLimits) -> None:
    jetstream = bus.jetstream
    await ensure_bucket(bus, _JOBS_BUCKET)
    # The body of a request is needed while the request may wait, and then while it may be a dead letter.
    request_ttl_s = limits.queue_max_age_s + DEAD_TTL_S
    for store, ttl_s in (
        (durable_subjects.REQUEST_OBJECTS, request_ttl_s),
        (durable_subjects.RESULT_OBJECTS, limits.result_ttl_s),
    ):
        try:
            await jetstream.stream_info(f"OBJ_{store}")
        except NotFoundError:
            await jetstream.create_object_store(
                store, config=ObjectStoreConfig(storage=StorageType.FILE, ttl=ttl_s, replicas=bus.replicas)
            )
