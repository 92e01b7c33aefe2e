"""Spans of requests and rows of batches from what schedulers and gateways report."""

from __future__ import annotations

from weir.cluster.observation.store import ObservedStore
from weir.console.api.inference import _with_id
from weir.console.api.observed import spans_of, trace_details, trace_row
from weir.schemas.wire.observation import BatchedRequest, BatchReason, BatchReport, TraceReport

MS = 1_000_000


def trace(**times_ms: float) -> TraceReport:
    times = [(name, int(1000 * MS + at_ms * MS)) for name, at_ms in times_ms.items()]
    return TraceReport(gateway="g", key=7, model="net", version=2, protocol="http", times=times, scheduler="s", batch=3)


WHOLE = trace(
    HTTP_RECV_START=0,
    REQUEST_START=1,
    FRAME_SENT=2,
    BATCH_SENT=5,
    WORKER_RECEIVED=6,
    COMPUTE_START=7,
    COMPUTE_INPUT_END=8,
    COMPUTE_OUTPUT_START=10,
    COMPUTE_END=11,
    INFER_RESPONSE_COMPLETE=12,
    HTTP_SEND_END=13,
)


def test_spans_follow_each_other_without_gaps() -> None:
    spans = spans_of(WHOLE)
    assert [span["start_us"] for span in spans][1:] == [span["end_us"] for span in spans][:-1]
    assert (spans[0]["start_us"], spans[-1]["end_us"]) == (0, 13_000)
    assert next(span for span in spans if span["name"] == "queue") == {
        "name": "queue",
        "start_us": 2000,
        "end_us": 5000,
    }


def test_stages_that_were_not_passed_are_left_out() -> None:
    cached = trace(HTTP_RECV_START=0, REQUEST_START=1, INFER_RESPONSE_COMPLETE=2, HTTP_SEND_END=3)
    assert [span["name"] for span in spans_of(cached)] == ["read", "answer"]
    assert spans_of(trace()) == []
    # Clocks of two hosts may disagree: a span that would end before it begins is left out.
    assert "queue" not in [span["name"] for span in spans_of(trace(REQUEST_START=0, FRAME_SENT=5, BATCH_SENT=4))]


def test_a_request_without_an_id_is_found_by_its_caller_and_key() -> None:
    store = ObservedStore()
    requests = [BatchedRequest("g", key, "live", 1, 10) for key in (7, 8)]
    store.add(
        BatchReport(
            scheduler="s",
            id=3,
            model="net",
            version=2,
            worker="w",
            instance=0,
            sent_us=1,
            size=2,
            rows=2,
            reason=BatchReason.FULL,
            requests=requests,
        )
    )
    store.add(WHOLE)
    row = trace_row(WHOLE)
    assert (row["id"], row["duration_ms"], row["at_ms"]) == ("g/7", 13, 1000)
    observed = store.trace("g/7")
    assert observed is not None
    assert trace_details(observed)["batch"] == {"id": 3, "size": None, "with": ["g/8"]}


def test_a_request_gets_an_id_unless_it_has_one() -> None:
    own = _with_id(b'{"id": "mine", "inputs": []}', None)
    assert own is not None
    assert (own.id, own.body) == ("mine", b'{"id": "mine", "inputs": []}')
    given = _with_id(b'{"inputs": []}\x01\x02', 14)
    assert given is not None
    assert given.id.startswith("console-")
    assert given.header_length is not None
    assert given.body[given.header_length :] == b"\x01\x02"
    assert [_with_id(*wrong) for wrong in ((b"", None), (b"[]", None), (b"{", None), (b"{}", 9), (b"{}", -1))] == [
        None
    ] * 5
