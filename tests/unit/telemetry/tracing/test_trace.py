"""The timestamps and tensors of one traced request."""

from __future__ import annotations

import time

import numpy as np

from weir.schemas.core.tensors import Tensor
from weir.telemetry.tracing.context import TraceContext
from weir.telemetry.tracing.trace import MAX_TIMESTAMPS, WORKER_RECEIVED, Trace


def test_a_trace_continues_that_of_its_caller():
    parent = TraceContext(7, 9, "vendor=x")
    trace = Trace(1, "m", "id", parent, is_exported=True)
    assert (trace.trace_id, trace.tracestate) == (7, "vendor=x")
    assert trace.traceparent == f"00-{7:032x}-{trace.span_id:016x}-01"


def test_without_a_caller_a_trace_has_an_id_of_its_own():
    first, second = Trace(1, "m", ""), Trace(2, "m", "")
    assert first.trace_id != second.trace_id
    assert (first.parent, first.tracestate) == (None, "")
    assert first.traceparent.endswith("-00")


def test_timestamps_are_kept_in_order_and_bounded():
    trace = Trace(1, "m", "")
    before_ns = time.time_ns()
    trace.mark("REQUEST_START")
    trace.mark("QUEUE_START", 5)
    assert trace.first("REQUEST_START") >= before_ns
    assert trace.first("QUEUE_START") == 5
    assert trace.first("REQUEST_END") == 0
    for number in range(2 * MAX_TIMESTAMPS):
        trace.mark("COMPUTE_START", number + 1)
    assert len(trace.timestamps) == MAX_TIMESTAMPS


def test_only_known_and_possible_timestamps_of_a_worker_are_taken():
    trace = Trace(1, "m", "")
    trace.add_worker_timestamps(
        {"COMPUTE_END": 4, WORKER_RECEIVED: 2, "OTHER": 3, "COMPUTE_START": -1, "QUEUE_START": 2**63}
    )
    assert trace.timestamps == [(WORKER_RECEIVED, 2), ("COMPUTE_END", 4)]


def test_tensors_are_written_as_text():
    trace = Trace(1, "m", "")
    values = np.array([[1, 2]], np.int32)
    trace.add_tensors("TENSOR_QUEUE_INPUT", [Tensor("IN", "INT32", (1, 2), values.tobytes())])
    (tensor,) = trace.tensors
    assert (tensor.activity, tensor.name, tensor.data, tensor.shape, tensor.datatype) == (
        "TENSOR_QUEUE_INPUT",
        "IN",
        "1,2",
        "1,2",
        "INT32",
    )
