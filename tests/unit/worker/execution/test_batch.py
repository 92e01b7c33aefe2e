"""Cancellation, deadlines and trace timestamps of a batch."""

from __future__ import annotations

import time

from weir.schemas.wire.batches import BatchEntry, BatchMessage
from weir.schemas.wire.calls import timestamp
from weir.worker.execution.batch import Batch


def batch(*entries: BatchEntry) -> Batch:
    return Batch(BatchMessage("s", 1, "m", 1, 0, list(entries)))


def test_requests_are_cancelled_by_gateway_and_key() -> None:
    running = batch(BatchEntry("a", 1, 0, b""), BatchEntry("b", 1, 0, b""), BatchEntry("a", 2, 0, b""))
    calls: list[int] = []
    running.on_cancel = lambda: calls.append(1)
    running.cancel("a", [1, 7])
    running.cancel("a", [2])
    assert running.cancelled == {0, 2}
    assert len(calls) == 2


def test_a_request_is_late_after_its_deadline() -> None:
    now_ms = time.time_ns() // 1_000_000
    running = batch(BatchEntry("a", 1, 0, b"", now_ms - 1), BatchEntry("a", 2, 0, b"", now_ms + 60_000))
    assert [running.is_late(position) for position in range(2)] == [True, False]
    assert not batch(BatchEntry("a", 1, 0, b"")).is_late(0)


def test_trace_timestamps_are_in_order_also_while_the_model_runs() -> None:
    running = batch(BatchEntry("a", 1, 5, b""))
    start = time.monotonic_ns()
    for infer_end_ns in (start - 1, start + 2):
        running.start_ns, running.input_end_ns, running.infer_end_ns = start, start + 1, infer_end_ns
        running.positions = [0]
        timestamps = running.timestamps(0)
        times = [timestamp(timestamps, name) for name in list(timestamps)[:6]]
        assert times == sorted(times)
        assert timestamp(timestamps, "COMPUTE_START") - timestamp(timestamps, "QUEUE_START") >= 5_000
        assert (timestamps["BATCH_SIZE"], timestamps["WORKER"]) == (1, "")
