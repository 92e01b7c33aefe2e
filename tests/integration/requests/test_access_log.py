"""The access log of a real server: one line for each request over HTTP, gRPC and NATS, however it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import RawConnection, grpc_inputs, http_inputs, infer_body, post
from tests.support.models.zoo import write_small_zoo, write_streamer
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

VALUES = {"IN": np.arange(4, dtype=np.float32).reshape(1, 4)}
PATH = "/v2/models/{model}"


def slow(delay_ms: float) -> dict[str, np.ndarray]:
    return {"VALUE": np.array([[1]], np.int64), "DELAY_MS": np.array([[delay_ms]], np.float32)}


class LoggedServer:
    """A server, and the new lines of its access log."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self.path = path
        self._seen = len(path.read_text().splitlines())

    def lines(self, count: int) -> list[dict[str, Any]]:
        """The next lines; there must be no more."""

        def found() -> list[str]:
            return self.path.read_text().splitlines()[self._seen :]

        wait_until(lambda: len(found()) >= count)
        lines = [json.loads(line) for line in found()]
        self._seen += len(lines)
        assert len(lines) == count, lines
        return lines

    def line(self) -> dict[str, Any]:
        """The next line."""
        return self.lines(1)[0]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logged")
    write_small_zoo(folder / "models")
    write_streamer(folder / "models", "streamer", "")
    platform = ("--allow-vertex-ai", "--vertex-ai-port=0", "--vertex-ai-default-model=identity_FP32")
    routes = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}
    options = (f"--access-log={folder / 'access.log'}", *platform)
    with Server(folder, folder / "models", *options, environment=routes) as server:
        yield server


@pytest.fixture
def logged(started: Server) -> LoggedServer:
    return LoggedServer(started, started.folder / "access.log")


def of(line: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(line[name] for name in names)


def test_http_inference(logged: LoggedServer) -> None:
    body = infer_body(VALUES)
    with RawConnection(logged.server.port) as connection:
        answer = connection.ask(post("/v2/models/identity_FP32/infer", body))
        assert answer is not None
        assert answer.status == 200
        line = logged.line()
        assert list(line) == [
            "time", "door", "method", "route", "model", "version", "status", "bytes_in", "bytes_out", "duration_us",
            "principal",
        ]  # fmt: skip
        assert of(line, "door", "method", "route", "model", "version") == (
            "http", "POST", f"{PATH}/infer", "identity_FP32", "",
        )  # fmt: skip
        assert of(line, "status", "bytes_in", "bytes_out") == (200, len(body), len(answer.body))
        assert of(line, "principal") == ("",)
        assert line["duration_us"] > 0
        answer = connection.ask(post("/v2/models/identity_FP32/versions/1/infer", b"{"))
        assert answer is not None
        assert of(logged.line(), "route", "version", "status", "bytes_in", "bytes_out") == (
            f"{PATH}/versions/{{version}}/infer", "1", answer.status, 1, len(answer.body),
        )  # fmt: skip


def test_binary_and_compressed_http(logged: LoggedServer) -> None:
    with logged.server.http() as client:
        client.infer("identity_FP32", http_inputs(VALUES), request_compression_algorithm="gzip")
    line = logged.line()
    assert line["status"] == 200
    assert line["bytes_in"] > 0


def test_other_routes_of_http(logged: LoggedServer) -> None:
    logged.server.get("/v2/models/identity_FP32/versions/1/ready")
    assert of(logged.line(), "method", "route", "model", "version", "status") == (
        "GET", f"{PATH}/versions/{{version}}/ready", "identity_FP32", "1", 200,
    )  # fmt: skip
    status, body = logged.server.get("/v2/models/nothing")
    assert of(logged.line(), "route", "model", "status", "bytes_out") == (PATH, "nothing", status, len(body))
    logged.server.get("/nowhere")
    assert of(logged.line(), "route", "model", "status") == ("", "", 404)


def test_names_of_clients_are_bounded_and_forge_no_line(logged: LoggedServer) -> None:
    with RawConnection(logged.server.port) as connection:
        for name in ("a%0A%7B%7D", "b" * 20_000):
            answer = connection.ask(post(f"/v2/models/{name}/infer", infer_body(VALUES)))
            assert answer is not None
            assert answer.status == 404
    forged, long = logged.lines(2)
    assert forged["model"] == "a\N{REPLACEMENT CHARACTER}{}"
    assert long["model"] == "b" * 255 + "…"


def finish_slow(logged: LoggedServer) -> None:
    """Returns once the model has ended what it ran for a client that has disconnected."""
    with logged.server.http() as client:
        client.infer("slow", http_inputs(slow(0)))
    assert of(logged.line(), "model", "status") == ("slow", 200)


def test_a_cancelled_http_request(logged: LoggedServer) -> None:
    with RawConnection(logged.server.port) as connection:
        connection.send(post("/v2/models/slow/infer", infer_body(slow(1000))))
        wait_until(lambda: logged.server.in_flight() == 1)
    assert of(logged.line(), "model", "status", "bytes_out") == ("slow", 499, 0)
    finish_slow(logged)


def test_pipelined_http_requests_have_a_line_each(logged: LoggedServer) -> None:
    with RawConnection(logged.server.port) as connection:
        connection.send(post("/v2/models/identity_FP32/infer", infer_body(VALUES)) * 3)
        sizes = [len(answer.body) for answer in (connection.answer() for _ in range(3)) if answer is not None]
    assert [of(line, "status", "bytes_out") for line in logged.lines(3)] == [(200, size) for size in sizes]


def test_a_stream_over_http(logged: LoggedServer) -> None:
    body = json.dumps({"PLAN": json.dumps({"responses": 3, "size": 10})}).encode()
    with RawConnection(logged.server.port) as connection:
        answer = connection.ask(post("/v2/models/streamer/generate_stream", body))
        assert answer is not None
    assert of(logged.line(), "route", "model", "status", "bytes_in", "bytes_out") == (
        f"{PATH}/generate_stream", "streamer", 200, len(body), len(answer.body),
    )  # fmt: skip


def test_the_port_of_a_managed_service(logged: LoggedServer) -> None:
    port = int(logged.server.printed_value("Vertex AI").rpartition(":")[2])
    with RawConnection(port) as connection:
        for sent in (post("/predict", infer_body(VALUES)), b"GET /health HTTP/1.1\r\n\r\n"):
            answer = connection.ask(sent)
            assert answer is not None
            assert answer.status == 200
    predict, health = logged.lines(2)
    assert of(predict, "door", "method", "route", "model", "status") == (
        "vertex", "POST", f"{PATH}/infer", "identity_FP32", 200,
    )  # fmt: skip
    assert of(health, "door", "method", "route", "model", "status") == ("vertex", "GET", "/v2/health/ready", "", 200)


def test_grpc_calls(logged: LoggedServer) -> None:
    with logged.server.grpc() as client:
        client.infer("identity_FP32", grpc_inputs(VALUES))
        with pytest.raises(InferenceServerException):
            client.infer("nothing", grpc_inputs(VALUES))
        client.is_server_live()
    infer, error, live = logged.lines(3)
    assert of(infer, "door", "method", "route", "model", "status") == (
        "grpc", "POST", "/inference.GRPCInferenceService/ModelInfer", "identity_FP32", 0,
    )  # fmt: skip
    assert min(of(infer, "bytes_in", "bytes_out", "duration_us")) > 0
    assert of(error, "model", "status", "bytes_out") == ("nothing", 5, 0)
    assert of(live, "route", "model", "status") == ("/inference.GRPCInferenceService/ServerLive", "", 0)


def test_a_cancelled_grpc_call(logged: LoggedServer) -> None:
    outcomes: list[Any] = []
    with logged.server.grpc() as client:
        call = client.async_infer("slow", grpc_inputs(slow(1000)), lambda result, error: outcomes.append(error))
        wait_until(lambda: logged.server.in_flight() == 1)
        call.cancel()
        assert of(logged.line(), "model", "status", "bytes_out") == ("slow", 1, 0)
    finish_slow(logged)


def test_a_grpc_stream_has_one_line(logged: LoggedServer) -> None:
    outcomes: list[Any] = []
    with logged.server.grpc() as client:
        client.start_stream(lambda result, error: outcomes.append(error))
        for _ in range(3):
            client.async_stream_infer("identity_FP32", grpc_inputs(VALUES))
        wait_until(lambda: len(outcomes) == 3)
        client.stop_stream()
    line = logged.line()
    assert of(line, "route", "model", "status") == (
        "/inference.GRPCInferenceService/ModelStreamInfer", "identity_FP32", 0,
    )  # fmt: skip
    assert min(of(line, "bytes_in", "bytes_out")) > 3 * 16


def test_nats_requests(logged: LoggedServer) -> None:
    body = infer_body(VALUES)

    async def ask() -> int:
        client = await nats.connect(logged.server.nats_url)
        response = await client.request("infer.identity_FP32.v1", body, timeout=30)
        await client.request("infer.nothing", body, timeout=30)
        await client.close()
        return len(response.data)

    size = asyncio.run(ask())
    found, missing = logged.lines(2)
    assert of(found, "door", "method", "route", "model", "version", "status", "bytes_in", "bytes_out") == (
        "nats", "PUB", "infer.{model}.v{version}", "identity_FP32", "1", 200, len(body), size,
    )  # fmt: skip
    assert of(missing, "route", "model", "version", "status") == ("infer.{model}", "nothing", "", 404)


def test_the_metric_of_lines_that_lack(logged: LoggedServer) -> None:
    assert logged.server.metrics()["weir_access_log_dropped_lines", ""] == 0
    assert "weir_access_log_dropped_lines" in logged.server.metrics_page()


def test_without_the_option_there_is_neither_file_nor_metric(server: Server) -> None:
    assert "weir_access_log_dropped_lines" not in server.metrics_page()
