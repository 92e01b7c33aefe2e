"""Messages of every kind as the release of 2026-11-23 sent them: they stay decodable, and are still sent as they were.

`recorded_messages.json` holds the bytes, in Base64. Processes of two releases exchange messages while a cluster is
updated, so a new release adds fields and records new messages, and never changes one of these.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from weir.calls.cache.stores import CachedOutput, CachedResponse
from weir.schemas.config.parameters import ModelNeeds, ResourceAmounts
from weir.schemas.core.errors import ErrorCode, Reason, WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import CudaRegionRef, PayloadRef, RegionRef, Tensor
from weir.schemas.kserve.regions import CudaOpened, CudaOpening, Region
from weir.schemas.wire.messages import (
    BatchCompletion,
    BatchEntry,
    BatchMessage,
    BatchOutcome,
    Cancellation,
    CancelledRequests,
    Completions,
    Frame,
    LostAttempts,
    QueueOwner,
    RequestEnvelope,
    RunningCancellation,
    SequencePosition,
    SlotRelease,
    join_responses,
    pack_end,
    pack_error,
    pack_response,
    pack_responses,
    unpack_completions,
    unpack_frame,
    unpack_responses,
)
from weir.schemas.wire.model_control import (
    DesiredModel,
    DrainMessage,
    PushedFile,
    PushedModel,
    ReadinessQuery,
    ReadinessReply,
    RepositoryView,
    WantedModel,
)
from weir.schemas.wire.registry import (
    Heartbeat,
    ModelOffer,
    ModelRecord,
    ModelState,
    RoleRecord,
    VersionRecord,
    WorkerRecord,
)
from weir.schemas.wire.request_body import body_ref, body_template, pack_body, pack_body_ref, unpack_body
from weir.schemas.wire.statistics import pack_counters, unpack_counters
from weir.schemas.wire.transfers import (
    ADDRESS_REQUEST,
    OwnerAddress,
    PayloadFetch,
    StatePiece,
    pack_pieces,
    pack_state,
    unpack_state,
)

RECORDED = {
    name: base64.b64decode(text)
    for name, text in json.loads(Path(__file__).with_name("recorded_messages.json").read_text()).items()
}

REF = PayloadRef("weir-a_1", 64, 3, 128, 10)
INLINE = Tensor("IN", "INT8", [1, 2], b"ab")
LARGE = Tensor("LARGE", "FP32", (4, 70000), REF)
TENSORS = [INLINE, LARGE, Tensor("EMPTY", "BYTES", [0], b"")]
IN_MEMORY = [
    Tensor("SYSTEM", "FP64", [2], RegionRef("region", 5, 0, 16)),
    Tensor("CUDA", "FP16", [8], CudaRegionRef(b"h" * 64, 1, 8, 16)),
]
ENVELOPES = [
    RequestEnvelope(7, -1, 2, "3,4", 1, 1000, 0, "sequence", 3, "00-trace", b"body"),
    RequestEnvelope(1 << 40, 3, 1, "", 0, 0, 1 << 41, 1 << 63, 0, "", b"x" * 300, 2, "host-1"),
]
POSITION = SequencePosition(3, 4, True, 5, 1)
ENTRIES = [BatchEntry("g", 1, 50, b"x"), BatchEntry("", 2, 0, b"y", 7, POSITION, 2)]
BATCH = BatchMessage("scheduler", 9, "m", 1, 0, ENTRIES, ["$JS.ACK.a"])
SERIES = BatchMessage("scheduler", 1 << 33, "m.n", 70000, 200, ENTRIES, [], True, 1700000000000, 63)
RESPONSES = [
    pack_response(1, TENSORS, {"b": True, "s": "text", "i": -5, "f": 0.5}),
    pack_response(2, [INLINE], None, is_final=False, timestamps={"QUEUE_START": 1 << 60}, run=("s.1", 4)),
    pack_response(3, [], None, is_final=True, timestamps={"QUEUE_START": 5}),
    pack_end(4),
    pack_end(5, run=("s.1", 5)),
    pack_error(6, WeirError(ErrorCode.NOT_FOUND, "gone")),
    pack_error(7, WeirError(ErrorCode.UNAVAILABLE, "later", 5), is_final=False),
    pack_error(8, WeirError(ErrorCode.UNAVAILABLE, "later", 5, 1000)),
    pack_error(9, WeirError(ErrorCode.UNAVAILABLE, "full", 1, 1000, Reason.QUEUE_FULL), run=("r", 0)),
]


def request(**changes: Any) -> InferRequest:
    made = InferRequest("m", "1", "id", [*TENSORS, *IN_MEMORY], [RequestedOutput("A"), RequestedOutput("B")], {"a": 1})
    made.outputs.append(RequestedOutput("C"))
    made.outputs[1].region = RegionRef("region", 5, 0, 16)
    made.outputs[2].region = CudaRegionRef(b"h" * 64, 1, 8, 16)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


VERSIONS = {
    1: VersionRecord(ModelState.READY, "", 2, 1.5, "load-digest", (7, 9), "", True),
    2: VersionRecord(ModelState.UNAVAILABLE, "broken"),
}
CONFIG = {"name": "m", "backend": "onnxruntime", "max_batch_size": 8}
MODEL = ModelRecord("m", VERSIONS, CONFIG, {"OUT": ["cat", "dog"]}, "", 1 << 60, 5, 4, 3, "why", "ns", True, "bad")
WORKER = WorkerRecord(
    "worker-1",
    77,
    True,
    True,
    1 << 60,
    ["GPU-1"],
    ResourceAmounts(1 << 34, {"R1": 2}),
    {"m": ModelOffer(ModelNeeds(ResourceAmounts(1 << 30, {"R1": 1}), 2), 6)},
    True,
    "explicit",
    ["/models: gone"],
)
ROLE = RoleRecord(
    role="scheduler",
    id="scheduler-1",
    host="abc",
    host_name="node-1",
    pid=5,
    version="0.1.0",
    since_ms=1700000000000,
    leaving=True,
    draining=True,
    urls=["http://127.0.0.1:8000"],
    durability="yes",
    queues=[("m", 0, 1700000000000)],
    keeps_models=True,
    loop_lag_s=0.25,
)
DESIRED = DesiredModel("m", 7, WantedModel(True, "{}", {"1/model.py": "m.7.0"}), WantedModel(True), False)
PUSHED = PushedModel("m", (PushedFile("1/model.onnx", 1 << 33, "0" * 64), PushedFile("config.pbtxt", 0, "f" * 64)))
STATISTICS_VERSION = {
    "model": "m",
    "version": 1,
    **{name: [1, 2] for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")},
    "inference_count": 3,
    "execution_count": 2,
    "last_inference_ms": 5,
    "failures": {"BACKEND": 1},
    "batches": {4: [1, 2, 3, 4]},
    "responses": {0: {"success": [1, 2]}},
    "memory_usage": [["GPU", 0, 100]],
    "first_response_ms": {"bounds": [1.0], "counts": [1, 0], "sum": 0.5},
    "summaries": {"queue": {"count": 1, "sum_us": 2, "bins": {-1: 1}}},
}
STATISTICS = {
    "worker": {
        "worker": "w",
        "born_ns": 5,
        "models": [STATISTICS_VERSION],
        "gpus": {"GPU-0": {"utilization": 0.5, "memory_used_bytes": 7}},
        "host": {"host": "h", "utilization": 0.5, "memory_total_bytes": 2, "memory_used_bytes": 1},
        "families": [
            {
                "name": "f",
                "description": "d",
                "kind": "histogram",
                "series": [
                    {"labels": {"a": "b"}, "value": 2, "bounds": [1.0], "counts": [1, 1], "versions": [["m", 1]]}
                ],
            }
        ],
    },
    "gateway": {"gateway": "g", "models": [STATISTICS_VERSION], "leaving": True},
    "scheduler": {
        "scheduler": "s",
        "models": [
            {
                "model": "m",
                "lanes": {"live": {"depth": 1, "oldest_us": 2}},
                "versions": [{"version": 1, "pending": 1, "failures": {"REJECTED": 2}}],
                "load": {"instances": 1, "utilization": 0.5, "desired_workers": 1.5, "refused": {"QUEUE_FULL": 1}},
            }
        ],
        "health": {"loop_lag_s": 0.5, "contained_failures": {"a": 1}},
    },
}
COMPLETIONS = [BatchCompletion(1, 0, 250, []), BatchCompletion(2, BatchOutcome.HANDED_BACK, 0, [3, 400])]
CANCELLED = [CancelledRequests(5, "gateway-a", [1, 2]), CancelledRequests(6, "g", [])]
OWNER = QueueOwner("m", 3, "scheduler-1", 1700000000000)
VIEW = RepositoryView("w", {"m": "", "n": "why"})
HEARTBEAT = Heartbeat("w", {"s-1": [1, 2], "s-2": []})
ADDRESS = OwnerAddress("10.0.0.1", 4000, b"secret", b"certificate")
REGION = Region("system", "r", 1 << 40, "/key", 16, "key", 77)
CUDA_REGION = Region("cuda", "r", 256, device_id=1, handle=b"h" * 64)
CACHED = CachedResponse(3, (CachedOutput("OUT", "FP32", (1, 2), b"12345678"),), {"a": 1})

PACKED: dict[str, Callable[[], bytes]] = {
    "frame": lambda: Frame("gateway-1", ENVELOPES).pack(),
    "batch": lambda: BATCH.pack(),
    "series": lambda: SERIES.pack(),
    "batch_rows": lambda: BatchMessage("scheduler", 9, "m", 1, 0, ENTRIES, ["$JS.ACK.a"], False, 5, 1).pack(),
    "responses": lambda: pack_responses(3, RESPONSES),
    "joined_responses": lambda: join_responses(3, [pack_responses(3, [row]) for row in RESPONSES[:2]]),
    "completions": lambda: Completions("worker", COMPLETIONS).pack(),
    "cancel": lambda: Cancellation("gateway", [1, 1 << 40], 3).pack(),
    "release": lambda: SlotRelease([("weir-a_1", 64, 3)]).pack(),
    "cancelled_requests": lambda: RunningCancellation("scheduler", CANCELLED).pack(),
    "lost_attempts": lambda: LostAttempts([1, 2], "its process died").pack(),
    "body": lambda: pack_body(request()),
    "body_of_sequence": lambda: pack_body(request(correlation_id=5, sequence_flags=3, timeout_us=9)),
    "body_traced": lambda: pack_body(request(correlation_id="five", traceparent="00-a")),
    "body_tracestate": lambda: pack_body(request(traceparent="00-a", tracestate="b")),
    "body_timed": lambda: pack_body(request(wants_timestamps=True)),
    "body_with_priority": lambda: pack_body(
        request(traceparent="00-a", tracestate="b", wants_timestamps=True, priority=7)
    ),
    "body_reference": lambda: pack_body_ref(REF),
    "queue_owner": lambda: OWNER.pack(),
    "desired": lambda: DESIRED.pack(),
    "desired_unload": lambda: DesiredModel("m", 8, WantedModel(False)).pack(),
    "drain": lambda: DrainMessage.of("w", "m", {2, 1}).pack(),
    "drain_partition": lambda: DrainMessage.of("w", "m", {2}, 5).pack(),
    "readiness_query": lambda: ReadinessQuery("m", 3).pack(),
    "readiness": lambda: ReadinessReply(True).pack(),
    "repository_view": lambda: VIEW.pack(),
    "pushed": lambda: PUSHED.pack(),
    "role": lambda: ROLE.pack(),
    "model_record": lambda: MODEL.pack(),
    "empty_model_record": lambda: ModelRecord("m").pack(),
    "worker_record": lambda: WORKER.pack(),
    "new_worker_record": lambda: WorkerRecord("w", 1).pack(),
    "heartbeat": lambda: HEARTBEAT.pack(),
    "fetch": lambda: PayloadFetch(REF).pack(),
    "address_request": lambda: ADDRESS_REQUEST,
    "address": lambda: ADDRESS.pack(),
    "state": lambda: pack_state([INLINE, Tensor("B", "BYTES", (1,), b"\1\0\0\0x")]),
    "state_piece": lambda: pack_pieces(4, b"state", 3)[1],
    "region": lambda: REGION.pack(),
    "cuda_region": lambda: CUDA_REGION.pack(),
    "cuda_opening": lambda: CudaOpening(b"h" * 64, 1, 256).pack(),
    "cuda_opened": lambda: CudaOpened("w", "why").pack(),
    "worker_statistics": lambda: pack_counters(STATISTICS["worker"]),
    "gateway_statistics": lambda: pack_counters(STATISTICS["gateway"]),
    "scheduler_statistics": lambda: pack_counters(STATISTICS["scheduler"]),
    "cached_response": lambda: CACHED.pack(),
}

MORE_FIELDS = {"drain": 1, "pushed": 1, "batch": 3, "batch_rows": 3, "series": 3, "state_piece": 2}
"""Messages that now end with so many more fields, which every reader has always ignored."""

_ADDED_TO_WORKERS = {"never_read": [], "outdated": [], "pid_namespace": 0, "started_ticks": 0, "link": ""}
ADDED_TO_RECORDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("worker_record", "new_worker_record"), _ADDED_TO_WORKERS),
    **{key: {"completed": []} for key in ("model_record", "empty_model_record")},
    "role": {"stalled": []},
}
"""Fields of records that have been added since, with their defaults: older releases ignore them."""

REQUEST_BODIES = [name for name in RECORDED if name.startswith("body") and name != "body_reference"]

UNPACKED: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "frame": (unpack_frame, ("gateway-1", ENVELOPES)),
    "batch": (BatchMessage.unpack, BATCH),
    "series": (BatchMessage.unpack, SERIES),
    "completions": (unpack_completions, (COMPLETIONS, ())),
    "cancel": (Cancellation.unpack, Cancellation("gateway", [1, 1 << 40], 3)),
    "release": (SlotRelease.unpack, SlotRelease([("weir-a_1", 64, 3)])),
    "cancelled_requests": (RunningCancellation.unpack, RunningCancellation("scheduler", CANCELLED)),
    "lost_attempts": (LostAttempts.unpack, LostAttempts([1, 2], "its process died")),
    "body_reference": (body_ref, REF),
    "queue_owner": (QueueOwner.unpack, OWNER),
    "desired": (DesiredModel.unpack, DESIRED),
    "desired_unload": (DesiredModel.unpack, DesiredModel("m", 8, WantedModel(False))),
    "drain": (DrainMessage.unpack, DrainMessage("w", "m", [1, 2])),
    "drain_partition": (DrainMessage.unpack, DrainMessage("w", "m", [2], 5)),
    "readiness_query": (ReadinessQuery.unpack, ReadinessQuery("m", 3)),
    "readiness": (ReadinessReply.unpack, ReadinessReply(True)),
    "repository_view": (RepositoryView.unpack, VIEW),
    "pushed": (PushedModel.unpack, PUSHED),
    "role": (RoleRecord.unpack, ROLE),
    "model_record": (ModelRecord.unpack, MODEL),
    "empty_model_record": (ModelRecord.unpack, ModelRecord("m")),
    "worker_record": (WorkerRecord.unpack, WORKER),
    "new_worker_record": (WorkerRecord.unpack, WorkerRecord("w", 1)),
    "heartbeat": (Heartbeat.unpack, HEARTBEAT),
    "fetch": (PayloadFetch.unpack, PayloadFetch(REF)),
    "address": (OwnerAddress.unpack, ADDRESS),
    "state_piece": (StatePiece.unpack, StatePiece(4, 2, b"te")),
    "region": (Region.unpack, REGION),
    "cuda_region": (Region.unpack, CUDA_REGION),
    "cuda_opening": (CudaOpening.unpack, CudaOpening(b"h" * 64, 1, 256)),
    "cuda_opened": (CudaOpened.unpack, CudaOpened("w", "why")),
    "cached_response": (CachedResponse.unpack, CACHED),
}


def row(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.name, tensor.datatype, list(tensor.shape), tensor.data


@pytest.mark.parametrize("name", RECORDED)
def test_messages_are_sent_as_they_were(name: str) -> None:
    sent = PACKED[name]()
    if name in MORE_FIELDS:
        assert msgpack.unpackb(sent)[: -MORE_FIELDS[name]] == msgpack.unpackb(RECORDED[name])
    elif name in ADDED_TO_RECORDS:
        version, fields = msgpack.unpackb(RECORDED[name], strict_map_key=False)
        assert msgpack.unpackb(sent, strict_map_key=False) == [version, {**fields, **ADDED_TO_RECORDS[name]}]
    else:
        assert sent == RECORDED[name]


@pytest.mark.parametrize("name", UNPACKED)
def test_recorded_messages_are_decoded(name: str) -> None:
    unpack, expected = UNPACKED[name]
    assert unpack(RECORDED[name]) == expected


@pytest.mark.parametrize("name", REQUEST_BODIES)
def test_recorded_bodies_are_decoded(name: str) -> None:
    decoded = unpack_body(RECORDED[name], "m", 1)
    assert (decoded.id, decoded.parameters) == ("id", {"a": 1})
    assert list(map(row, decoded.inputs)) == list(map(row, request().inputs))
    assert [type(tensor.data) for tensor in decoded.inputs] == [bytes, PayloadRef, bytes, RegionRef, CudaRegionRef]
    assert [(output.name, output.region) for output in decoded.outputs] == [
        (output.name, output.region) for output in request().outputs
    ]


def test_the_last_fields_of_bodies() -> None:
    bodies = {name: unpack_body(RECORDED[name], "m", 1) for name in REQUEST_BODIES}
    sequence, traced, full = bodies["body_of_sequence"], bodies["body_traced"], bodies["body_with_priority"]
    assert (sequence.correlation_id, sequence.sequence_flags, sequence.timeout_us) == (5, 3, 9)
    assert (traced.correlation_id, traced.traceparent, traced.tracestate) == ("five", "00-a", "")
    assert traced.wants_timestamps
    assert bodies["body_timed"].wants_timestamps
    assert not bodies["body"].wants_timestamps
    assert (full.tracestate, full.priority) == ("b", 7)


def test_a_template_makes_the_recorded_body() -> None:
    made = InferRequest("m", "1", "id", [INLINE], [RequestedOutput("A")], {"a": 1})
    before, after = body_template(made)
    assert before + b"ab" + after == pack_body(made)


def test_recorded_responses_are_decoded() -> None:
    version, responses = unpack_responses(RECORDED["responses"])
    assert version == 3
    assert [response.key for response in responses] == list(range(1, 10))
    assert list(map(row, responses[0].outputs or [])) == list(map(row, TENSORS))
    assert responses[0].parameters == {"b": True, "s": "text", "i": -5, "f": 0.5}
    assert [response.is_final for response in responses] == [True, False, True, True, True, True, False, True, True]
    assert [response.timestamps for response in responses[1:3]] == [{"QUEUE_START": 1 << 60}, {"QUEUE_START": 5}]
    assert [(response.run, response.number) for response in responses if response.run] == [
        ("s.1", 4),
        ("s.1", 5),
        ("r", 0),
    ]
    assert [response.outputs for response in responses[3:5]] == [None, None]
    errors = [response.error for response in responses if response.error is not None]
    assert [(e.code, e.message, e.retry_after_s, e.backoff_us, e.reason) for e in errors] == [
        (ErrorCode.NOT_FOUND, "gone", 0, 0, Reason.NONE),
        (ErrorCode.UNAVAILABLE, "later", 5, 0, Reason.NONE),
        (ErrorCode.UNAVAILABLE, "later", 5, 1000, Reason.NONE),
        (ErrorCode.UNAVAILABLE, "full", 1, 1000, Reason.QUEUE_FULL),
    ]
    joined = unpack_responses(RECORDED["joined_responses"])[1]
    assert [response.key for response in joined] == [1, 2]


def test_recorded_states_are_decoded() -> None:
    assert list(map(row, unpack_state(RECORDED["state"]))) == [
        ("IN", "INT8", [1, 2], b"ab"),
        ("B", "BYTES", [1], b"\1\0\0\0x"),
    ]


@pytest.mark.parametrize("role", ["worker", "gateway", "scheduler"])
def test_recorded_statistics_are_decoded(role: str) -> None:
    counters = unpack_counters(RECORDED[f"{role}_statistics"])
    assert type(counters).__name__ == f"{role.capitalize()}Counters"
    assert counters.models[0].model == "m"
