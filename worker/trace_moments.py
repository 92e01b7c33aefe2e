"""When a traced request passed the points of its way through a worker, by the names of Triton's trace timestamps."""

from __future__ import annotations

import time

from schemas.messages import Moments
from telemetry.trace import WORKER_RECEIVED
from worker.backend import Execution
from worker.running_batch import RunningBatch


def moments_of(batch: RunningBatch, index: int, execution: Execution) -> Moments:
    """Of the request at `index` of the batch, whose answer is about to leave; unix nanoseconds."""
    now_ns = time.monotonic_ns()
    to_unix = time.time_ns() - now_ns
    infer_end_ns = execution.infer_end_ns
    if infer_end_ns < execution.input_end_ns:
        infer_end_ns = now_ns  # it answers while it runs, or failed before it could tell
    return {
        "QUEUE_START": batch.received_ns + to_unix - batch.message.entries[index].queued_us * 1000,
        WORKER_RECEIVED: batch.received_ns + to_unix,
        "COMPUTE_START": execution.start_ns + to_unix,
        "COMPUTE_INPUT_END": execution.input_end_ns + to_unix,
        "COMPUTE_OUTPUT_START": infer_end_ns + to_unix,
        "COMPUTE_END": now_ns + to_unix,
    }
