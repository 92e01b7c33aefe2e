"""Copies of live requests on another version: they run there, and their failures and outputs reach nobody."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import write_identity, write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

REQUESTS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an identity in two versions, and a model whose version 2 always fails."""
    folder = tmp_path_factory.mktemp("shadow")
    (folder / "models").mkdir()
    same = write_identity(folder / "models", "same", "FP32", "version_policy { all { } }\ndynamic_batching { }")
    shutil.copytree(same / "1", same / "2")
    parameters = 'parameters { key: "fails_percent" value { string_value: "100" } }'
    tensors = {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}
    more = f"version_policy {{ all {{ }} }}\ndynamic_batching {{ }}\n{parameters}"
    bad = write_python_model(folder / "models", "bad", "fails_sometimes", *tensors, 8, more)
    shutil.copytree(bad / "1", bad / "2")
    server = Server(folder, folder / "models")
    try:
        yield server
        assert server.in_flight() == 0
        assert server.metrics()["weir_gateway_payload_slots", ""] == 0
        assert server.stop() == 0
    finally:
        server.close()


def ask(server: Server, method: str, path: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(f"http://{server.http_place}/v2/models/{path}", body, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def copies(server: Server, model: str, metric: str = "requests") -> int:
    """Copies that ended, or that failed, on version 2."""
    start = f'weir_version_{metric}_total{{model="{model}",version="2",arm="shadow"}} '
    lines = [line for line in server.metrics_page().splitlines() if line.startswith(start)]
    return int(lines[0].removeprefix(start)) if lines else 0


@pytest.mark.parametrize("size", [4, 200_000])
def test_copies_of_a_share_run_on_the_other_version(server: Server, size: int) -> None:
    ask(server, "PUT", "same/traffic", {"weights": {"1": 100}})
    shown = ask(server, "PUT", "same/traffic/shadow", {"version": 2, "share": 20})
    assert shown["shadow"] == {"version": "2", "share": 20}
    before = copies(server, "same")
    with server.http() as client, server.grpc() as other:
        for number in range(REQUESTS):
            value = np.full((1, size), number, np.float32)
            http = client.infer("same", http_inputs({"IN": value}))
            grpc = other.infer("same", grpc_inputs({"IN": value}))
            for result in (http.as_numpy("OUT"), grpc.as_numpy("OUT")):
                assert np.array_equal(result, value)
            assert http.get_response()["model_version"] == grpc.get_response().model_version == "1"
    wait_until(lambda: copies(server, "same") - before >= REQUESTS * 2 // 5 - 2)
    assert copies(server, "same") - before <= REQUESTS * 2 // 5 + 2
    assert copies(server, "same", "failures") == 0
    wait_until(lambda: server.metrics()["weir_gateway_payload_slots", ""] == 0)
    assert "shadow" not in ask(server, "DELETE", "same/traffic/shadow")


def test_copies_that_fail_fail_nobody(server: Server) -> None:
    ask(server, "PUT", "bad/traffic", {"weights": {"1": 100}})
    ask(server, "PUT", "bad/traffic/shadow", {"version": 2, "share": 100})
    with server.http() as client:
        for _ in range(REQUESTS):
            result = client.infer("bad", http_inputs({"IN": np.zeros((1, 1), np.float32)}))
            assert result.get_response()["model_version"] == "1"
    wait_until(lambda: copies(server, "bad") == copies(server, "bad", "failures") > REQUESTS // 2)


def test_an_invalid_shadow_is_rejected(server: Server) -> None:
    for document in ({}, {"version": 2}, {"version": 2, "share": 0}, {"version": "2", "share": 1}):
        with pytest.raises(urllib.error.HTTPError):
            ask(server, "PUT", "same/traffic/shadow", document)
