"""`Leases`: elects one of several processes for a task.

A lease is a key of a bucket, created by one process, that expires unless it is renewed (message TTL, whole seconds). A
holder that was paused may not know yet that its lease has expired. So the next holder must also fence it off, as owners
of queues do by recreating their consumers.
Source: NATS ADR-43 (`Nats-TTL`), JetStream's `Nats-Expected-Last-Subject-Sequence`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.headers import pack_headers
from weir.bus.nats.jetstream import EXPECTED_SEQUENCE
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.bus.streams.declarations import ensure_stream
from weir.runtime.containment import call_each
from weir.runtime.ticks import next_tick

TTL_S = 2
"""A lease that is not renewed for this long is free."""

RENEWAL_S = 0.5
SAFETY_S = 1.5
"""A holder that could not renew its lease for this long considers it lost."""


class _Lease:
    __slots__ = (
        "held_since_s",
        "is_writing",
        "on_acquired",
        "on_lost",
        "revision",
        "sure_until_s",
        "writes",
        "written_s",
    )

    def __init__(self, on_acquired: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self.on_acquired = on_acquired
        self.on_lost = on_lost
        self.revision = 0  # 0: not held here
        self.is_writing = False
        self.writes = 0
        self.written_s = 0.0
        self.sure_until_s = 0.0
        self.held_since_s = 0.0


class Leases:
    """The leases that this process wants or holds. `holder` is the value of their keys."""

    def __init__(self, bus: Bus, publisher: AckedPublisher, holder: str) -> None:
        self._bus = bus
        self._publisher = publisher
        self._holder = holder.encode()
        self._leases: dict[str, _Lease] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Acquires and renews leases from now on. Raises NatsError, OSError or TimeoutError while the broker is away."""
        await self._ensure_bucket()
        self._bus.on_reconnect(self._ensure_bucket)
        self._task = background.create_task(self._renew())

    def acquire(self, key: str, on_acquired: Callable[[], None], on_lost: Callable[[], None]) -> None:
        """Acquires `key` as soon as it is free, again after a loss; calls `on_acquired` and `on_lost` each time."""
        if key not in self._leases:
            self._leases[key] = lease = _Lease(on_acquired, on_lost)
            self._write(key, lease)

    def release(self, key: str) -> None:
        """Releases `key` for other processes and no longer acquires it. `on_lost` is not called."""
        lease = self._leases.pop(key, None)
        if lease is not None and lease.revision:
            block = pack_headers({EXPECTED_SEQUENCE: str(lease.revision), "KV-Operation": "DEL", "Nats-TTL": "1s"})
            self._bus.publish(subjects.lease_subject(key), b"", header_block=block)

    def holds(self, key: str) -> bool:
        """Whether this process holds `key`, as far as it knows."""
        lease = self._leases.get(key)
        return lease is not None and lease.revision > 0

    def is_sure(self, key: str) -> bool:
        """Whether nobody else can hold `key` yet: this process was not paused, and could renew it lately."""
        lease = self._leases.get(key)
        return lease is not None and lease.revision > 0 and time.monotonic() <= lease.sure_until_s

    def was_free(self, key: str) -> bool:
        """For `on_acquired`: whether nobody held `key` when this process asked for it, or has left it orderly."""
        lease = self._leases.get(key)
        return lease is not None and lease.writes == 1

    @property
    def held(self) -> list[str]:
        """The keys that this process holds."""
        return [key for key, lease in self._leases.items() if lease.revision]

    def stop(self) -> None:
        """Releases all leases."""
        if self._task is not None:
            self._task.cancel()
        for key in list(self._leases):
            self.release(key)

    async def _ensure_bucket(self) -> None:
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.LEASES_STREAM,
                subjects=[subjects.lease_subject(">")],
                storage=StorageType.MEMORY,
                retention=RetentionPolicy.LIMITS,
                discard=DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                allow_rollup_hdrs=True,
                allow_direct=True,
                allow_msg_ttl=True,
                num_replicas=self._bus.replicas,
            ),
        )

    def _write(self, key: str, lease: _Lease) -> None:
        lease.is_writing = True
        lease.writes += 1
        lease.written_s = time.monotonic()
        block = pack_headers({EXPECTED_SEQUENCE: str(lease.revision), "Nats-TTL": f"{TTL_S}s"})
        on_stored = partial(self._on_stored, key, lease, lease.written_s)
        self._publisher.publish(subjects.lease_subject(key), self._holder, block, on_stored)

    def _on_stored(self, key: str, lease: _Lease, written_s: float, ack: StoreAck) -> None:
        lease.is_writing = False
        if self._leases.get(key) is not lease:
            if ack.is_stored:  # released while it was being written
                block = pack_headers({EXPECTED_SEQUENCE: str(ack.sequence), "KV-Operation": "DEL", "Nats-TTL": "1s"})
                self._bus.publish(subjects.lease_subject(key), b"", header_block=block)
            return
        if ack.is_stored:
            was_held = lease.revision > 0
            lease.revision = ack.sequence
            lease.sure_until_s = written_s + SAFETY_S
            if not was_held:
                call_each("weir.bus.kv.leases: the listener for an acquired lease", (lease.on_acquired,))
        else:
            self._lose(lease)

    def _lose(self, lease: _Lease) -> None:
        if lease.revision:
            lease.revision = 0
            call_each("weir.bus.kv.leases: the listener for a lost lease", (lease.on_lost,))

    async def _renew(self) -> None:
        while True:
            await next_tick(RENEWAL_S)
            now_s = time.monotonic()
            for key, lease in list(self._leases.items()):
                if lease.revision and now_s > lease.sure_until_s:
                    self._lose(lease)
                if not lease.is_writing:
                    self._write(key, lease)
