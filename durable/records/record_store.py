"""`RecordStore`: stores terminal records in stream RESULT, singly or in atomic batches.

A disk that syncs before it acknowledges takes some thousand messages a second, however many are in flight; a batch
costs one sync. So records that arrive while others are being stored wait for those and are stored together. If the
broker rejects one record of a batch it rejects the whole batch; then each is stored singly.

A broker that does not sync stages each batch in files of its own, which costs more than it saves. Whether it syncs is not
always known, and disks differ, so `StoreTimes` compares how long a record takes in each way.
Source: NATS ADR-50 (atomic batch publishing). Measured with nats-server 2.15: with syncing 131 us singly and 28 us in
batches of 100; without it 14 and 30 us of the CPU of nats-server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from bus.naming.identity import own_id
from bus.nats.connection import Bus
from bus.streams.acked_publisher import AckedPublisher, OnStored, StoreAck

BATCH_AT = 32
"""The number of waiting records from which on they are stored as a batch."""

MAX_BATCH = 500
"""Records of one batch (nats-server takes 1000)."""

MAX_BATCH_BYTES = 4 << 20
"""Bytes of one batch."""

PROBE_INTERVAL_S = 3.0
"""How often a group is stored in the way that is slower, in case it no longer is."""

FIRST_PROBES_S = 0.25
"""The same until that way was measured `MEASURED_GROUPS` times."""

MEASURED_GROUPS = 4
"""Groups whose times count, the latest of each way. The shortest counts: other work delays a group, nothing hastens it."""

PROBE_RECORDS = 128
"""Records of a group that is stored singly in between: it takes some 30 ms where each of them is synced."""

MAX_IN_FLIGHT = 4
"""Batches, or groups of single records, that are being stored; further records wait."""

_VERSION_LINE = b"NATS/1.0\r\n"
_FIRST = b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\n"


class _Record(msgspec.Struct, eq=False):
    subject: str
    lines: bytes
    data: bytes
    on_stored: OnStored


class StoreTimes:
    """Chooses between storing records singly and in batches, by how long a record took in each. Sans-IO.

    Groups are acknowledged in the order in which they were sent, so a group took the time since the one before, or since
    it was sent, whichever is later. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self.prefers_single = False
        # By whether they were stored singly: how long each record of the latest groups took.
        self._record_s: dict[bool, deque[float]] = {way: deque(maxlen=MEASURED_GROUPS) for way in (True, False)}
        self._probed_s: float | None = None
        self._last_stored_s = 0.0

    def next_is_single(self, now_s: float) -> bool:
        """Whether the next group is to be stored singly: in the faster way, or now and then in the other."""
        is_measured = len(self._record_s[not self.prefers_single]) == MEASURED_GROUPS
        interval_s = PROBE_INTERVAL_S if is_measured else FIRST_PROBES_S
        if self._probed_s is None or now_s - self._probed_s >= interval_s:
            self._probed_s = now_s
            return not self.prefers_single
        return self.prefers_single

    def stored(self, now_s: float, sent_s: float, records: int, is_single: bool) -> None:
        """Notes that a group of `records`, sent at `sent_s`, was acknowledged."""
        each_s = (now_s - max(sent_s, self._last_stored_s)) / records
        self._last_stored_s = now_s
        if records < BATCH_AT:
            return  # most of its time is the way to the broker and back
        self._record_s[is_single].append(each_s)
        single_s, batched_s = self._record_s[True], self._record_s[False]
        if single_s and batched_s:
            self.prefers_single = min(single_s) < min(batched_s)


class RecordStore:
    """Stores records. Each must be the first on its subject, else it is rejected (`StoreAck.is_conflict`)."""

    def __init__(self, bus: Bus, publisher: AckedPublisher, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._times = StoreTimes()
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
            if self._times.next_is_single(self._clock()):
                self._store_singly(self._next_batch(MAX_BATCH if self._times.prefers_single else PROBE_RECORDS))
            else:
                self._store_together(self._next_batch())

    def _next_batch(self, most: int = MAX_BATCH) -> list[_Record]:
        size = 0
        for taken, record in enumerate(self._waiting):
            size += len(record.data) + len(record.lines)
            if taken == most or (taken and size > MAX_BATCH_BYTES):
                break
        else:
            taken = len(self._waiting)
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch

    def _store_singly(self, records: list[_Record]) -> None:
        self._in_flight += 1
        left, sent_s = len(records), self._clock()

        def stored(record: _Record, ack: StoreAck) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._times.stored(self._clock(), sent_s, len(records), True)
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
        sent_s = self._clock()

        def stored(ack: StoreAck) -> None:
            self._times.stored(self._clock(), sent_s, len(records), False)
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
