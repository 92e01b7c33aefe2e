"""The response cache: hits, misses and their counters, and the loss of the cache."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
import tritonclient.grpc
from nats.js.errors import NotFoundError
from tritonclient.utils import InferenceServerException

from tests.support.clients.shared_memory import memory
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import SOURCES, write_python_model
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.gateway import OwnGateway, own_gateway
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.bus.naming import subjects

CACHE_BYTES = 2_000_000
CACHED, PLAIN, ORDERED, RELOADED, SHARED = "cached", "plain", "ordered_cached", "reloaded", "shared"

_numbers = itertools.count(1)


def fresh(length: int = 4) -> np.ndarray:
    """Input that was never used before."""
    return np.full((1, length), next(_numbers), np.float32)


def write_counting(models: Path, name: str, more: str) -> Path:
    inputs: Any = {"IN": ("FP32", [-1]), "DELAY_MS": ("FP32", [1])}
    folder = write_python_model(
        models, name, "counting", inputs, {"OUT": ("FP32", [-1]), "RUN": ("INT64", [1])}, 8, more
    )
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(config.replace('name: "DELAY_MS"', 'name: "DELAY_MS" optional: true'))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cached") / "models"
    cache = "response_cache { enable: true }"
    for name in (CACHED, RELOADED, SHARED):
        write_counting(root, name, cache)
    write_counting(root, PLAIN, "")
    two = "dynamic_batching { preserve_ordering: true } instance_group [{ count: 2 kind: KIND_CPU }]"
    write_counting(root, ORDERED, f"{cache} {two}")
    return root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    options = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
    cache = (f"--cache-config=local,size={CACHE_BYTES}", "--metrics-config=summary_latencies=true")
    with Server(models.parent, models, *options, *cache) as started:
        yield started
        assert started.in_flight() == 0


@pytest.fixture(scope="module")
def pair(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[OwnGateway]]:
    """Two gateways that share a cache."""
    folders = [tmp_path_factory.mktemp("gateway") for _ in range(2)]
    config = {"cache_config": ["nats,size=1000000"]}
    with own_gateway(folders[0], server, **config) as first, own_gateway(folders[1], server, **config) as second:
        yield [first, second]


class Asked:
    """A client of one protocol."""

    def __init__(self, endpoints: Endpoints, protocol: str) -> None:
        self.protocol = protocol
        self.client: Any = endpoints.http() if protocol == "http" else endpoints.grpc()

    def infer(self, model: str, array: np.ndarray, **more: Any) -> Any:
        inputs = http_inputs({"IN": array}) if self.protocol == "http" else grpc_inputs({"IN": array})
        result = self.client.infer(model, inputs, **more)
        np.testing.assert_array_equal(result.as_numpy("OUT"), array)
        return result

    def run(self, model: str, array: np.ndarray, **more: Any) -> int:
        """Which run of the model the answer is of."""
        return int(self.infer(model, array, **more).as_numpy("RUN")[0, 0])


@pytest.fixture(params=["http", "grpc"])
def asked(server: Server, request: pytest.FixtureRequest) -> Iterator[Asked]:
    asked = Asked(server, request.param)
    with asked.client:
        yield asked


def reply(endpoints: Endpoints, model: str) -> dict[str, Any]:
    """The model's statistics."""
    with endpoints.http() as client:
        (row,) = client.get_inference_statistics(model)["model_stats"]
        return dict(row)


def counts(endpoints: Endpoints, model: str) -> dict[str, int]:
    row = reply(endpoints, model)
    stats = {name: duration["count"] for name, duration in row["inference_stats"].items()}
    return {**stats, "inferences": row["inference_count"], "executions": row["execution_count"]}


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_what_was_asked_before_is_answered_again_with_the_new_id(asked: Asked) -> None:
    array = fresh()
    first = asked.infer(CACHED, array, request_id="first")
    for version in ("", "1"):
        again = asked.infer(CACHED, array, request_id="again", model_version=version)
        response = again.get_response()
        id, model_version = (
            (response["id"], response["model_version"])
            if isinstance(response, dict)
            else (response.id, response.model_version)
        )
        assert (id, model_version) == ("again", "1")
        assert again.as_numpy("RUN") == first.as_numpy("RUN")


def test_what_differs_in_anything_an_answer_may_depend_on_is_run(asked: Asked) -> None:
    array = fresh(4)
    runs = [asked.run(CACHED, array) for _ in range(2)]
    assert runs[0] == runs[1]
    others = [
        asked.run(CACHED, array.reshape(2, 2)),  # the same bytes
        asked.run(CACHED, array + 0.5),
        asked.run(CACHED, array, parameters={"mine": 1}),
        asked.run(CACHED, array, parameters={"mine": 2}),
    ]
    assert len({runs[0], *others}) == 5
    assert asked.run(CACHED, array, priority=1, timeout=10_000_000) == runs[0]
    assert asked.run(CACHED, array, parameters={"mine": 2}) == others[3]


def test_the_requested_outputs_are_part_of_what_was_asked(asked: Asked) -> None:
    array = fresh()
    module = tritonclient.grpc if asked.protocol == "grpc" else tritonclient.http
    alone = [module.InferRequestedOutput("OUT")]  # type: ignore[attr-defined]
    assert asked.infer(CACHED, array, outputs=alone).as_numpy("RUN") is None
    assert asked.infer(CACHED, array).as_numpy("RUN") is not None


def test_large_tensors_are_cached_like_others(asked: Asked) -> None:
    array = np.full((1, 75_000), next(_numbers), np.float32)
    array[0, -1] = 0.25
    assert asked.run(CACHED, array) == asked.run(CACHED, array)


def test_statistics_and_metrics_tell_hits_from_runs(server: Server, asked: Asked) -> None:
    before, metrics = counts(server, CACHED), server.metrics()
    array = np.repeat(fresh(), 3, axis=0)
    for _ in range(4):
        asked.infer(CACHED, array)
    phases = dict.fromkeys(("compute_input", "compute_infer", "compute_output"), 1)
    expected = {"success": 4, "queue": 4, "cache_hit": 3, "cache_miss": 1, "inferences": 3, "executions": 1, **phases}
    assert added(before, counts(server, CACHED)) == expected
    now = server.metrics()
    changed = {name: now[name, model] - metrics[name, model] for name, model in now if model == CACHED}
    assert changed["nv_cache_num_hits_per_model"] == 3
    assert changed["nv_cache_num_misses_per_model"] == 1
    assert changed["nv_inference_request_success"] == 4
    assert changed["nv_inference_count"] == 3
    assert changed["nv_inference_exec_count"] == 1
    assert changed["nv_cache_hit_summary_per_model_count"] == 3
    assert changed["nv_cache_miss_summary_per_model_count"] == 1
    assert changed["nv_inference_queue_summary_us_count"] == 4
    row = reply(server, CACHED)["inference_stats"]
    assert 0 < row["cache_hit"]["ns"] < row["success"]["ns"]
    assert row["cache_miss"]["ns"] > 0
    phases_ns = sum(row[name]["ns"] for name in ("queue", *phases))
    assert row["success"]["ns"] == phases_ns + row["cache_hit"]["ns"] + row["cache_miss"]["ns"]


def test_a_model_that_does_not_ask_for_it_is_not_cached(server: Server, asked: Asked) -> None:
    before, array = counts(server, PLAIN), fresh()
    assert asked.run(PLAIN, array) != asked.run(PLAIN, array)
    assert "cache_miss" not in added(before, counts(server, PLAIN))
    assert not [name for name, model in server.metrics() if "cache" in name and model == PLAIN]
    assert [name for name, model in server.metrics() if "cache" in name and model == CACHED]


def test_a_failure_is_neither_kept_nor_a_miss(server: Server, asked: Asked) -> None:
    before, array = counts(server, CACHED), -fresh()
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="a negative number"):
            asked.infer(CACHED, array)
    changed = added(before, counts(server, CACHED))
    assert changed["executions"] == 2
    assert not {"cache_hit", "cache_miss"} & changed.keys()


def test_tensors_in_memory_of_the_client_are_not_cached(server: Server, asked: Asked) -> None:
    array, client = fresh(), asked.client
    with memory(64) as region:
        region.put(array.tobytes())
        client.register_system_shared_memory("cache_in", region.key, 64)
        module = tritonclient.grpc if asked.protocol == "grpc" else tritonclient.http
        tensor = module.InferInput("IN", [1, 4], "FP32")  # type: ignore[attr-defined]
        tensor.set_shared_memory("cache_in", 16)
        runs = [int(client.infer(CACHED, [tensor]).as_numpy("RUN")[0, 0]) for _ in range(2)]
        assert runs[0] != runs[1]
        output = module.InferRequestedOutput("RUN")  # type: ignore[attr-defined]
        output.set_shared_memory("cache_in", 8, 16)
        seen = []
        for _ in range(2):
            inputs = http_inputs({"IN": array}) if asked.protocol == "http" else grpc_inputs({"IN": array})
            client.infer(CACHED, inputs, outputs=[output])
            seen.append(int(np.frombuffer(region.get(8, 16), np.int64)[0]))
        assert seen[0] != seen[1]
        client.unregister_system_shared_memory("cache_in")


def test_an_answer_that_is_too_large_is_given_and_not_kept(server: Server, asked: Asked) -> None:
    array = np.full((1, CACHE_BYTES // 4), next(_numbers), np.float32)
    small = fresh()
    run = asked.run(CACHED, small)
    assert asked.run(CACHED, array) != asked.run(CACHED, array)
    assert asked.run(CACHED, small) == run
    assert server.log().count("too large for the response cache") == 1, "told once, not with each request"


def test_a_full_cache_forgets_what_was_used_longest_ago(asked: Asked) -> None:
    length = CACHE_BYTES // 4 // 5
    arrays = [np.full((1, length), next(_numbers), np.float32) for _ in range(5)]
    runs = [asked.run(CACHED, array) for array in arrays[:4]]
    assert asked.run(CACHED, arrays[0]) == runs[0]
    asked.run(CACHED, arrays[4])
    assert asked.run(CACHED, arrays[0]) == runs[0]
    assert asked.run(CACHED, arrays[1]) != runs[1]


def test_a_reload_leaves_old_answers_behind(server: Server, models: Path) -> None:
    asked = Asked(server, "http")
    with asked.client as client:
        array = fresh()
        asked.infer(RELOADED, fresh())
        old = asked.run(RELOADED, array)
        assert asked.run(RELOADED, array) == old
        client.load_model(RELOADED)
        assert asked.run(RELOADED, array) == old, "nothing has changed"
        source = (SOURCES / "counting.py").read_text()
        (models / RELOADED / "1" / "model.py").write_text(source.replace("self.runs = 0", "self.runs = 1000"))
        client.load_model(RELOADED)
        assert asked.run(RELOADED, array) == asked.run(RELOADED, array) == 1001
        client.unload_model(RELOADED)
        wait_until(lambda: (RELOADED, "1") not in {(r["name"], r.get("version")) for r in _ready(client)})
        client.load_model(RELOADED)
        assert counts(server, RELOADED)["cache_hit"] == 0, "what was counted goes with the load"
        assert asked.run(RELOADED, array) == 1001


def _ready(client: Any) -> list[dict[str, Any]]:
    return [row for row in client.get_model_repository_index() if row.get("state") == "READY"]


def test_hits_keep_the_order_of_requests(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    known = fresh()
    with server.grpc() as client:
        client.infer(ORDERED, grpc_inputs({"IN": known}))
        client.start_stream(lambda result, error: answers.put(error or result))
        slow = {"IN": fresh(), "DELAY_MS": np.full((1, 1), 150, np.float32)}
        client.async_stream_infer(ORDERED, grpc_inputs(slow), request_id="slow")
        client.async_stream_infer(ORDERED, grpc_inputs({"IN": known}), request_id="hit")
        ids = [answers.get(timeout=10).get_response().id for _ in range(2)]
        client.stop_stream()
    assert ids == ["slow", "hit"]
    assert counts(server, ORDERED)["cache_hit"] == 1


def settled(array: np.ndarray, *clients: Asked) -> int:
    """The run that all these clients are told, once what was inserted has come to the cache: it is not waited for."""

    def runs() -> set[int]:
        reply = {client.run(SHARED, array) for client in clients}
        return reply if len(reply) == 1 else set()

    (run,) = wait_until(runs)
    return int(run)


def test_gateways_share_a_cache_in_the_broker(pair: list[OwnGateway], server: Server) -> None:
    first, second = Asked(pair[0], "http"), Asked(pair[1], "grpc")
    before = counts(server, SHARED)
    with first.client, second.client:
        for length in (4, 75_000):
            array = fresh(length)
            run = settled(array, first, second, first)
            assert first.run(SHARED, array) == second.run(SHARED, array) == run
            assert second.run(SHARED, array, request_id="x") == run
    changed = [added(before, counts(gateway, SHARED)) for gateway in (*pair, server)]
    assert changed[0] == changed[1] == changed[2], "each gateway tells of all"
    assert changed[0]["cache_hit"] >= 6
    assert changed[0]["cache_miss"] == changed[0]["executions"] >= 2
    assert changed[0]["success"] == changed[0]["cache_hit"] + changed[0]["executions"]
    assert pair[0].metrics()["nv_cache_num_hits_per_model", SHARED] >= 6
    bound_bytes = asyncio.run(_with_bucket(server.nats_url, _bound))
    assert bound_bytes == 1_000_000


def test_rubbish_in_the_shared_cache_and_its_loss_cost_hits_only(pair: list[OwnGateway], server: Server) -> None:
    asked = Asked(pair[0], "http")
    with asked.client:
        array = fresh()
        run = settled(array, asked, asked, asked)
        asyncio.run(_with_bucket(server.nats_url, _spoil))
        assert asked.run(SHARED, array) != run
        assert "ignored a malformed entry of the response cache" in pair[0].log()
        other = settled(array, asked, asked, asked)
        asyncio.run(_with_bucket(server.nats_url, _delete))
        assert asked.run(SHARED, array) != other


def test_a_cache_that_the_broker_has_no_room_for_is_told(server: Server, tmp_path: Path) -> None:
    asyncio.run(_with_bucket(server.nats_url, _delete))
    with own_gateway(tmp_path, server, cache_config=["nats,size=9000000000000000"]) as gateway:
        assert "the message broker has no room for a response cache" in gateway.told["error"]


async def _with_bucket(nats_url: str, work: Any) -> Any:
    client = await nats.connect(nats_url)
    try:
        return await work(client.jetstream())
    finally:
        await client.close()


async def _bound(jetstream: Any) -> int:
    return int((await jetstream.stream_info(subjects.CACHE_STREAM)).config.max_bytes)


async def _spoil(jetstream: Any) -> None:
    bucket = await jetstream.key_value(subjects.CACHE_BUCKET)
    for key in await bucket.keys():
        await bucket.put(key, b"rubbish")


async def _delete(jetstream: Any) -> None:
    with contextlib.suppress(NotFoundError):
        await jetstream.delete_stream(subjects.CACHE_STREAM)
