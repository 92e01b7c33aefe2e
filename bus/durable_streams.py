"""The streams of durable requests: QUEUE, RESULT and DEAD, and the stores of what is too large for a message.

All of them are files. What nats-server acknowledges there is on disk when it syncs before it acknowledges
(`sync_interval: always`), as the embedded one does.
Source: NATS JetStream: retention, discard policies, `discard_new_per_subject`, per-message TTL (ADR-43).
"""

from __future__ import annotations

from dataclasses import dataclass

from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from bus import durable_subjects as subjects
from bus.connection import Bus
from bus.streams import MAX_QUEUES_OF_STREAM, ensure_stream

DUPLICATE_WINDOW_S = 120.0
"""How long `Nats-Msg-Id` is remembered in QUEUE."""

DEAD_TTL_S = 7 * 86400.0
DEAD_MAX_BYTES = 1 << 30
"""Dead letters kept; beyond it the oldest go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait in QUEUE: messages of one subject (a model), bytes of all; and what RESULT keeps, how long.

    `queue_max_age_s` is how long a request may wait at all.
    """

    max_messages: int
    max_bytes: int
    result_ttl_s: float
    result_max_bytes: int
    queue_max_age_s: float = 7 * 86400.0


def durable_streams(limits: QueueLimits, replicas: int = 1) -> tuple[StreamConfig, ...]:
    """What the three streams are declared as, in the order in which they are made."""
    queue = StreamConfig(
        name=subjects.QUEUE_STREAM,
        subjects=list(subjects.QUEUE_SUBJECTS),
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
        name=subjects.RESULT_STREAM,
        subjects=[subjects.RESULT_SUBJECTS],
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
        name=subjects.DEAD_STREAM,
        subjects=[subjects.DEAD_SUBJECTS],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=DEAD_TTL_S,
        max_bytes=DEAD_MAX_BYTES,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
        num_replicas=replicas,
    )
    return queue, result, dead


async def ensure_durable_streams(bus: Bus, limits: QueueLimits) -> list[str]:
    """Makes the streams and stores unless they exist, and returns which of the streams it has made.

    Safe to call from several gateways at once.
    """
    made: list[str] = []
    for config in durable_streams(limits, bus.replicas):
        if await ensure_stream(bus, config):
            made.append(str(config.name))
    await _ensure_stores(bus, limits)
    return made


async def _ensure_stores(bus: Bus, limits: QueueLimits) -> None:
    jetstream = bus.jetstream
    try:
        await jetstream.stream_info(f"KV_{subjects.JOBS_BUCKET}")
    except NotFoundError:
        await jetstream.create_key_value(
            KeyValueConfig(bucket=subjects.JOBS_BUCKET, history=1, storage=StorageType.FILE, replicas=bus.replicas)
        )
    # A request's body is wanted for as long as the request may wait, and then for as long as it may be a dead letter.
    request_ttl_s = limits.queue_max_age_s + DEAD_TTL_S
    for store, ttl_s in ((subjects.REQUEST_OBJECTS, request_ttl_s), (subjects.RESULT_OBJECTS, limits.result_ttl_s)):
        try:
            await jetstream.stream_info(f"OBJ_{store}")
        except NotFoundError:
            await jetstream.create_object_store(
                store, config=ObjectStoreConfig(storage=StorageType.FILE, ttl=ttl_s, replicas=bus.replicas)
            )
