"""The statistics extension over both protocols, with the numbers of a Triton 2.51 for the same requests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import write_faulty, write_slow, write_versions
from tests.support.servers.weir_server import Server

DURATIONS = ["success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("statistics")
    (folder / "models").mkdir()
    write_faulty(folder / "models")
    write_slow(folder / "models", "slow", "dynamic_batching { max_queue_delay_microseconds: 500000 }")
    write_slow(folder / "models", "alone", "")
    write_versions(folder / "models", "versions", "version_policy { all { } }")
    with Server(folder, folder / "models") as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    with server.http() if request.param == "http" else server.grpc() as client:
        yield client


def all_rows(client: Any, model: str = "", version: str = "") -> list[dict[str, Any]]:
    """What a stock client is told, in the form of the JSON."""
    reply = client.get_inference_statistics(model, version)
    if isinstance(reply, dict):
        return list(reply["model_stats"])
    message = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return [_with_numbers(row) for row in message["model_stats"]]


def _with_numbers(value: Any, name: str = "") -> Any:
    """Protobuf's JSON holds 64-bit numbers as text."""
    if isinstance(value, dict):
        return {key: _with_numbers(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return int(value) if isinstance(value, str) and name not in ("name", "version") else value


def row(client: Any, model: str) -> dict[str, Any]:
    (found,) = all_rows(client, model)
    return found


def counts(client: Any, model: str) -> dict[str, Any]:
    """Every count of a model's row, and its batches as {size: runs}."""
    reply = row(client, model)
    return {
        **{name: duration["count"] for name, duration in reply["inference_stats"].items()},
        "inferences": reply["inference_count"],
        "executions": reply["execution_count"],
        "batches": {batch["batch_size"]: batch["compute_infer"]["count"] for batch in reply["batch_stats"]},
    }


def more(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What has been counted between the two, without what has not changed."""
    grown = {name: after[name] - before[name] for name in after if name != "batches"}
    batches = {size: runs - before["batches"].get(size, 0) for size, runs in after["batches"].items()}
    return {name: value for name, value in {**grown, **{f"batch {k}": v for k, v in batches.items()}}.items() if value}


def ask(client: Any, model: str, arrays: dict[str, np.ndarray]) -> Any:
    inputs = http_inputs(arrays) if isinstance(client, tritonclient.http.InferenceServerClient) else grpc_inputs(arrays)
    return client.infer(model, inputs)


def say(client: Any, *words: str) -> None:
    """The faulty model is told what to do, a row each."""
    ask(client, "faulty", {"WHAT": np.array([[word] for word in words], np.object_)})


def run(client: Any, model: str, rows: int = 1, delay_ms: float = 1) -> None:
    values, delays = np.ones((rows, 1), np.int64), np.full((rows, 1), delay_ms, np.float32)
    ask(client, model, {"VALUE": values, "DELAY_MS": delays})


def succeeded(requests: int) -> dict[str, int]:
    return dict.fromkeys(["success", "queue", "compute_input", "compute_infer", "compute_output"], requests)


def test_a_model_that_was_never_asked(client: Any) -> None:
    rows = all_rows(client, "versions")
    assert [found["version"] for found in rows] == ["1", "2", "3"]
    assert rows[0] == {
        "name": "versions",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {name: {"count": 0, "ns": 0} for name in DURATIONS},
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }
    for version in ("2", "02"):
        assert [found["version"] for found in all_rows(client, "versions", version)] == ["2"]


def test_all_models_are_told_of_in_order(client: Any) -> None:
    names = [(found["name"], found["version"]) for found in all_rows(client)]
    assert names == [("alone", "1"), ("faulty", "1"), ("slow", "1"), *(("versions", str(n)) for n in (1, 2, 3))]


def test_batches_of_a_client(client: Any) -> None:
    before, begun_ms = counts(client, "alone"), int(time.time() * 1000)
    for rows in (1, 2, 3, 4, 2):
        run(client, "alone", rows)
    reply = {"inferences": 12, "executions": 5, "batch 1": 1, "batch 2": 2, "batch 3": 1, "batch 4": 1}
    assert more(counts(client, "alone"), before) == {**succeeded(5), **reply}
    found = row(client, "alone")
    assert begun_ms <= found["last_inference"] <= int(time.time() * 1000)
    assert [batch["batch_size"] for batch in found["batch_stats"]] == [1, 2, 3, 4]
    stats = found["inference_stats"]
    parts = ["queue", "compute_input", "compute_infer", "compute_output"]
    assert stats["success"]["ns"] == sum(stats[part]["ns"] for part in parts)
    assert stats["compute_infer"]["ns"] == sum(batch["compute_infer"]["ns"] for batch in found["batch_stats"])
    assert stats["compute_infer"]["ns"] >= 5_000_000


def test_durations_of_a_batch_are_those_of_each_of_its_requests(server: Server, client: Any) -> None:
    before, found_before = counts(client, "slow"), row(client, "slow")

    def one(_: int) -> None:
        with server.http() as own:
            run(own, "slow", 2, 20)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    assert more(counts(client, "slow"), before) == {**succeeded(4), "inferences": 8, "executions": 1, "batch 8": 1}
    found = row(client, "slow")
    (batch,) = found["batch_stats"]
    ns = {part: found["inference_stats"][part]["ns"] for part in ("queue", "compute_infer")}
    before_ns = {part: found_before["inference_stats"][part]["ns"] for part in ns}
    once_ns = batch["compute_infer"]["ns"] - sum(b["compute_infer"]["ns"] for b in found_before["batch_stats"])
    assert ns["compute_infer"] - before_ns["compute_infer"] == 4 * once_ns
    assert once_ns >= 20_000_000


def test_an_error_response_is_a_success_and_an_exception_is_none(client: Any) -> None:
    before = counts(client, "faulty")
    with pytest.raises(InferenceServerException):
        say(client, "error")
    reply = counts(client, "faulty")
    assert more(reply, before) == {**succeeded(1), "inferences": 1, "executions": 1, "batch 1": 1}
    before_ns, before_ms = (
        row(client, "faulty")["inference_stats"]["fail"]["ns"],
        row(client, "faulty")["last_inference"],
    )
    with pytest.raises(InferenceServerException):
        say(client, "raise", "fine")
    assert more(counts(client, "faulty"), reply) == {"fail": 1, "executions": 1, "batch 2": 1}
    found = row(client, "faulty")
    assert found["inference_stats"]["fail"]["ns"] > before_ns
    assert found["last_inference"] >= before_ms


def test_what_is_refused_is_not_counted(client: Any) -> None:
    before = counts(client, "alone")
    for arrays in ({"VALUE": np.ones((9, 1), np.int64), "DELAY_MS": np.ones((9, 1), np.float32)}, {}):
        with suppress(InferenceServerException):
            ask(client, "alone", arrays)
    assert counts(client, "alone") == before


@pytest.mark.parametrize(
    ("model", "version", "text"),
    [
        ("nowhere", "", "requested model 'nowhere' is not available"),
        ("nowhere", "1", "requested model 'nowhere' is not available"),
        ("versions", "7", "requested model version is not available for model 'versions'"),
        ("versions", "1" * 5000, "failed to get model version from specified version string '1111"),
        ("versions", "99999999999999999999", "failed to get model version from specified version string '9999"),
    ],
)
def test_what_is_not_there(client: Any, model: str, version: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        client.get_inference_statistics(model, version)
    assert text in refused.value.message()
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_the_urls(server: Server) -> None:
    status, body = server.get("/v2/models/stats")
    assert (status, len(json.loads(body)["model_stats"])) == (200, 6)
    assert server.get("/v2/models/alone/versions/1/stats")[0] == 200
    for path in ("/v2/models/stats/", "/v2/models/alone/versions/x/stats", "/v2/models/alone/stats/"):
        assert server.get(path) == (404, b'{"error":"Not Found"}')


def test_it_is_one_of_the_extensions(server: Server) -> None:
    with server.http() as http, server.grpc() as grpc:
        assert "statistics" in http.get_server_metadata()["extensions"]
        assert "statistics" in grpc.get_server_metadata().extensions
