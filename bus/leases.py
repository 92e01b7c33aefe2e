"""`Leases`: of several processes that could do a thing, one does it.

A lease is a key of a bucket that only one process has made, and that goes by itself when it is not renewed (message TTL,
whole seconds). Who holds one may have been paused and not know yet that it is gone: whoever takes a lease must also fence
off the one before, as the owners of queues do by making their consumers anew.
Source: NATS ADR-43 (`Nats-TTL`), JetStream's `Nats-Expected-Last-Subject-Sequence`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher, StoreAck
from bus.connection import Bus
from bus.headers import pack_headers
from bus.streams import ensure_stream
from runtime.containment import call_each

TTL_S = 2
"""After so long without renewal a lease is free."""

RENEWAL_S = 0.5
SAFETY_S = 1.5
"""A holder that could not renew for so long takes its lease for lost."""

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class _Lease:
    __slots__ = ("asked_s", "held_since_s", "is_asking", "on_lost", "on_taken", "revision", "sure_until_s", "try_at_s")

    def __init__(self, on_taken: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self.on_taken = on_taken
        self.on_lost = on_lost
        self.revision = 0  # 0: another holds it, or nobody
        self.is_asking = False
        self.asked_s = 0.0
        self.sure_until_s = 0.0
        self.held_since_s = 0.0
        self.try_at_s = 0.0


class Leases:
    """See the module. `holder` is told to whoever looks at a lease."""

    def __init__(self, bus: Bus, publisher: AckedPublisher, holder: str) -> None:
        self._bus = bus
        self._publisher = publisher
        self._holder = holder.encode()
        self._leases: dict[str, _Lease] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Begins to ask for what is wanted. Raises NatsError, OSError or TimeoutError when the broker is away."""
        await self._ensure_bucket()
        self._bus.on_reconnect(self._ensure_bucket)
        self._task = background.create_task(self._renew())

    def want(self, key: str, on_taken: Callable[[], None], on_lost: Callable[[], None]) -> None:
        """From now on holds `key` whenever nobody else does; tells when it has it, and when it has it no more."""
        if key not in self._leases:
            self._leases[key] = lease = _Lease(on_taken, on_lost)
            self._ask(key, lease)

    def give_up(self, key: str) -> None:
        """Doesn't want it any more; it is free for others at once. `on_lost` is not called."""
        lease = self._leases.pop(key, None)
        if lease is not None and lease.revision:
            block = pack_headers({_EXPECTED: str(lease.revision), "KV-Operation": "DEL", "Nats-TTL": "1s"})
            self._bus.publish(subjects.lease_subject(key), b"", header_block=block)

    def holds(self, key: str) -> bool:
        """Whether it is held by this process, for all that can be known here."""
        lease = self._leases.get(key)
        return lease is not None and lease.revision > 0

    @property
    def held(self) -> list[str]:
        """The keys that are held."""
        return [key for key, lease in self._leases.items() if lease.revision]

    def stop(self) -> None:
        """Gives up all of them."""
        if self._task is not None:
            self._task.cancel()
        for key in list(self._leases):
            self.give_up(key)

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

    def _ask(self, key: str, lease: _Lease) -> None:
        lease.is_asking = True
        lease.asked_s = time.monotonic()
        block = pack_headers({_EXPECTED: str(lease.revision), "Nats-TTL": f"{TTL_S}s"})
        told = partial(self._on_answer, key, lease, lease.asked_s)
        self._publisher.publish(subjects.lease_subject(key), self._holder, block, told)

    def _on_answer(self, key: str, lease: _Lease, asked_s: float, ack: StoreAck) -> None:
        lease.is_asking = False
        if self._leases.get(key) is not lease:
            if ack.is_stored:  # given up while it was asked for
                block = pack_headers({_EXPECTED: str(ack.sequence), "KV-Operation": "DEL", "Nats-TTL": "1s"})
                self._bus.publish(subjects.lease_subject(key), b"", header_block=block)
            return
        if ack.is_stored:
            was_held = lease.revision > 0
            lease.revision = ack.sequence
            lease.sure_until_s = asked_s + SAFETY_S
            if not was_held:
                call_each("bus.leases: the owner of a lease that was taken", (lease.on_taken,))
        else:
            self._lose(lease)

    def _lose(self, lease: _Lease) -> None:
        if lease.revision:
            lease.revision = 0
            call_each("bus.leases: the owner of a lease that was lost", (lease.on_lost,))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            now_s = time.monotonic()
            for key, lease in list(self._leases.items()):
                if lease.revision and now_s > lease.sure_until_s:
                    self._lose(lease)
                if not lease.is_asking:
                    self._ask(key, lease)
