"""Traces in Triton's files: when each is written, and that it is valid JSON."""

import json
from pathlib import Path

import numpy as np
import pytest

from weir.schemas.core.tensors import Tensor, pack_bytes
from weir.telemetry.tracing import file as trace_file
from weir.telemetry.tracing.file import TraceBuffer, TraceFile
from weir.telemetry.tracing.trace import WORKER_RECEIVED, Trace


def trace(id: int, request_id: str = "") -> Trace:
    made = Trace(id, "m", request_id)
    made.model_version = 2
    made.mark("HTTP_RECV_START", 1)
    made.mark("REQUEST_START")
    made.add_worker_timestamps(
        {"QUEUE_START": 5, WORKER_RECEIVED: 6, "COMPUTE_START": 7, "FORGED": 8, "COMPUTE_END": 2**64}
    )
    return made


def ids(path: Path) -> list[int]:
    return [record["id"] for record in json.loads(path.read_text()) if "model_name" in record]


def test_a_log_frequency_makes_numbered_files(tmp_path: Path) -> None:
    buffer = TraceBuffer(TraceFile(str(tmp_path / "t")), 2)
    for id in range(1, 6):
        buffer.add(trace(id))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.0", "t.1"]
    buffer.flush()
    assert [ids(tmp_path / f"t.{number}") for number in range(3)] == [[1, 2], [3, 4], [5]]


def test_without_a_log_frequency_all_traces_are_in_one_file(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "t"))
    buffer, other = TraceBuffer(file, 0), TraceBuffer(file, 0)
    buffer.add(trace(1))
    buffer.add(trace(2))
    assert not list(tmp_path.iterdir())
    buffer.flush()
    other.add(trace(3))
    other.flush()
    file.close()
    file.close()
    assert ids(tmp_path / "t") == [1, 2, 3]


def test_waiting_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_UNWRITTEN_BYTES", 1000)
    file = TraceFile(str(tmp_path / "t"))
    buffer = TraceBuffer(file, 0)
    for id in range(20):
        buffer.add(trace(id))
    assert (tmp_path / "t").stat().st_size > 2000
    buffer.flush()
    file.close()
    assert ids(tmp_path / "t") == list(range(20))


def test_an_unwritable_file_loses_only_its_traces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = TraceBuffer(TraceFile(str(tmp_path / "none" / "t")), 1)
    buffer.add(trace(1))
    assert "failed to write traces" in caplog.text


def test_a_trace_has_a_header_timestamps_and_tensors(tmp_path: Path) -> None:
    made = trace(1, 'my "id"')
    tensors = [
        Tensor.from_numpy("F", np.array([[1, 2.5, -4]], np.float32), "FP32"),
        Tensor("B", "BYTES", [2], pack_bytes([b'a,"', b"\xff\n"])),
        Tensor("H", "BF16", [1], np.array([0x3FC0], np.uint16).tobytes()),
        Tensor("L", "BOOL", [2], b"\1\0"),
        Tensor("broken", "INT64", [1], b"123"),
    ]
    made.add_tensors("TENSOR_QUEUE_INPUT", tensors)
    TraceBuffer(TraceFile(str(tmp_path / "t")), 1).add(made)
    records = json.loads((tmp_path / "t.0").read_text())
    assert [next(iter(r["timestamps"]))["name"] for r in records if "timestamps" in r] == [
        "HTTP_RECV_START",
        "REQUEST_START",
        "QUEUE_START",
        "COMPUTE_START",
    ]
    assert records[1] == {"id": 1, "model_name": "m", "model_version": 2, "request_id": 'my "id"'}
    reported = {r["tensor"]["name"]: r["tensor"] for r in records if "tensor" in r}
    assert reported["F"] == {"name": "F", "data": "1,2.5,-4", "shape": "1,3", "dtype": "FP32"}
    assert reported["B"]["data"] == '"a,"","\ufffd\n"'
    assert [reported[name]["data"] for name in ("H", "L", "broken")] == ["1.5", "1,0", ""]
