"""How records are stored: in batches where that may save syncs, else singly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from weir.bus.streams.acked_publisher import StoreAck
from weir.durable.records.record_store import BATCH_AT, MAX_BATCH, RecordStore


class Broker:
    """A bus and its publisher in one. It acknowledges when it is told to."""

    def __init__(self) -> None:
        self.singles = self.batched = 0
        self._deferred: deque[Callable[[], None]] = deque()
        self._unacked: deque[Callable[[], None]] = deque()

    def defer(self, callback: Callable[[], None]) -> None:
        self._deferred.append(callback)

    def publish(self, _subject: str, _data: bytes, *rest: Any) -> None:
        if not callable(rest[-1]):  # one of a batch, but for the last
            self.batched += 1
            return
        block, on_stored = rest
        in_batch = b"Nats-Batch-Commit" in block
        self.batched += in_batch
        self.singles += not in_batch
        self._unacked.append(lambda: on_stored(StoreAck(1)))

    def run(self) -> None:
        """Stores and acknowledges everything."""
        while self._deferred or self._unacked:
            while self._deferred:
                self._deferred.popleft()()
            if self._unacked:
                self._unacked.popleft()()


@pytest.mark.parametrize("may_sync", [True, False])
def test_many_records_are_stored_in_batches_where_the_broker_may_sync(may_sync: bool) -> None:
    broker = Broker()
    store = RecordStore(cast(Any, broker), cast(Any, broker), lambda: may_sync)
    stored: list[int] = []
    for number in range(3 * MAX_BATCH):
        store.add(f"result.m.{number}", b"\r\n", b"", lambda ack, number=number: stored.append(number))
    broker.run()
    assert (broker.singles, broker.batched) == ((0, 3 * MAX_BATCH) if may_sync else (3 * MAX_BATCH, 0))
    assert stored == list(range(3 * MAX_BATCH))
    assert len(store) == 0


def test_few_records_are_stored_singly() -> None:
    broker = Broker()
    store = RecordStore(cast(Any, broker), cast(Any, broker), lambda: True)
    stored: list[StoreAck] = []
    for _ in range(BATCH_AT - 1):
        store.add("result.m.1", b"\r\n", b"", stored.append)
    broker.run()
    assert (broker.singles, broker.batched) == (BATCH_AT - 1, 0)
    assert len(stored) == BATCH_AT - 1
