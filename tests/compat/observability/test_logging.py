"""Triton's logging extension: settings by stock clients, which take effect in every role."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.support.clients.nats_flush import flush
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import config_text, write_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

TALKING_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_verbose("a detail")
        pb_utils.Logger.log_info("some news")
        pb_utils.Logger.log_warn("a warning")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""

ONE = {"IN": np.array([[1]], np.int32)}
ROLES = ("gateway", "scheduler", "worker")
BASE = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 1, "log_format": "default"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("logging")
    tensors = {"IN": ("INT32", [1])}, {"OUT": ("INT32", [1])}
    model = write_model(folder / "models", "talking", config_text("talking", "python", *tensors, 4))
    (model / "1" / "model.py").write_text(TALKING_MODEL)
    options = ("--log-format=json", "--log-verbose=1", f"--log-file={folder / 'log'}")
    with Server(folder, folder / "models", *options) as started:
        yield started


@pytest.fixture
def settled(server: Server) -> Server:
    """The server with settings that all roles have been seen to follow, in the default layout."""
    change(server, {"log_format": "ISO8601"})
    change(server, BASE)
    wait_until(lambda: all(f" {role} " in since(server, infer(server)) for role in ROLES))
    return server


def change(server: Server, body: Any) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.post(f"http://{server.http_place}/v2/logging", content=content)


def log_of(server: Server) -> str:
    return (server.folder / "log").read_text()


def infer(server: Server, request_id: str = "mine") -> int:
    """Asks the model; returns how long the log was before."""
    before = len(log_of(server))
    with server.http() as client:
        client.infer("talking", http_inputs(ONE), request_id=request_id)
    return before


def since(server: Server, before: int) -> str:
    return log_of(server)[before:]


def test_one_request_is_followed_from_role_to_role(server: Server) -> None:
    # First, before any test has changed the format, which clients can't change back to JSON.
    infer(server, 'my "request"')
    with server.grpc() as client:
        client.infer("talking", grpc_inputs(ONE), request_id="over-grpc")

    def entries() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log_of(server).splitlines()]

    for request_id in ('my "request"', "over-grpc"):
        wait_until(
            lambda id=request_id: {e["role"] for e in entries() if e.get("request_id") == id} >= {"gateway", "worker"}
        )
        (key,) = {entry["key"] for entry in entries() if entry.get("request_id") == request_id}
        of_request = [entry for entry in entries() if entry.get("key") == key]
        assert {entry["role"] for entry in of_request} == set(ROLES)
        assert {entry["model"] for entry in of_request} == {"talking"}
        assert {entry["level"] for entry in of_request} == {"debug"}
    said = [entry["message"] for entry in entries() if entry["role"] == "model"]
    assert said == ["a detail", "some news", "a warning"] * 2


def test_settings_with_the_stock_clients(settled: Server) -> None:
    reply = {"log_file": str(settled.folder / "log"), **BASE}
    with settled.http() as http, settled.grpc() as grpc:
        assert http.get_log_settings() == reply
        assert http.update_log_settings({"log_verbose_level": 0, "log_format": "ISO8601"}) == {
            **reply,
            "log_verbose_level": 0,
            "log_format": "ISO8601",
        }
        settings = grpc.get_log_settings(as_json=True)["settings"]
        assert settings["log_format"] == {"string_param": "ISO8601"}
        assert settings["log_verbose_level"] == {"uint32_param": 0}
        assert settings["log_info"] == {"bool_param": True}
        changed = grpc.update_log_settings({"log_info": False, "log_format": "default"}).settings
        assert (changed["log_info"].bool_param, changed["log_format"].string_param) == (False, "default")
        assert http.get_log_settings() == {**reply, "log_verbose_level": 0, "log_info": False}
        with pytest.raises(InferenceServerException, match="log file location can not be updated"):
            http.update_log_settings({"log_file": "elsewhere"})
        with pytest.raises(InferenceServerException) as caught:
            grpc.update_log_settings({"log_format": "bad"})
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert caught.value.message() == "invalid argument for log_format, got: bad"
        assert "logging" in http.get_server_metadata()["extensions"]


async def test_settings_with_the_aio_clients(settled: Server) -> None:
    async with tritonclient.http.aio.InferenceServerClient(settled.http_place) as http:
        assert (await http.update_log_settings({"log_warning": False}))["log_warning"] is False
        assert (await http.get_log_settings())["log_warning"] is False
    async with tritonclient.grpc.aio.InferenceServerClient(settled.grpc_place) as grpc:
        assert (await grpc.get_log_settings()).settings["log_warning"].bool_param is False
        assert (await grpc.update_log_settings({"log_warning": True})).settings["log_warning"].bool_param is True


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ({"log_file": ""}, 501, "log file location can not be updated through network protocol"),
        ({"log_info": "false"}, 500, "attempt to access JSON non-boolean as boolean"),
        ({"log_verbose_level": -1}, 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_format": "json"}, 503, "invalid argument for --log_format, got: json"),
    ],
)
def test_refusals(settled: Server, body: Any, status: int, message: str) -> None:
    answer = change(settled, body)
    assert (answer.status_code, answer.json()) == (status, {"error": message})


def test_unknown_keys_and_nulls_are_ignored(settled: Server) -> None:
    for body in ({"unknown": 1}, [], {"log_info": None, "log_file": None}):
        answer = change(settled, body)
        assert (answer.status_code, answer.json()) == (200, {"log_file": str(settled.folder / "log"), **BASE})


def test_a_method_that_is_not_there(settled: Server) -> None:
    answer = httpx.delete(f"http://{settled.http_place}/v2/logging")
    assert (answer.status_code, answer.json()) == (405, {"error": "Method Not Allowed"})


def test_every_role_and_every_model_follows(settled: Server) -> None:
    text = since(settled, infer(settled))
    assert re.search(
        r'^D\d{4} [\d:.]+ \d+ gateway \S+\] "\[request id: mine\] gateway-\S+/\d+, model', text, re.MULTILINE
    )
    assert re.search(r'^I\d{4} [\d:.]+ \d+ model.py:\d+\] "a detail"$', text, re.MULTILINE)
    change(settled, {"log_format": "ISO8601", "log_info": False})
    wait_until(lambda: "model.py" in (text := since(settled, infer(settled))) and '"some news"' not in text)

    def letters() -> set[str]:
        lines = since(settled, infer(settled)).splitlines()
        return {" ".join(re.sub(r"^\S+Z (\w) \d+ (\w+).*", r"\1 \2", line).split()) for line in lines}

    # Details are switched by the level, not with the news.
    wait_until(lambda: letters() == {"D gateway", "D scheduler", "D worker", "I model", "W model"})
    change(settled, {"log_verbose_level": 0, "log_warning": False})
    wait_until(lambda: not letters())


def test_settings_outlive_the_gateway_and_the_broker(settled: Server) -> None:
    change(settled, {"log_verbose_level": 7})
    with settled.http() as client:
        client.update_trace_settings("talking", {"trace_rate": "6"})
    for role in ("gateway", "nats"):
        settled.kill(role)
        settled.wait_ready()
    settled.kill("gateway")
    settled.wait_ready()
    with settled.http() as client:
        wait_until(lambda: client.get_log_settings()["log_verbose_level"] == 7)
        wait_until(lambda: client.get_trace_settings("talking")["trace_rate"] == "6")
        client.update_trace_settings("talking", {"trace_rate": None})
    change(settled, BASE)


async def test_what_is_no_settings_is_dropped(settled: Server) -> None:
    client = await nats.connect(settled.nats_url)
    for key in ("logging", "trace", "trace.talking", "trace.=FF=00", "unknown", "unknown.more.x"):
        for garbage in (b"\xff", b"[]", b'{"log_info": 3, "trace_rate": "x"}', b"{" * 5000):
            await client.publish(f"$KV.settings.{key}", garbage)
    await flush(client)
    await client.close()
    with settled.http() as http:
        assert http.get_log_settings() == {"log_file": str(settled.folder / "log"), **BASE}
        assert http.get_trace_settings("talking")["trace_rate"] == "1000"
        assert http.update_trace_settings("talking", {"trace_rate": "5"})["trace_rate"] == "5"
        assert http.update_trace_settings("talking", {"trace_rate": None})["trace_rate"] == "1000"
    wait_until(lambda: log_of(settled).count("dropped settings") >= 3)


def test_a_log_that_can_t_be_written_is_told_at_the_start(tmp_path: Path, server: Server) -> None:
    with pytest.raises(AssertionError, match="can't be written"):
        Server(tmp_path, server.folder / "models", f"--log-file={tmp_path / 'none' / 'log'}")
