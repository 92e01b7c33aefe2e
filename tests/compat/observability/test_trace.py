"""Triton's trace extension: settings by stock clients, trace files, and spans at a collector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import config_text, write_identity, write_model
from tests.support.servers.trace_collector import Collector
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

CONTEXT_MODEL = """
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        told = [np.array([[str(request.trace().get_context())]], np.object_) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("CONTEXT", context)]) for context in told]
"""

DEFAULTS = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1"}
CLEAR = {"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None}
ONE = {"IN": np.array([[1.5, -4]], np.float32)}

HTTP_TRACE = [
    "HTTP_RECV_START",
    "HTTP_RECV_END",
    "REQUEST_START",
    "QUEUE_START",
    "INFER_RESPONSE_COMPLETE",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
    "HTTP_SEND_START",
    "HTTP_SEND_END",
]
"""The timestamps that Triton 2.51 wrote of one request over HTTP; over gRPC, those of its door in their place."""
GRPC_TRACE = [name.replace("HTTP_RECV", "GRPC_WAITREAD").replace("HTTP_", "GRPC_") for name in HTTP_TRACE]


def write_models(root: Path) -> None:
    write_identity(root, "identity", "FP32", "dynamic_batching { }")
    write_identity(root, "other", "FP32")
    folder = write_model(
        root, "context", config_text("context", "python", {"IN": ("FP32", [-1])}, {"CONTEXT": ("BYTES", [1])}, 4)
    )
    (folder / "1" / "model.py").write_text(CONTEXT_MODEL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("trace")
    write_models(folder / "models")
    with Server(folder, folder / "models", f"--trace-config=triton,file={folder / 'traces'}") as started:
        yield started


@pytest.fixture(autouse=True)
def settings_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        for path in ("/v2/trace/setting", "/v2/models/identity/trace/setting"):
            assert post(request.getfixturevalue("server"), path, CLEAR).status_code == 200


@pytest.fixture
def frequent(server: Server) -> Path:
    """Where the next trace will be, in a file of its own, of which there are as many as numbers before it."""
    post(server, "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"})
    numbers = [int(path.suffix[1:]) for path in server.folder.glob("traces.*") if path.suffix != ".part"]
    return server.folder / f"traces.{max(numbers, default=-1) + 1}"


def post(server: Server, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.post(f"http://{server.http_place}{path}", content=content)


def reply(server: Server, **changed: Any) -> dict[str, Any]:
    rest = {"log_frequency": "0", "trace_file": str(server.folder / "traces"), "trace_mode": "triton"}
    return {**DEFAULTS, **rest, **changed}


def records(path: Path) -> list[dict[str, Any]]:
    wait_until(path.exists)
    return list(json.loads(path.read_text()))


def stamps(found: list[dict[str, Any]]) -> dict[str, int]:
    return {stamp["name"]: stamp["ns"] for record in found for stamp in record.get("timestamps", ())}


# Settings


def test_http_settings_with_the_stock_client(server: Server) -> None:
    with server.http() as client:
        assert client.get_trace_settings() == client.get_trace_settings("identity") == reply(server)
        asked = {"trace_level": ["TENSORS", "TIMESTAMPS"], "trace_rate": "7"}
        changed = reply(server, trace_level=["TIMESTAMPS", "TENSORS"], trace_rate="7")
        assert client.update_trace_settings("identity", asked) == changed
        assert client.get_trace_settings("identity") == changed
        assert client.get_trace_settings() == client.get_trace_settings("other") == reply(server)
        assert client.update_trace_settings(settings={"trace_rate": "9", "trace_count": "5"})["trace_rate"] == "9"
        assert client.get_trace_settings("identity") == {**changed, "trace_count": "5"}
        assert client.update_trace_settings("identity", {"trace_rate": None})["trace_rate"] == "9"
        with pytest.raises(InferenceServerException, match="trace file location can not be updated"):
            client.update_trace_settings(settings={"trace_file": "elsewhere"})
        assert "trace" in client.get_server_metadata()["extensions"]


def test_grpc_settings_with_the_stock_client(server: Server) -> None:
    def told_over_grpc(answer: Any) -> dict[str, Any]:
        values = {name: setting["value"] for name, setting in answer["settings"].items()}
        return {name: value if name == "trace_level" else value[0] for name, value in values.items()}

    with server.grpc() as client:
        # An empty text is an empty list in this form, which is why the file is named here.
        assert told_over_grpc(client.get_trace_settings(as_json=True)) == reply(server)
        asked = {"trace_level": ["TIMESTAMPS"], "trace_count": "4", "log_frequency": "2"}
        changed = reply(server, trace_level=["TIMESTAMPS"], trace_count="4", log_frequency="2")
        assert told_over_grpc(client.update_trace_settings("identity", asked, as_json=True)) == changed
        assert told_over_grpc(client.get_trace_settings("identity", as_json=True)) == changed
        cleared = client.update_trace_settings("identity", dict.fromkeys(asked), as_json=True)
        assert told_over_grpc(cleared) == reply(server)
        with pytest.raises(InferenceServerException) as caught:
            client.update_trace_settings(settings={"trace_rate": ["1", "2"]})
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert caught.value.message() == "expect only 1 value for 'trace_rate'"
        with pytest.raises(InferenceServerException) as caught:
            client.get_trace_settings("unknown")
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert caught.value.message() == "Request for unknown model : unknown"


async def test_settings_with_the_aio_clients(server: Server) -> None:
    async with tritonclient.http.aio.InferenceServerClient(server.http_place) as http:
        assert (await http.update_trace_settings("identity", {"trace_rate": "3"}))["trace_rate"] == "3"
        assert (await http.get_trace_settings())["trace_rate"] == "1000"
    async with tritonclient.grpc.aio.InferenceServerClient(server.grpc_place) as grpc:
        settings = (await grpc.get_trace_settings("identity")).settings
        assert list(settings["trace_rate"].value) == ["3"]
        settings = (await grpc.update_trace_settings("identity", {"trace_rate": None})).settings
        assert list(settings["trace_rate"].value) == ["1000"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/v2/models/identity/versions/1/trace/setting", "", 404, "Not Found"),
        ("PUT", "/v2/trace/setting", "{}", 405, "Method Not Allowed"),
        ("GET", "/v2/models/unknown/trace/setting", "", 400, "Request for unknown model : unknown"),
        ("POST", "/v2/models/unknown/trace/setting", "{", 400, "Request for unknown model : unknown"),
        ("POST", "/v2/trace/setting", "", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("POST", "/v2/trace/setting", '{"trace_rate": 1}', 500, "attempt to access JSON non-string as string"),
        ("POST", "/v2/trace/setting", '{"trace_rate": "a"}', 400, "Unable to parse 'trace_rate', got: a"),
        (
            "POST",
            "/v2/trace/setting",
            '{"trace_file": null}',
            501,
            "trace file location can not be updated through network protocol",
        ),
    ],
)
def test_refusals(server: Server, method: str, path: str, body: str, status: int, message: str) -> None:
    answer = httpx.request(method, f"http://{server.http_place}{path}", content=body)
    assert (answer.status_code, answer.json()) == (status, {"error": message})


def test_unknown_keys_and_what_is_no_object_are_ignored(server: Server) -> None:
    for body in ({"unknown": 1}, [], 3, {"trace_level": ["FOO"]}):
        answer = post(server, "/v2/trace/setting", body)
        assert (answer.status_code, answer.json()) == (200, reply(server))


# Files


@pytest.mark.parametrize("via", ["http", "grpc"])
def test_a_request_s_file_has_the_shape_of_tritons(server: Server, frequent: Path, via: str) -> None:
    if via == "http":
        with server.http() as http:
            http.infer("identity", http_inputs(ONE), request_id="mine")
    else:
        with server.grpc() as grpc:
            grpc.infer("identity", grpc_inputs(ONE), request_id="mine")
    found = records(frequent)
    headers = [record for record in found if "model_name" in record]
    id = headers[0]["id"]
    assert headers == [{"id": id, "model_name": "identity", "model_version": 1, "request_id": "mine"}]
    assert all(record["id"] == id and len(record.get("timestamps", [1])) == 1 for record in found)
    times = stamps(found)
    expected = HTTP_TRACE if via == "http" else GRPC_TRACE
    assert sorted(times) == sorted(expected)
    assert len(found) == len(expected) + 1
    order = sorted(times, key=times.__getitem__)
    for names in (expected[:4], HTTP_TRACE[5:9], expected[9:]):
        assert [name for name in order if name in names] == names
    assert times["QUEUE_START"] <= times["COMPUTE_START"] < times["COMPUTE_END"] <= times["INFER_RESPONSE_COMPLETE"]


def test_tensors_are_written_where_they_are_asked_for(server: Server, frequent: Path) -> None:
    post(server, "/v2/models/identity/trace/setting", {"trace_level": ["TIMESTAMPS", "TENSORS"]})
    with server.http() as client:
        client.infer("identity", http_inputs(ONE))
    tensor = {"data": "1.5,-4", "shape": "1,2", "dtype": "FP32"}
    assert [(r["activity"], r["tensor"]) for r in records(frequent) if "activity" in r] == [
        ("TENSOR_QUEUE_INPUT", {"name": "IN", **tensor}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUT", **tensor}),
    ]


def test_every_so_many_th_request_is_traced_also_on_the_prepared_way(server: Server, frequent: Path) -> None:
    # Requests without an id come the prepared way from the second on; one that is traced does not, and is answered alike.
    post(server, "/v2/trace/setting", {"trace_rate": "3", "trace_count": "2", "log_frequency": "2"})
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with server.http() as http, server.grpc() as grpc:
        for number in range(5):
            arrays = {"IN": np.array([[number, -number]], np.float32)}
            for answer in (
                http.infer("identity", http_inputs(arrays), headers=dict(headers)),
                grpc.infer("identity", grpc_inputs(arrays), headers=headers),
            ):
                assert np.array_equal(answer.as_numpy("OUT"), arrays["IN"])
        assert http.get_trace_settings()["trace_count"] == "0"
    assert sum("model_name" in record for record in records(frequent)) == 2


def test_a_python_model_has_no_context_where_nothing_is_exported(server: Server, frequent: Path) -> None:
    with server.http() as client:
        assert client.infer("context", http_inputs(ONE)).as_numpy("CONTEXT").tolist() == [[b"None"]]
    assert records(frequent)


def test_without_a_frequency_the_file_is_written_at_the_end(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    options = (
        f"--trace-config=triton,file={tmp_path / 'all'}",
        "--trace-config=rate=1",
        "--trace-config=level=TIMESTAMPS",
    )
    with Server(tmp_path, tmp_path / "models", *options) as started:
        with started.http() as client:
            for id in ("a", "b"):
                client.infer("identity", http_inputs(ONE), request_id=id)
        assert not (tmp_path / "all").exists()
    assert [record["request_id"] for record in records(tmp_path / "all") if "model_name" in record] == ["a", "b"]


# Spans


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    listening = Collector()
    yield listening
    listening.close()


@pytest.fixture(scope="module")
def exporting(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("spans")
    write_models(folder / "models")
    options = {
        "mode": "opentelemetry",
        "level": "TIMESTAMPS",
        "rate": "0",
        "opentelemetry,url": collector.url,
        "opentelemetry,resource": "deployment=test",
        "opentelemetry,bsp_schedule_delay": "100",
    }
    values = (f"--trace-config={name}={value}" for name, value in options.items())
    with Server(folder, folder / "models", *values) as started:
        yield started


def infer_as_part_of(server: Server, via: str, model: str, trace_id: str, request_id: str = "") -> Any:
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "tracestate": "vendor=value"}
    if via == "http":
        with server.http() as http:
            return http.infer(model, http_inputs(ONE), headers=headers, request_id=request_id)
    with server.grpc() as grpc:
        return grpc.infer(model, grpc_inputs(ONE), headers=headers, request_id=request_id)


@pytest.mark.parametrize("via", ["http", "grpc"])
def test_a_caller_s_trace_goes_on_through_every_role(exporting: Server, collector: Collector, via: str) -> None:
    trace_id = os.urandom(16).hex()
    infer_as_part_of(exporting, via, "identity", trace_id, "mine")
    spans = collector.trace(trace_id)
    assert spans.keys() == {"InferRequest", "identity", "scheduler", "worker", "compute"}
    root, model = spans["InferRequest"], spans["identity"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert model.parent_span_id == root.span_id
    assert {spans[name].parent_span_id for name in ("scheduler", "worker", "compute")} == {model.span_id}
    assert {span.trace_state for span in spans.values()} == {"vendor=value"}
    attributes = {a.key: a.value.string_value or a.value.int_value for a in model.attributes}
    assert attributes.pop("triton.trace_id") > 0
    assert attributes == {
        "triton.model_name": "identity",
        "triton.model_version": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "mine",
    }
    door = [e.name for e in root.events]
    expected = HTTP_TRACE if via == "http" else GRPC_TRACE
    assert door == [*expected[:2], "INFER_RESPONSE_COMPLETE", *expected[-2:]]
    assert [e.name for e in model.events] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [e.name for e in spans["compute"].events] == HTTP_TRACE[5:9]
    for span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert spans["scheduler"].end_time_unix_nano <= spans["worker"].start_time_unix_nano
    assert collector.resources[-1]["service.name"] == "triton-inference-server"
    assert collector.resources[-1]["deployment"] == "test"


@pytest.mark.parametrize("via", ["http", "grpc"])
def test_a_python_model_is_told_its_place_in_the_trace(exporting: Server, collector: Collector, via: str) -> None:
    trace_id = os.urandom(16).hex()
    (told_context,) = infer_as_part_of(exporting, via, "context", trace_id).as_numpy("CONTEXT").ravel()
    context = json.loads(told_context)
    model = collector.trace(trace_id)["context"]
    assert context == {"traceparent": f"00-{trace_id}-{model.span_id.hex()}-01", "tracestate": "vendor=value"}


def test_with_rate_0_only_callers_trace(exporting: Server, collector: Collector) -> None:
    with exporting.http() as client:
        client.infer("identity", http_inputs(ONE))
        client.infer("identity", http_inputs(ONE), headers={"traceparent": "no traceparent"})
        assert client.infer("context", http_inputs(ONE)).as_numpy("CONTEXT").tolist() == [[b"None"]]
    before, last = collector.trace_ids(), os.urandom(16).hex()
    infer_as_part_of(exporting, "http", "identity", last)
    collector.trace(last)
    assert collector.trace_ids() == before | {last}


def test_a_sampled_request_begins_a_trace(exporting: Server, collector: Collector) -> None:
    post(exporting, "/v2/models/identity/trace/setting", {"trace_rate": "1"})
    before = collector.trace_ids()
    with exporting.http() as client:
        client.infer("identity", http_inputs(ONE))
    wait_until(lambda: collector.trace_ids() - before)
    (own,) = collector.trace_ids() - before
    assert collector.trace(own)["InferRequest"].parent_span_id == b""
    post(exporting, "/v2/models/identity/trace/setting", {"trace_rate": None})


def test_settings_in_this_mode(exporting: Server, collector: Collector) -> None:
    with exporting.http() as client:
        assert client.get_trace_settings() == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "0",
            "trace_count": "-1",
            "trace_mode": "opentelemetry",
            "url": collector.url,
            "resource": "deployment=test",
            "bsp_max_queue_size": "2048",
            "bsp_schedule_delay": "100",
            "bsp_max_export_batch_size": "512",
        }
