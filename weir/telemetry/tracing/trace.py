"""`Trace`: the timestamps and tensors of one traced request, independent of the exporter.

Timestamps have Triton's names, plus three of ours: `FRAME_SENT`, when the request left its caller, `BATCH_SENT`, when its
scheduler sent the batch (while a process observes batches), and `WORKER_RECEIVED`, when the batch reached its worker. All
times are unix nanoseconds by the clock of the role that took them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weir.schemas.core.tensors import Tensor, as_array, unpack_bytes
from weir.telemetry.tracing.context import TraceContext, format_traceparent, new_span_id, new_trace_id

FRAME_SENT = "FRAME_SENT"
BATCH_SENT = "BATCH_SENT"
WORKER_RECEIVED = "WORKER_RECEIVED"
OWN_TIMESTAMPS = frozenset((FRAME_SENT, BATCH_SENT, WORKER_RECEIVED))
"""The timestamps that Triton lacks, which its trace files do not have."""

_WORKER_TIMESTAMPS = (
    "QUEUE_START",
    BATCH_SENT,
    WORKER_RECEIVED,
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
)
MAX_TIMESTAMPS = 1000
"""Timestamps kept of one request; a decoupled model may send any number of responses."""

_LATEST_NS = 2**63


class TracedTensor(NamedTuple):
    """A tensor as text: `activity` is where it was recorded, `data` has its elements separated by commas."""

    activity: str
    name: str
    data: str
    shape: str
    datatype: str


class Trace:
    """One traced request, from its arrival to its response. `parent` is the position in the caller's trace, if any.

    `traceparent` is what the request carries on: the position of the model's span. With `is_exported` the ids are
    those of exported spans, which the sampled flag shows. `observers` get a report of the trace; if it `is_recorded`, it is
    also written or exported. `batch` has the facts about its batch that came with the worker's timestamps.
    """

    __slots__ = (
        "batch",
        "error",
        "id",
        "is_recorded",
        "model_name",
        "model_version",
        "observers",
        "parent",
        "request_id",
        "root_span_id",
        "span_id",
        "status",
        "tensors",
        "timestamps",
        "trace_id",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        id: int,
        model_name: str,
        request_id: str,
        parent: TraceContext | None = None,
        is_exported: bool = False,
    ) -> None:
        self.id = id
        self.model_name = model_name
        self.model_version = 0
        self.request_id = request_id
        self.parent = parent
        self.tracestate = "" if parent is None else parent.tracestate
        self.trace_id = new_trace_id() if parent is None else parent.trace_id
        self.root_span_id = new_span_id()
        self.span_id = new_span_id()
        self.traceparent = format_traceparent(self.trace_id, self.span_id, is_exported)
        self.timestamps: list[tuple[str, int]] = []
        self.tensors: list[TracedTensor] = []
        self.error = ""
        self.status = 200  # of HTTP
        self.is_recorded = True
        self.observers: tuple[str, ...] = ()
        self.batch: Mapping[str, int | str] = {}

    def mark(self, name: str, at_ns: int = 0) -> None:
        """Adds a timestamp: now, or the given time."""
        if len(self.timestamps) < MAX_TIMESTAMPS:
            self.timestamps.append((name, at_ns or time.time_ns()))

    def add_worker_timestamps(self, timestamps: Mapping[str, int | str]) -> None:
        """Adds the timestamps of a worker that came with a response; unknown names are ignored."""
        for name in _WORKER_TIMESTAMPS:
            at_ns = timestamps.get(name, 0)
            if isinstance(at_ns, int) and 0 < at_ns < _LATEST_NS:
                self.mark(name, at_ns)
        if "BATCH_ID" in timestamps:
            self.batch = timestamps

    def add_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Adds tensors whose data is in memory, as text."""
        for tensor in tensors:
            shape = ",".join(map(str, tensor.shape))
            self.tensors.append(TracedTensor(activity, tensor.name, _text(tensor), shape, tensor.datatype))

    def first(self, name: str) -> int:
        """Returns the first timestamp of this name; 0 without one."""
        return next((ns for known, ns in self.timestamps if known == name), 0)


def _text(tensor: Tensor) -> str:
    if not isinstance(tensor.data, (bytes, bytearray, memoryview)):
        return ""
    try:
        values = as_array(tensor.data, tensor.datatype, [-1]) if tensor.datatype != "BYTES" else None
        elements = unpack_bytes(tensor.data) if values is None else []
    except ValueError:
        return ""  # the response is malformed, which the frontend handles
    if values is None:
        return ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    if tensor.datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype.kind == "f":
        return ",".join(f"{value:g}" for value in values.tolist())
    return ",".join(str(int(value)) for value in values.tolist())
