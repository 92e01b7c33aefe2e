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

OTHER_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
instance_group { kind: KIND_CPU }
version_policy { all { } }
dynamic_batching { }
"""

OTHER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
            values[:, 0] += np.float32({added})
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
        return responses
"""


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
    (folder / "models" / "other" / "1").mkdir(parents=True)
    (folder / "models" / "other" / "2").mkdir()
    for version in (1, 2):
        code = OTHER.format(added=0.5 * (version - 1))
        (folder / "models" / "other" / str(version) / "model.py").write_text(code)
    (folder / "models" / "other" / "config.pbtxt").write_text(OTHER_CONFIG)
    with Server(folder, folder / "models") as server:
        yield server
        assert server.in_flight() == 0
        assert server.metrics()["weir_gateway_payload_slots", ""] == 0


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
    assert shown["shadow"] == {"version": "2", "share": 20, "compare": False}
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


@pytest.mark.parametrize("width", [4, 5_000])
def test_differences_are_reported_as_they_are(server: Server, width: int) -> None:
    ask(server, "PUT", "other/traffic", {"weights": {"1": 100}})
    ask(server, "PUT", "other/traffic/shadow", {"version": 2, "share": 100, "compare": True})
    row = report(server)
    with server.http() as client:
        for number in range(REQUESTS):
            # The first of these labels changes for even numbers: 1.5 is more than 1.25.
            value = np.full((1, width), 1, np.float32)
            value[0, 1] = 1.25 if number % 2 == 0 else 2
            result = client.infer("other", http_inputs({"IN": value}), request_id=f"r{number}")
            assert result.get_response()["model_version"] == "1"
            assert np.array_equal(result.as_numpy("OUT"), value)
    made = wait_until(lambda: (found := report(server))["compared"] == row["compared"] + REQUESTS and found)
    assert (made["failed"], made["mismatched"], made["skipped"]) == (0, 0, 0)
    assert made["differing"] - row["differing"] == REQUESTS
    out, was = made["outputs"]["OUT"], row["outputs"].get("OUT", {})
    assert out["values"] - was.get("values", 0) == REQUESTS * width
    assert out["differing"] - was.get("differing", 0) == REQUESTS
    assert (out["largest_absolute"], out["largest_relative"]) == (0.5, pytest.approx(1 / 3))
    assert out["labels"] - was.get("labels", 0) == REQUESTS
    assert out["different_labels"] - was.get("different_labels", 0) == REQUESTS // 2
    start = f'weir_shadow_compared_total{{model="other",version="2"}} {made["compared"]}'
    assert start in server.metrics_page()


def test_the_worst_requests_are_kept_and_shown(server: Server) -> None:
    worst = wait_until(lambda: ask(server, "GET", "other/traffic/shadow")["worst"])
    assert "OUT: 1 of 4 values differ by up to 0.5 (33.333%), 1 of 1 labels" in {row["difference"] for row in worst}
    sample = ask(server, "GET", f"other/traffic/shadow/{worst[0]['sample']}")
    assert sample["request_id"] == worst[0]["request_id"]
    assert [tensor["first_values"][:2] for kind in ("inputs", "live", "copy") for tensor in sample[kind]] == [
        [1, 1.25],
        [1, 1.25],
        [1.5, 1.25],
    ]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(server, "GET", "other/traffic/shadow/none")


def test_a_new_rule_keeps_the_copies(server: Server) -> None:
    ask(server, "PUT", "other/traffic", {"weights": {"1": 100}})
    ask(server, "PUT", "other/traffic/shadow", {"version": 2, "share": 50, "compare": True})
    shown = ask(server, "PUT", "other/traffic", {"weights": {"1": 90, "2": 10}})
    assert shown["shadow"] == {"version": "2", "share": 50, "compare": True}
    shown = ask(server, "POST", "other/traffic/ramp", {"version": 2, "over_s": 600})
    assert shown["shadow"]["share"] == 50
    ask(server, "DELETE", "other/traffic")


def report(server: Server) -> dict[str, Any]:
    """The comparisons of model `other` with version 2."""
    nothing = dict.fromkeys(("compared", "differing", "mismatched", "failed", "skipped"), 0)
    return next(iter(ask(server, "GET", "other/traffic/shadow")["versions"]), {**nothing, "outputs": {}})


def test_an_invalid_shadow_is_rejected(server: Server) -> None:
    for document in (
        {},
        {"version": 2},
        {"version": 2, "share": 0},
        {"version": "2", "share": 1},
        {"version": 2, "share": 1, "compare": 1},
    ):
        with pytest.raises(urllib.error.HTTPError):
            ask(server, "PUT", "same/traffic/shadow", document)
