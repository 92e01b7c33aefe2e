"""How records are stored: singly or in batches, whichever takes a broker less time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from bus.streams.acked_publisher import StoreAck
from durable.records.record_store import (
    BATCH_AT,
    FIRST_PROBES_S,
    MAX_BATCH,
    MEASURED_GROUPS,
    PROBE_INTERVAL_S,
    RecordStore,
    StoreTimes,
)


class SlowBroker:
    """A bus and its publisher in one: it stores messages in order, each in a given time, on a clock of its own."""

    def __init__(self, single_s: float, batched_s: float) -> None:
        self.single_s, self.batched_s = single_s, batched_s
        self.now_s = 100.0
        self.singles = self.batched = 0
        self._deferred: deque[Callable[[], None]] = deque()
        self._unacked: deque[tuple[float, Callable[[], None]]] = deque()

    def defer(self, callback: Callable[[], None]) -> None:
        self._deferred.append(callback)

    def publish(self, _subject: str, _data: bytes, *rest: Any) -> None:
        if not callable(rest[-1]):  # one of a batch, but for the last
            self.batched += 1
            self._unacked.append((self.batched_s, lambda: None))
            return
        block, on_stored = rest
        in_batch = b"Nats-Batch-Commit" in block
        self.batched += in_batch
        self.singles += not in_batch
        self._unacked.append((self.batched_s if in_batch else self.single_s, lambda: on_stored(StoreAck(1))))

    def run(self) -> None:
        """Stores and acknowledges everything."""
        while self._deferred or self._unacked:
            while self._deferred:
                self._deferred.popleft()()
            if self._unacked:
                each_s, acknowledge = self._unacked.popleft()
                self.now_s += each_s
                acknowledge()


def store_on(broker: SlowBroker) -> RecordStore:
    return RecordStore(cast(Any, broker), cast(Any, broker), lambda: broker.now_s)


def add(store: RecordStore, count: int, stored: list[int]) -> None:
    for number in range(count):
        store.add(f"result.m.{number}", b"\r\n", b"", lambda ack, number=number: stored.append(number))


@pytest.mark.parametrize(("single_s", "batched_s", "is_single"), [(250e-6, 30e-6, False), (15e-6, 35e-6, True)])
def test_many_records_are_stored_in_the_way_that_takes_less_time(
    single_s: float, batched_s: float, is_single: bool
) -> None:
    broker = SlowBroker(single_s, batched_s)
    store = store_on(broker)
    stored: list[int] = []
    add(store, 3 * MAX_BATCH, stored)
    broker.run()
    broker.singles = broker.batched = 0
    add(store, 10 * MAX_BATCH, stored)
    broker.run()
    assert (broker.singles, broker.batched) == ((10 * MAX_BATCH, 0) if is_single else (0, 10 * MAX_BATCH))
    assert len(stored) == 13 * MAX_BATCH
    assert len(store) == 0


def test_a_broker_that_begins_to_sync_is_noticed() -> None:
    broker = SlowBroker(15e-6, 35e-6)
    store = store_on(broker)
    stored: list[int] = []
    add(store, 4 * MAX_BATCH, stored)
    broker.run()
    broker.single_s = 250e-6
    for _ in range(3):
        broker.now_s += PROBE_INTERVAL_S
        add(store, 4 * MAX_BATCH, stored)
        broker.run()
    broker.singles = 0
    add(store, 4 * MAX_BATCH, stored)
    broker.run()
    assert broker.singles == 0


def test_few_records_are_stored_singly_and_say_nothing_of_batches() -> None:
    broker = SlowBroker(250e-6, 30e-6)
    store = store_on(broker)
    stored: list[int] = []
    for _ in range(5):
        add(store, BATCH_AT - 1, stored)
        broker.run()
    assert broker.batched == 0
    assert len(stored) == 5 * (BATCH_AT - 1)


def test_the_slower_way_is_tried_once_in_a_while() -> None:
    times, now_s = StoreTimes(), 0.0
    for _ in range(MEASURED_GROUPS):
        assert times.next_is_single(now_s)
        times.stored(now_s + 0.1, now_s, 100, is_single=True)
        assert not times.next_is_single(now_s + 0.1)
        times.stored(now_s + 0.101, now_s + 0.1, 100, is_single=False)
        now_s += FIRST_PROBES_S
    now_s -= FIRST_PROBES_S
    assert not times.next_is_single(now_s + PROBE_INTERVAL_S - 0.1)
    now_s += PROBE_INTERVAL_S
    assert times.next_is_single(now_s)
    times.stored(now_s + 0.0001, now_s, 100, is_single=True)
    assert times.prefers_single


def test_one_slow_group_of_the_preferred_way_decides_nothing() -> None:
    times = StoreTimes()
    times.stored(0.010, 0.0, 100, is_single=False)
    times.stored(0.110, 0.010, 100, is_single=True)
    times.stored(0.310, 0.110, 100, is_single=False)  # twenty times as long as before
    assert not times.prefers_single
