"""Which requests a gateway traces as its settings change, and where the traces go."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from weir.calls.tracing import Tracing
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.telemetry.tracing.settings import TraceConfig

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Asking:
    def __init__(self, model: str = "m", traceparent: str = "") -> None:
        self.request = InferRequest(model, id="mine")
        self.request.inputs = [Tensor.from_numpy("IN", np.array([1, 2], np.int32), "INT32")]
        self.request.traceparent, self.request.tracestate = traceparent, "a=b"
        self.key = 7
        self.answers: list[tuple[Any, bool]] = []

    def on_response(self, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        self.answers.append((outcome, is_final))


def traced(tracing: Tracing, asking: Asking, outcome: InferResponse | WeirError | None = None) -> bool:
    trace = tracing.start(asking.request, asking.request.model_name)
    if trace is not None:
        tracing.deliver(trace, asking, outcome, True, {"COMPUTE_START": 5})
        assert asking.answers == [(outcome, True)]
    return trace is not None


def make(folder: Path, *values: str) -> Tracing:
    return Tracing(TraceConfig.parse([f"triton,file={folder / 't'}", *values]))


def records(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))


def test_without_tracing_the_trace_context_of_the_caller_is_dropped() -> None:
    tracing, asking = Tracing(), Asking(traceparent=CALLER)
    assert not tracing.is_on
    assert not traced(tracing, asking)
    assert (asking.request.traceparent, asking.request.tracestate) == ("", "")


def test_without_a_file_no_request_is_traced() -> None:
    assert not Tracing(TraceConfig.parse(["level=TIMESTAMPS", "rate=1"])).is_on


def test_models_with_their_own_setting_have_their_own_counts(tmp_path: Path) -> None:
    tracing = make(tmp_path, "level=TIMESTAMPS", "rate=2")
    tracing.replace("own", {"trace_rate": 1, "trace_count": 1})
    assert [traced(tracing, Asking(model)) for model in ("a", "own", "b", "a", "own")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert (tracing.to_dict("own")["trace_count"], tracing.to_dict("a")["trace_count"]) == ("0", "-1")
    tracing.replace("own", {})
    assert traced(tracing, Asking("own"))  # the global setting's turn again


def test_a_change_of_the_global_setting_keeps_own_values(tmp_path: Path) -> None:
    tracing = make(tmp_path, "level=TIMESTAMPS", "rate=2")
    tracing.replace("own", {"trace_level": ["TIMESTAMPS"], "trace_rate": 2, "trace_count": 5, "log_frequency": 0})
    assert not traced(tracing, Asking("own"))
    tracing.replace("", {"trace_level": [], "trace_rate": 9})
    assert tracing.is_on
    assert traced(tracing, Asking("own"))
    tracing.replace("own", {})
    assert not tracing.is_on


def test_the_last_trace_of_a_count_writes_the_file(tmp_path: Path) -> None:
    tracing = make(tmp_path, "level=TIMESTAMPS", "rate=1", "count=2", "triton,log-frequency=50")
    traced(tracing, Asking())
    assert not list(tmp_path.iterdir())
    traced(tracing, Asking(), internal("it failed"))
    assert [r["request_id"] for r in records(tmp_path / "t.0") if "model_name" in r] == ["mine", "mine"]


async def test_stop_writes_the_remaining_traces(tmp_path: Path) -> None:
    tracing = make(tmp_path, "level=TIMESTAMPS", "level=TENSORS", "rate=1")
    outputs = [Tensor.from_numpy("OUT", np.array([3.0], np.float64), "FP64")]
    traced(tracing, Asking(), InferResponse("m", "7", outputs=outputs))
    await tracing.stop()
    found = records(tmp_path / "t")
    assert next(r for r in found if "model_name" in r)["model_version"] == 7
    assert [(r["activity"], r["tensor"]["data"]) for r in found if "tensor" in r] == [
        ("TENSOR_QUEUE_INPUT", "1,2"),
        ("TENSOR_BACKEND_OUTPUT", "3"),
    ]
    assert not tracing.is_on


def test_mode_triton_ignores_the_trace_context_of_the_caller(tmp_path: Path) -> None:
    tracing, asking = make(tmp_path, "level=TIMESTAMPS", "rate=0"), Asking(traceparent=CALLER)
    assert not traced(tracing, asking)
    tracing.replace("", {"trace_rate": 1})
    assert traced(tracing, asking)
    assert asking.request.traceparent.endswith("-00")
    assert asking.request.traceparent[:35] != CALLER[:35]


def test_cancelled_requests_are_traced(tmp_path: Path) -> None:
    tracing = make(tmp_path, "level=TIMESTAMPS", "rate=1", "triton,log-frequency=1")
    trace = tracing.start(Asking().request, "m")
    assert trace is not None
    tracing.cancel(trace)
    assert [r["timestamps"][0]["name"] for r in records(tmp_path / "t.0") if "timestamps" in r] == [
        "REQUEST_START",
        "REQUEST_END",
    ]
