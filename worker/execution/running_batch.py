"""`RunningBatch`: a batch from its arrival at a worker until the last response to the last of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from weir.bus.payloads.fetch_plan import Outcome
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.messages import BatchMessage, Timestamps
from weir.telemetry.tracing.trace import BATCH_SENT, WORKER_RECEIVED
from weir.worker.backend_api.interface import Execution

_NO_SEQUENCES: Mapping[int, int | str] = MappingProxyType({})


class RunningBatch:
    """A batch message, the time of its arrival, and the entries that were cancelled since.

    `sequence_ids` are the correlation ids of its sequences, by position, once its requests are decoded.

    The event loop creates and cancels it; any thread may read it. `has_deadlines` spares batches without deadlines, which
    most are, from looking at the clock. `fetched` has the payloads from other hosts, or the reasons why they were lost.
    For traces, `worker` is the id of this worker.
    """

    __slots__ = (
        "cancelled",
        "fetched",
        "has_deadlines",
        "message",
        "on_cancel",
        "received_ns",
        "sequence_ids",
        "worker",
    )

    def __init__(self, message: BatchMessage, worker: str = "") -> None:
        self.message = message
        self.worker = worker
        self.received_ns = time.monotonic_ns()
        self.has_deadlines = False
        for entry in message.entries:
            if entry.deadline_ms:
                self.has_deadlines = True
        self.cancelled: frozenset[int] = frozenset()
        """The positions of cancelled entries."""
        self.sequence_ids: Mapping[int, int | str] = _NO_SEQUENCES
        self.fetched: Mapping[PayloadRef, Outcome] | None = None
        self.on_cancel: Callable[[], None] | None = None
        """Called in the event loop after `cancelled` has grown."""

    def is_late(self, position: int) -> bool:
        """Whether the deadline of an entry has passed."""
        return self.has_deadlines and 0 < self.message.entries[position].deadline_ms <= time.time_ns() // 1_000_000

    def cancel(self, gateway: str, keys: Iterable[int]) -> None:
        """Marks the requests of `gateway` with these keys as cancelled."""
        wanted = {(gateway, key) for key in keys}
        self.cancelled |= {
            position for position, entry in enumerate(self.message.entries) if (entry.gateway, entry.key) in wanted
        }
        if self.on_cancel is not None:
            self.on_cancel()


def trace_timestamps(batch: RunningBatch, index: int, execution: Execution) -> Timestamps:
    """Triton's trace timestamps of the request at `index` of the batch, in Unix nanoseconds, up to its response.

    With them come the facts about its batch that `weir.schemas.wire.messages.Timestamps` lists.
    """
    now_ns = time.monotonic_ns()
    to_unix = time.time_ns() - now_ns
    infer_end_ns = execution.infer_end_ns
    if infer_end_ns < execution.input_end_ns:
        infer_end_ns = now_ns  # the model still runs, or failed before the end of its run
    message = batch.message
    timestamps: Timestamps = {
        "QUEUE_START": batch.received_ns + to_unix - batch.message.entries[index].queued_us * 1000,
        WORKER_RECEIVED: batch.received_ns + to_unix,
        "COMPUTE_START": execution.start_ns + to_unix,
        "COMPUTE_INPUT_END": execution.input_end_ns + to_unix,
        "COMPUTE_OUTPUT_START": infer_end_ns + to_unix,
        "COMPUTE_END": now_ns + to_unix,
        "BATCH_ID": message.batch_id,
        "BATCH_SIZE": len(message.entries),
        "INSTANCE": message.instance,
        "SCHEDULER": message.scheduler,
        "WORKER": batch.worker,
    }
    if message.sent_ns:
        timestamps[BATCH_SENT] = message.sent_ns
    return timestamps
