"""Decoding a batch: long strings are checked by the worker, for each request separately."""

from __future__ import annotations

from typing import Any

import pytest

from bus.payloads.arena import PayloadReader
from schemas.core.requests import InferRequest
from schemas.core.tensors import MAX_WALKED_BYTES, Tensor, pack_bytes
from schemas.wire.messages import BatchEntry, BatchMessage
from schemas.wire.request_body import pack_body
from worker.execution.decoding import decode_batch
from worker.execution.running_batch import RunningBatch
from worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO
from worker.execution.statistics import ModelStatistics

LONG = MAX_WALKED_BYTES // 4 + 1
WHERE = "inference input 'IN' for model 'm'"


def running(*contents: tuple[list[int], bytes]) -> RunningBatch:
    bodies = [pack_body(InferRequest("m", inputs=[Tensor("IN", "BYTES", *content)])) for content in contents]
    fields: dict[str, Any] = dict.fromkeys(BatchMessage.__struct_fields__, 0)
    entry: dict[str, Any] = dict.fromkeys(BatchEntry._fields, 0) | {"gateway": "gateway-1", "position": None}
    entries = [BatchEntry(**entry | {"key": key, "body": body}) for key, body in enumerate(bodies)]
    return RunningBatch(BatchMessage(**fields | {"model": "m", "version": 1, "entries": entries}))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (bytes(4 * LONG), f"unexpected number of string elements {LONG} for {WHERE}, expecting {LONG - 1}"),
        (pack_bytes([b"x" * 4 * LONG]), f"expected {LONG - 1} string elements for {WHERE}, got 1"),
    ],
)
def test_a_request_with_wrong_strings_fails_alone(content: bytes, text: str) -> None:
    good = pack_bytes([b""] * (LONG - 2) + [b"x" * 8])
    batch = running(([LONG - 1], good), ([LONG - 1], content), ([1], pack_bytes([b"short"])))
    memory = SharedMemoryIO(SharedMemoryAccess())
    positions, requests, results = decode_batch(batch, PayloadReader(), memory, ModelStatistics())
    assert positions == [0, 2]
    assert [len(request.inputs[0].data) for request in requests] == [len(good), 9]  # type: ignore[arg-type]
    assert results[0] is results[2] is None
    error = results[1].error if results[1] is not None else None
    assert error is not None
    assert error.message.endswith(text)
