"""`RecordStore`: stores terminal records in stream RESULT, singly or in atomic batches.

A disk that syncs before it acknowledges takes some thousand messages a second, however many are in flight; a batch
costs one sync. So records that arrive while others are being stored wait for those and are stored together. If the
broker rejects one record of a batch it rejects the whole batch; then each is stored singly.

A broker that does not sync stages each batch in files of its own, which costs more than it saves. Where it is known not to
sync (`weir.bus.streams.durability`), records are stored singly.
Source: NATS ADR-50 (atomic batch publishing). Measured with nats-server 2.15: with syncing 131 us singly and 28 us in
batches of 100; without it 14 and 30 us of the CPU of nats-server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from weir.bus.naming.identity import own_id
from weir.bus.nats.connection import Bus
from weir.bus.streams.acked_publisher import AckedPublisher, OnStored, StoreAck

BATCH_AT = 32
"""The number of waiting records from which on they are stored as a batch."""

MAX_BATCH = 500
"""Records of one batch (nats-server takes 1000)."""

MAX_BATCH_BYTES = 4 << 20
"""Bytes of one batch."""

MAX_IN_FLIGHT = 4
"""Batches, or groups of single records, that are being stored; further records wait."""

_FIRST = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\n"


class _Record(msgspec.Struct, eq=False, gc=False):
    subject: str
    lines: bytes
    data: bytes
    on_stored: OnStored


class RecordStore:
    """Stores records. Each must be the first on its subject, else it is rejected (`StoreAck.is_conflict`).

    `may_sync` returns False where nats-server is known not to sync before it acknowledges.
    """

    def __init__(self, bus: Bus, publisher: AckedPublisher, may_sync: Callable[[], bool]) -> None:
        self._bus = bus
        self._may_sync = may_sync
        self._publisher = publisher
        self._prefix = own_id("batch", None)
        self._numbers = count(1)
        self._waiting: list[_Record] = []
        self._in_flight = 0
        self._flush_due = False

    def __len__(self) -> int:
        """Waiting records, and groups that are being stored."""
        return len(self._waiting) + self._in_flight

    def add(self, subject: str, lines: bytes, data: bytes, on_stored: OnStored) -> None:
        """Stores a record with the header lines `lines`, which end with an empty line."""
        self._waiting.append(_Record(subject, lines, data, on_stored))
        if not self._flush_due:
            self._flush_due = True
            self._bus.defer(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        while self._waiting and self._in_flight < MAX_IN_FLIGHT:
            if len(self._waiting) < BATCH_AT:
                if self._in_flight:
                    return  # the next acknowledgement flushes them, with those that have arrived by then
                records, self._waiting = self._waiting, []
                self._store_singly(records)
                return
            if self._may_sync():
                self._store_together(self._next_batch())
            else:
                self._store_singly(self._next_batch())

    def _next_batch(self) -> list[_Record]:
        size = 0
        for taken, record in enumerate(self._waiting):
            size += len(record.data) + len(record.lines)
            if taken == MAX_BATCH or (taken and size > MAX_BATCH_BYTES):
                break
        else:
            taken = len(self._waiting)
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch

    def _store_singly(self, records: list[_Record]) -> None:
        self._in_flight += 1
        left = len(records)

        def stored(record: _Record, ack: StoreAck) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._on_group_stored()
            record.on_stored(ack)

        for record in records:
            self._publisher.publish(record.subject, record.data, _FIRST + record.lines, partial(stored, record))

    def _store_together(self, records: list[_Record]) -> None:
        self._in_flight += 1
        batch_id = f"{self._prefix}-{next(self._numbers)}"
        *most, last = records
        for number, record in enumerate(most, 1):
            self._bus.publish(record.subject, record.data, "", _block(batch_id, number, record, b""))
        commit = _block(batch_id, len(records), last, b"Nats-Batch-Commit: 1\r\n")

        def stored(ack: StoreAck) -> None:
            self._on_group_stored()
            if not ack.is_stored:
                # One of them has a record already, or the broker lost the batch: storing each singly shows which.
                self._store_singly(records)
                return
            for record in records:
                record.on_stored(ack)

        self._publisher.publish(last.subject, last.data, commit, stored)

    def _on_group_stored(self) -> None:
        self._in_flight -= 1
        if self._waiting and not self._flush_due:
            self._flush_due = True
            self._bus.defer(self._flush)


def _block(batch_id: str, number: int, record: _Record, more: bytes) -> bytes:
    return b"%bNats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b%b" % (
        _FIRST,
        batch_id.encode(),
        number,
        more,
        record.lines,
    )
