"""Decoding a batch: each request is decoded, checked, and fails by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import PayloadArena, PayloadReader
from weir.bus.payloads.fetch_plan import Loss
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import MAX_WALKED_BYTES, PayloadRef, Tensor, pack_bytes
from weir.schemas.wire.batches import BatchEntry, BatchMessage
from weir.schemas.wire.request_body import pack_body, pack_body_ref, unpack_body, unpack_plain
from weir.worker.execution.batch import Batch
from weir.worker.execution.decoding import decode_batch, is_payload_stale
from weir.worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO
from weir.worker.execution.statistics import ModelStatistics

LONG = MAX_WALKED_BYTES // 4 + 1
WHERE = "inference input 'IN' for model 'm'"


def running(*contents: tuple[list[int], bytes]) -> Batch:
    bodies = [pack_body(InferRequest("m", inputs=[Tensor("IN", "BYTES", *content)])) for content in contents]
    fields: dict[str, Any] = dict.fromkeys(BatchMessage.__struct_fields__, 0)
    entry: dict[str, Any] = dict.fromkeys(BatchEntry._fields, 0) | {"gateway": "gateway-1", "position": None}
    entries = [BatchEntry(**entry | {"key": key, "body": body}) for key, body in enumerate(bodies)]
    return Batch(BatchMessage(**fields | {"model": "m", "version": 1, "entries": entries}))


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


def small(**fields: Any) -> InferRequest:
    tensors = [Tensor("A", "UINT8", [1, 3], b"abc"), Tensor("B", "BYTES", [1], pack_bytes([b"text"]))]
    return InferRequest("m", inputs=tensors, **fields)


def batch_of(*bodies: bytes, **fields: Any) -> Batch:
    entries = [BatchEntry("gateway-1", key, 5, body, **fields) for key, body in enumerate(bodies)]
    return Batch(BatchMessage("scheduler", 1, "m", 3, 0, entries))


def decoded(batch: Batch) -> tuple[list[int], list[InferRequest], list[str]]:
    statistics = ModelStatistics()
    memory = SharedMemoryIO(SharedMemoryAccess())
    positions, requests, results = decode_batch(batch, PayloadReader(), memory, statistics)
    return positions, requests, ["" if result is None else str(result.error) for result in results]


@pytest.mark.parametrize(("loss", "text"), [(Loss.NO_ADDRESS, "--payload-listen"), (Loss.UNREACHABLE, "cancelled")])
@pytest.mark.parametrize("is_body", [False, True])
def test_a_request_whose_content_was_not_fetched_fails_and_runs_again_where_that_helps(
    loss: Loss, text: str, is_body: bool
) -> None:
    ref = PayloadRef("weir-gateway-01234567-1.131072", 0, 1, 64, 4)
    body = pack_body_ref(ref) if is_body else pack_body(InferRequest("m", inputs=[Tensor("A", "UINT8", [1, 4], ref)]))
    batch = batch_of(body, pack_body(small()))
    batch.fetched = {ref: loss}
    positions, _, errors = decoded(batch)
    assert positions == [1]
    assert text in errors[0]


def test_plain_requests_are_decoded_as_any_other() -> None:
    requests = [
        small(),
        small(id="7", parameters={"a": 1}, outputs=[RequestedOutput("OUT")], timeout_us=5, priority=2),
        small(traceparent="00-1-2-01", tracestate="x=y", correlation_id=9, sequence_flags=1, wants_timestamps=True),
    ]
    bodies = [pack_body(request) for request in requests]
    assert unpack_plain(bodies, "m", 3) is not None
    positions, plain, errors = decoded(batch_of(*bodies))
    assert positions == [0, 1, 2]
    assert errors == ["", "", ""]
    assert [msgspec.to_builtins(request) for request in plain] == [
        msgspec.to_builtins(unpack_body(body, "m", 3)) for body in bodies
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"\x97not a body",
        b"",
        pack_body_ref(PayloadRef("weir-x", 0, 1, 64, 100)),
        pack_body(InferRequest("m", inputs=[Tensor("A", "UINT8", [1, 3], PayloadRef("weir-x", 0, 1, 64, 3))])),
    ],
    ids=["malformed", "empty", "reference", "reference in a tensor"],
)
def test_a_request_that_is_not_plain_fails_alone(body: bytes) -> None:
    good = pack_body(small())
    assert unpack_plain([good, body], "m", 3) is None
    positions, _, errors = decoded(batch_of(good, body, good))
    assert positions == [0, 2]
    assert errors[0] == errors[2] == ""
    assert errors[1]


def test_cancelled_and_late_requests_do_not_run() -> None:
    body = pack_body(small())
    batch = batch_of(body, body)
    batch.cancelled = frozenset((1,))
    assert decoded(batch)[0] == [0]
    positions, _, errors = decoded(batch_of(body, deadline_ms=1))
    assert positions == []
    assert "timeout" in errors[0]


def test_content_in_shared_memory_is_stale_once_it_was_released() -> None:
    def is_stale(data: bytes | PayloadRef) -> bool:
        return is_payload_stale(InferRequest("m", inputs=[Tensor("IN", "FP32", [1, 1], data)]), reader)

    reader = PayloadReader()
    arena = PayloadArena(new_id("test"), capacity_bytes=64 << 20)
    try:
        slot = arena.allocate(4)
        assert slot is not None
        assert not is_stale(slot.ref())
    finally:
        arena.close()
    assert is_stale(PayloadRef("weir-test-gone.131072", 0, 0, 64, 4))
    assert not is_stale(b"1234")
