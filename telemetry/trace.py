"""`Trace`: what is written down of one traced request, by whichever exporter.

The names of moments are Triton's trace timestamps, and one of ours: `WORKER_RECEIVED`, when the batch reached its
worker. All times are unix nanoseconds, each by the clock of the role that took it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from schemas.tensors import Tensor, as_array, unpack_bytes
from telemetry.trace_context import TraceContext, format_traceparent, new_span_id, new_trace_id

WORKER_RECEIVED = "WORKER_RECEIVED"

_WORKERS_MOMENTS = (
    "QUEUE_START",
    WORKER_RECEIVED,
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
)
MAX_MOMENTS = 1000
"""What is written down of one request; a decoupled model may answer any number of times."""

_LATEST_NS = 2**63


class TracedTensor(NamedTuple):
    """A tensor as text: `activity` tells where it was seen, `data` has its elements between commas."""

    activity: str
    name: str
    data: str
    shape: str
    datatype: str


class Trace:
    """One traced request, from the door to its answer. `parent` is the place in the caller's trace, if it has one.

    `traceparent` is what the request carries on: the place of the model's span. With `is_exported` the ids are those of
    spans somewhere, which is told by the sampled flag.
    """

    __slots__ = (
        "error",
        "id",
        "model_name",
        "model_version",
        "moments",
        "parent",
        "request_id",
        "root_span_id",
        "span_id",
        "tensors",
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
        tracestate: str = "",
        is_exported: bool = False,
    ) -> None:
        self.id = id
        self.model_name = model_name
        self.model_version = 0
        self.request_id = request_id
        self.parent = parent
        self.tracestate = tracestate
        self.trace_id = new_trace_id() if parent is None else parent.trace_id
        self.root_span_id = new_span_id()
        self.span_id = new_span_id()
        self.traceparent = format_traceparent(self.trace_id, self.span_id, is_exported)
        self.moments: list[tuple[str, int]] = []
        self.tensors: list[TracedTensor] = []
        self.error = ""

    def mark(self, name: str, at_ns: int = 0) -> None:
        """The request has passed this point, now or at the given time."""
        if len(self.moments) < MAX_MOMENTS:
            self.moments.append((name, at_ns or time.time_ns()))

    def add_workers(self, moments: Mapping[str, int]) -> None:
        """Takes the moments that an answer brought; what is none of a worker's is passed over."""
        for name in _WORKERS_MOMENTS:
            if 0 < moments.get(name, 0) < _LATEST_NS:
                self.mark(name, moments[name])

    def add_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Takes tensors whose content lies in memory, as text."""
        for tensor in tensors:
            shape = ",".join(map(str, tensor.shape))
            self.tensors.append(TracedTensor(activity, tensor.name, _text(tensor), shape, tensor.datatype))

    def first(self, name: str) -> int:
        """When the request passed this point first; 0 where it never did."""
        return next((ns for known, ns in self.moments if known == name), 0)


def _text(tensor: Tensor) -> str:
    if not isinstance(tensor.data, (bytes, bytearray, memoryview)):
        return ""
    try:
        values = as_array(tensor.data, tensor.datatype, [-1]) if tensor.datatype != "BYTES" else None
        elements = unpack_bytes(tensor.data) if values is None else []
    except ValueError:
        return ""  # an answer whose content does not fit its datatype: the door will see to it
    if values is None:
        return ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    if tensor.datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype.kind == "f":
        return ",".join(f"{value:g}" for value in values.tolist())
    return ",".join(str(int(value)) for value in values.tolist())
