"""`QueueOwners`: a record for each queue of live requests that names the scheduler that owns it.

A record is written by compare-and-set on the sequence of the record before, so that of several schedulers that acquire
a queue at once one succeeds. The bucket is in memory: after a broker has lost it no queue has an owner, and the former
owners write their records again. The stream's sequences start at 1 again then, so they can't number the owners of a
queue. A record has an *epoch* for that: unix milliseconds of its writing, or one more than the highest epoch that the
writer knows if that is higher (clocks differ). Compare-and-set makes epochs unique, and time makes them grow after a
restart, when no process knows the last one. (If clocks make two equal all the same, the first one counts: workers also
compare the owner.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NoStreamResponseError

from weir.bus.kv.view import KvBucket
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import ensure_stream
from weir.schemas.wire.batches import MAX_EPOCH, QueueOwner
from weir.schemas.wire.codec import MalformedMessage

MAX_RECORDS_BYTES = 64 << 20
_TIMEOUT_S = 2.0


class OwnerRecord(NamedTuple):
    """The owner of a queue ("" for none), the epoch of its ownership, and the sequence of the record (0: no record)."""

    owner: str = ""
    epoch: int = 0
    sequence: int = 0


class QueueOwners:
    """Reads and writes the records. All methods raise NatsError, OSError or TimeoutError while the broker is away."""

    def __init__(self, bus: Bus, unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._bus = bus
        self._bucket = KvBucket(bus, subjects.OWNERS_BUCKET)
        self._unix_ms = unix_ms

    async def ensure(self) -> None:
        """Creates the bucket unless it exists."""
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.OWNERS_STREAM,
                subjects=[subjects.OWNER_RECORDS],
                storage=StorageType.MEMORY,
                retention=RetentionPolicy.LIMITS,
                discard=DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                max_bytes=MAX_RECORDS_BYTES,
                allow_rollup_hdrs=True,
                num_replicas=self._bus.replicas,
            ),
        )

    async def read(self, queue: LiveQueue) -> OwnerRecord:
        """The current record of a queue."""
        data, sequence = await self._bucket.entry(subjects.queue_token(*queue))
        try:
            record = QueueOwner.unpack(data)
        except MalformedMessage:
            return OwnerRecord(sequence=sequence)  # it is overwritten
        return OwnerRecord(record.owner, record.epoch, sequence)

    async def write(self, queue: LiveQueue, owner: str, after: OwnerRecord, highest: int = 0) -> OwnerRecord | None:
        """Writes `owner` into the record of a queue if `after` is still the current one; None if it is not.

        `highest` is the highest epoch of the queue that the caller knows of.
        """
        epoch = min(max(self._unix_ms(), after.epoch + 1, highest + 1), MAX_EPOCH - 1)
        record = QueueOwner(*queue, owner, epoch).pack()
        try:
            sequence = await self._bucket.swap(subjects.queue_token(*queue), record, after.sequence, _TIMEOUT_S)
        except NoStreamResponseError:
            await self.ensure()
            return None
        return OwnerRecord(owner, epoch, sequence) if sequence else None
