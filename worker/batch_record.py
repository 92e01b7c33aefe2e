"""What a batch that was answered at once adds to its version's counters, by Triton's counting rules."""

from __future__ import annotations

import time
from collections.abc import Sequence

from worker.backend import Execution, Result
from worker.running_batch import RunningBatch
from worker.statistics import ModelStatistics


def record_batch(
    statistics: ModelStatistics,
    running: RunningBatch,
    positions: Sequence[int],
    sizes: Sequence[int],
    outcomes: Sequence[Result | None],
    execution: Execution,
    end_ns: int,
) -> None:
    """Counts the requests that stand at these `positions` of the batch, with their rows and outcomes.

    The run counts with all its rows whatever became of them; a request counts as succeeded, failed (BACKEND) or
    cancelled. A model's own error response is a success, as in Triton.
    """
    if not positions:
        return
    entries, cancelled = running.message.entries, running.cancelled
    start_ns, input_end_ns, infer_end_ns = execution.start_ns, execution.input_end_ns, execution.infer_end_ns
    if infer_end_ns < input_end_ns:
        infer_end_ns = end_ns  # it failed before it could tell
    waited_ns = start_ns - running.received_ns
    queues_ns = [entries[position].queued_us * 1000 + waited_ns for position in positions]
    executed_rows = succeeded_rows = sum(sizes)
    failed = {
        at: "CANCELED" if position in cancelled else "BACKEND"
        for at, (position, outcome) in enumerate(zip(positions, outcomes, strict=True))
        if position in cancelled or (outcome is not None and outcome.error and not outcome.is_model_response)
    }
    if failed:
        for at, reason in failed.items():
            statistics.record_failures(1, reason, queues_ns[at] + end_ns - start_ns)
            succeeded_rows -= sizes[at]
        queues_ns = [queue_ns for at, queue_ns in enumerate(queues_ns) if at not in failed]
    phases_ns = (input_end_ns - start_ns, infer_end_ns - input_end_ns, end_ns - infer_end_ns)
    succeeded = len(queues_ns)
    statistics.record_batch(
        succeeded,
        succeeded_rows,
        sum(queues_ns),
        phases_ns,
        time.time_ns() // 1_000_000,
        executed_rows,
        waited_ns * succeeded,
    )
    if statistics.latencies is not None:
        statistics.latencies.observe(queues_ns, phases_ns)
