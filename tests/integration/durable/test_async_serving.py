"""Asynchronous requests through a whole server: accepted on disk, executed, and fetched, posted or cancelled."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.grpc

from tests.support.clients.stock import Answer, grpc_inputs, http_inputs, infer_body
from tests.support.models.zoo import write_small_zoo, write_versions
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

LATER = {"Prefer": "respond-async"}


class Receiver(BaseHTTPRequestHandler):
    """Takes what is posted to it."""

    received: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing is to be said."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: int) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("later")
    write_small_zoo(folder / "models")
    write_versions(folder / "models", "versions", "version_policy { all { } }")
    with Server(folder, folder / "models", f"--callback-allow=http://127.0.0.1:{receiver}/hooks/") as started:
        yield started
        started.wait_ready()


def ask(server: Server, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=40)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def submit(server: Server, model: str, body: bytes, **headers: str) -> str:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = ask(server, "POST", f"/v2/models/{model}/infer", body, {**LATER, **more})
    assert answer.status == 202, answer
    return answer.headers["location"]


def ended(server: Server, location: str) -> dict[str, Any]:
    reply = ask(server, "GET", location, headers={"Prefer": "wait=30"}).document
    assert "ended" in reply, reply
    return reply


def slow_body(delay_ms: float, value: int = 1) -> bytes:
    return infer_body({"VALUE": np.array([[value]], np.int64), "DELAY_MS": np.array([[delay_ms]], np.float32)})


def test_the_answer_is_that_of_the_sync_route(server: Server) -> None:
    values = np.arange(5, dtype=np.float32).reshape(1, 5)
    text = infer_body({"IN": values}, id="mine")
    binary, length = tritonclient_body(values)
    for body, headers in (
        (text, {}),
        (binary, {"Inference-Header-Content-Length": str(length)}),
    ):
        path = "/v2/models/identity_FP32/versions/1/infer"
        now = ask(server, "POST", path, body, headers)
        began_ms = int(time.time() * 1000)
        location = ask(server, "POST", path, body, {**LATER, **headers}).headers["location"]
        reply = ended(server, location)
        assert (reply["status"], reply["model"], reply["version"], reply["attempts"]) == (
            "succeeded", "identity_FP32", "1", 1,
        )  # fmt: skip
        assert began_ms <= reply["accepted_ms"] <= time.time() * 1000
        later = ask(server, "GET", f"{location}/result")
        assert (later.status, later.body) == (200, now.body)
        for name in ("content-type", "inference-header-content-length"):
            assert later.headers.get(name) == now.headers.get(name)


def tritonclient_body(values: np.ndarray) -> tuple[bytes, int]:
    from tritonclient.http import InferenceServerClient

    body, length = InferenceServerClient.generate_request_body(http_inputs({"IN": values}))
    assert length is not None
    return body, length


def test_failures_are_told_as_the_sync_route_tells_them(server: Server) -> None:
    body = infer_body({"WHAT": np.array([["error"]], np.object_)})
    now = ask(server, "POST", "/v2/models/faulty/infer", body)
    location = submit(server, "faulty", body)
    assert ended(server, location)["status"] == "failed"
    later = ask(server, "GET", f"{location}/result")
    assert (later.status, later.body) == (now.status, now.body)


def test_the_version_that_was_asked_for_answers(server: Server) -> None:
    body = infer_body({"IN": np.ones(1, np.float32)})
    for path, sum in (("/versions/2", 3.0), ("", 4.0)):
        answer = ask(server, "POST", f"/v2/models/versions{path}/infer", body, LATER)
        ended(server, answer.headers["location"])
        result = ask(server, "GET", f"{answer.headers['location']}/result").document
        assert result["outputs"][0]["data"] == [sum]


def test_a_version_that_there_is_not(server: Server) -> None:
    body = infer_body({"IN": np.zeros((1, 1), np.float32)})
    answer = ask(server, "POST", "/v2/models/identity_FP32/versions/7/infer", body, LATER)
    assert answer.status == 404


def test_a_running_request_is_cancelled(server: Server) -> None:
    location = submit(server, "slow", slow_body(1000))
    wait_until(lambda: ask(server, "GET", location).document["status"] == "running")
    assert ask(server, "GET", f"{location}/result").status == 409
    assert ask(server, "POST", f"{location}/cancel").document["status"] == "cancelled"
    assert ask(server, "GET", f"{location}/result").status == 410
    deleted = submit(server, "slow", slow_body(1000))
    assert ask(server, "DELETE", deleted).status == 204
    assert ask(server, "GET", deleted).status == 404
    wait_until(lambda: server.in_flight() == 0)
    assert ask(server, "GET", location).document["status"] == "cancelled"
    assert ask(server, "GET", deleted).status == 404


def test_a_deadline_that_passes(server: Server) -> None:
    location = submit(server, "slow", slow_body(0), Weir_Deadline_Ms=str(int(time.time() * 1000) - 1))
    assert ended(server, location)["status"] == "expired"
    assert ask(server, "GET", f"{location}/result").status == 410


def test_grpc_submits_and_http_fetches(server: Server) -> None:
    values = np.arange(3, dtype=np.float32).reshape(1, 3)
    with tritonclient.grpc.InferenceServerClient(server.grpc_place) as client:
        answer = client.infer(
            "identity_FP32", grpc_inputs({"IN": values}), headers={"prefer": "respond-async"}
        ).get_response()
    location = f"/v2/jobs/{answer.parameters['job_id'].string_param}"
    assert ended(server, location)["status"] == "succeeded"
    result = ask(server, "GET", f"{location}/result")
    content = result.body[int(result.headers["inference-header-content-length"]) :]
    assert np.array_equal(np.frombuffer(content, np.float32), values.ravel())


def test_an_answer_is_posted_to_its_url(server: Server, receiver: int) -> None:
    url = f"http://127.0.0.1:{receiver}/hooks/one?x=y"
    location = submit(server, "slow", slow_body(1, 7), Weir_Callback_Url=url)
    wait_until(lambda: Receiver.received)
    path, headers, body = Receiver.received[0]
    assert path == "/hooks/one?x=y"
    assert headers["weir-outcome"] == "succeeded"
    assert location.endswith(headers["weir-id"])
    assert body == ask(server, "GET", f"{location}/result").body
    assert json.loads(body)["outputs"][0]["data"] == [7]


def test_what_was_accepted_survives_its_gateway(server: Server) -> None:
    body = infer_body({"IN": np.ones((1, 2), np.float32)})
    locations = {submit(server, "slow", slow_body(5, number)) for number in range(20)}
    keyed = submit(server, "identity_FP32", body, Idempotency_Key="once")
    server.kill("gateway")
    server.kill("durable")
    server.wait_ready()
    assert submit(server, "identity_FP32", body, Idempotency_Key="once") == keyed
    other = ask(
        server, "POST", "/v2/models/identity_FP32/infer",
        infer_body({"IN": np.zeros((1, 2), np.float32)}), {**LATER, "Idempotency-Key": "once"},
    )  # fmt: skip
    assert other.status == 422
    for location in [*locations, keyed]:
        assert ended(server, location)["status"] == "succeeded"
