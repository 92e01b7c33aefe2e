"""Limits of rates and sizes at the doors of a real server with two gateways, one of which decides."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import nats
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from tritonclient.utils import InferenceServerException

from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.access.keys.ring import KeyRing
from weir.bus.naming import durable_subjects
from weir.cluster.access.key_file import KeyFile
from weir.schemas.kserve.triton_messages import messages

MODEL = "echo"
RARE = 0.02  # requests a second: one, and the next one after 50 s
BODY = json.dumps({"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4}]}).encode()


def role(**limits: Any) -> dict[str, Any]:
    return {"rules": [{"actions": ["infer", "metadata", "metrics", "jobs", "shm"]}], "limits": limits}


POLICY: dict[str, Any] = {
    "roles": {
        "rare": role(requests_per_s=RARE),
        "small": role(body_bytes=len(BODY)),
        "slow": role(bytes_per_s=len(BODY) / 100),
        "changed": role(requests_per_s=RARE),
        "free": role(requests_per_s=1e6),
        "memory": role(shared_memory_bytes=40),
        "kept": role(stored_results=2),
    }
}


class World(NamedTuple):
    server: Server
    folder: Path
    keys: dict[str, str]

    def infer(self, key: str, body: bytes = BODY, path: str = "infer", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[key]}", **more.pop("headers", {})}
        url = f"http://{self.server.http_place}/v2/models/{MODEL}/{path}"
        return httpx.post(url, content=more.pop("content", body), headers=headers, timeout=30.0)

    def decides(self) -> list[int]:
        """The gateways that have decided, one after the other."""
        return [
            int(pid)
            for pid in re.findall(r" (\d+) gateway .*this gateway decides about rate limits", self.server.log())
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("rates")
    write_identity(folder / "models", MODEL, "FP32")
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    keys: dict[str, str] = {}
    names = {
        "http": "rare", "generate": "rare", "grpc": "rare", "nats": "rare", "killed": "rare", "audit": "rare",
        "small": "small", "slow": "slow", "changed": "changed", "free": "free",
        "alice": "memory", "bob": "free", "carol": "kept", "dave": "kept",
        "async": "rare", "async grpc": "rare", "jobs": "rare", "stream": "rare", "large": "rare",
    }  # fmt: skip
    for name, of in names.items():

        def create(ring: KeyRing, name: str = name, of: str = of) -> KeyRing:
            ring, keys[name] = ring.create(name, [of], time.time())
            return ring

        KeyFile(folder / "keys.json").change(create)
    options = [f"--access-policy={folder / 'policy.yaml'}", f"--access-keys={folder / 'keys.json'}", "--gateways=2"]
    options.append("--allow-client-shm=true")
    with Server(folder, folder / "models", *options) as server:
        world = World(server, folder, keys)
        wait_until(lambda: world.infer("free").status_code == 200 and world.decides())
        yield world


def test_http_answers_429_with_the_headers_that_clients_know(world: World) -> None:
    assert world.infer("http").status_code == 200
    for refused in (world.infer("http"), world.infer("http", path="generate", body=b"{}")):
        assert refused.status_code == 429
        assert refused.json() == {"error": "limit of 0.02 requests/s of 'http' is used up"}
        assert 1 <= int(refused.headers["retry-after"]) <= 50
        assert refused.headers["ratelimit"] == f'"requests";r=0;t={refused.headers["retry-after"]}'
        assert refused.headers["ratelimit-policy"] == '"requests";q=1;w=50'
        assert refused.headers["x-ratelimit-limit"] == "1"
        assert refused.headers["x-ratelimit-remaining"] == "0"
        assert refused.headers["x-ratelimit-reset"] == refused.headers["retry-after"]


def test_routes_of_the_application_take_a_token_too(world: World) -> None:
    assert world.infer("generate", path="generate", body=b"{}").status_code == 400  # the model has no text input
    assert world.infer("generate").status_code == 429


def test_results_are_kept_up_to_the_limit(world: World) -> None:
    # One connection is to one gateway: what the other has accepted it knows half a second later.
    client = httpx.Client(base_url=f"http://{world.server.http_place}", timeout=30.0)

    def later(key: str, **headers: str) -> httpx.Response:
        shown = {"authorization": f"Bearer {world.keys[key]}", "prefer": "respond-async", **headers}
        return client.post(f"/v2/models/{MODEL}/infer", content=BODY, headers=shown)

    first, second = later("carol", **{"idempotency-key": "one"}), later("carol")
    assert (first.status_code, second.status_code) == (202, 202)
    refused = later("carol")
    assert refused.status_code == 429
    assert refused.json() == {"error": "limit of 2 stored requests and results of 'carol' is used up"}
    metadata = [("authorization", f"Bearer {world.keys['carol']}"), ("prefer", "respond-async")]
    request = messages.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([0.0] * 4)
    with grpc.insecure_channel(world.server.grpc_place) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            type(request).SerializeToString,
            messages.ModelInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as told:
            call(request, metadata=metadata, timeout=30.0)
    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    again = later("carol", **{"idempotency-key": "one"})
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"]), "it is stored already"
    assert later("dave").status_code == later("bob").status_code == 202, "others have limits of their own"
    # Ended or not, it counts until it is deleted.
    url, shown = second.headers["location"], {"authorization": f"Bearer {world.keys['carol']}"}
    wait_until(lambda: client.get(url, headers=shown).json()["status"] == "succeeded")
    assert later("carol").status_code == 429
    wait_until(lambda: not asyncio.run(_waits_in_the_queue(world, second.json()["id"])))
    assert client.delete(url, headers=shown).status_code == 204
    wait_until(lambda: later("carol").status_code == 202)
    assert later("carol").status_code == 429
    client.close()


async def _waits_in_the_queue(world: World, id: str) -> bool:
    async with await nats.connect(world.server.nats_url) as client:
        stream = await client.jetstream().stream_info(
            durable_subjects.QUEUE_STREAM, subjects_filter=durable_subjects.any_job_event(id, MODEL)[0]
        )
        return bool(stream.state.subjects)


def test_metadata_is_not_limited(world: World) -> None:
    wait_until(lambda: world.infer("http").status_code == 429)
    headers = {"authorization": f"Bearer {world.keys['http']}"}
    assert httpx.get(f"http://{world.server.http_place}/v2/models/{MODEL}", headers=headers).status_code == 200


def test_grpc_answers_resource_exhausted_with_the_delay(world: World) -> None:
    request = messages.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="IN", datatype="FP32", shape=[1, 4])
    tensor.contents.fp32_contents.extend([0.0] * 4)
    metadata = [("authorization", f"Bearer {world.keys['grpc']}")]
    with grpc.insecure_channel(world.server.grpc_place) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            type(request).SerializeToString,
            messages.ModelInferResponse.FromString,
        )
        assert call(request, metadata=metadata, timeout=30.0).model_name == MODEL
        with pytest.raises(grpc.RpcError) as refused:
            call(request, metadata=metadata, timeout=30.0)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details() == "limit of 0.02 requests/s of 'grpc' is used up"
    assert 1 <= int(dict(refused.value.trailing_metadata())["retry-after"]) <= 50


def test_what_is_stored_for_later_takes_a_token_too(world: World) -> None:
    later = {"prefer": "respond-async"}
    assert world.infer("async", headers=later).status_code == 202
    assert world.infer("async", headers=later).status_code == 429
    url, headers = f"http://{world.server.http_place}/v2/jobs", {"authorization": f"Bearer {world.keys['jobs']}"}
    assert [httpx.post(url, json={}, headers=headers).status_code for _ in range(2)] == [400, 429]
    assert httpx.get(url, headers=headers).status_code == 200
    tensor = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
    headers = {"authorization": f"Bearer {world.keys['async grpc']}", **later}
    with tritonclient.grpc.InferenceServerClient(world.server.grpc_place) as client:
        assert client.infer(MODEL, [tensor], headers=headers).get_response().parameters["job_id"].string_param
        with pytest.raises(InferenceServerException, match="is used up"):
            client.infer(MODEL, [tensor], headers=headers)


def test_each_message_of_a_stream_takes_a_token(world: World) -> None:
    answers: list[str] = []
    tensor = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
    with tritonclient.grpc.InferenceServerClient(world.server.grpc_place) as client:
        client.start_stream(
            lambda result, error: answers.append(str(error)),
            headers={"authorization": f"Bearer {world.keys['stream']}"},
        )
        for _ in range(3):
            client.async_stream_infer(MODEL, [tensor])
        wait_until(lambda: len(answers) == 3)
        client.stop_stream()
    assert answers[0] == "None"
    assert all("limit of 0.02 requests/s of 'stream' is used up" in each for each in answers[1:])


def test_a_large_body_waits_for_its_token_too(world: World) -> None:
    size = 1 << 20
    tensor = tritonclient.http.InferInput("IN", [1, size // 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, size // 4), np.float32))
    headers = {"authorization": f"Bearer {world.keys['large']}"}
    with world.server.http() as client:
        assert client.infer(MODEL, [tensor], headers=headers).as_numpy("OUT").sum() == size // 4
        with pytest.raises(InferenceServerException, match="is used up"):
            client.infer(MODEL, [tensor], headers=headers)


def test_nats_answers_429_with_the_delay(world: World) -> None:
    async def ask() -> list[dict[str, str]]:
        client = await nats.connect(world.server.nats_url)
        headers = {"Authorization": f"Bearer {world.keys['nats']}"}
        answers = [await client.request(f"infer.{MODEL}", BODY, timeout=30, headers=headers) for _ in range(2)]
        await client.close()
        return [dict(answer.headers or {}) for answer in answers]

    first, second = asyncio.run(ask())
    assert first["Weir-Outcome"] == "succeeded"
    assert second["Nats-Service-Error-Code"] == "429"
    assert 1 <= int(second["Retry-After"]) <= 50
    assert second["RateLimit-Policy"] == '"requests";q=1;w=50'


def test_bytes_count_as_announced_or_as_received(world: World) -> None:
    assert world.infer("slow").status_code == 200
    refused = world.infer("slow")
    assert refused.status_code == 429
    assert "bytes/s of 'slow' is used up" in refused.json()["error"]
    assert refused.headers["ratelimit-policy"].endswith(';qu="content-bytes"')


@pytest.mark.parametrize("path", ["infer", "generate"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_larger_body_than_its_owner_may_send_is_refused(world: World, path: str, is_chunked: bool) -> None:
    long = BODY[:-1] + b" " + BODY[-1:]
    text = f"request of {len(long)} bytes exceeds the limit of {len(BODY)} bytes of 'small'"
    refused = world.infer("small", content=iter([long]) if is_chunked else long, path=path)
    assert (refused.status_code, refused.json()) == (400, {"error": text})
    assert world.infer("small", content=iter([BODY]) if is_chunked else BODY).status_code == 200


def test_refusals_are_counted_by_the_kind_of_limit(world: World) -> None:
    wait_until(lambda: world.infer("audit").status_code == 429)

    def refused() -> float:
        headers = {"authorization": f"Bearer {world.keys['free']}"}
        page = httpx.get(f"http://{world.server.metrics_place}/metrics", headers=headers).text
        return sum(float(row.split()[-1]) for row in page.splitlines() if 'reason="limit_requests"' in row)

    wait_until(lambda: refused() >= 1)


def test_another_limit_applies_while_the_server_runs(world: World) -> None:
    wait_until(lambda: world.infer("changed").status_code == 429)
    policy = json.loads(json.dumps(POLICY))
    policy["roles"]["changed"]["limits"] = {"requests_per_s": 1000}
    (world.folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    wait_until(lambda: world.infer("changed").status_code == 200)
    (world.folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))


@pytest.fixture
def memory() -> Iterator[str]:
    """The key of a shared-memory object of 64 bytes."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="limits-test-") as file:
        file.write(np.arange(16, dtype=np.float32).tobytes())
        file.flush()
        yield f"/{Path(file.name).name}"


def regions(world: World, key: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """A request about system shared memory."""
    headers = {"authorization": f"Bearer {world.keys[key]}"}
    url = f"http://{world.server.http_place}/v2/systemsharedmemory{path}"
    return httpx.get(url, headers=headers) if body is None else httpx.post(url, json=body, headers=headers)


def infer_in(world: World, key: str, region: str, by_grpc: bool) -> tuple[str, list[float]]:
    """The error, and the output, of a request whose input lies in a region."""
    host = world.server.grpc_place if by_grpc else world.server.http_place
    module: Any = tritonclient.grpc if by_grpc else tritonclient.http
    tensor = module.InferInput("IN", [1, 4], "FP32")
    tensor.set_shared_memory(region, 16)
    with module.InferenceServerClient(host) as client:
        try:
            result = client.infer(MODEL, [tensor], headers={"authorization": f"Bearer {world.keys[key]}"})
        except InferenceServerException as error:
            return str(error.message()), []
    return "", result.as_numpy("OUT").ravel().tolist()


@pytest.mark.parametrize("by_grpc", [False, True])
def test_a_region_is_its_owners(world: World, memory: str, by_grpc: bool) -> None:
    unknown = f"Unable to find shared memory region: '{memory[1:]}'"
    place = f"/region/{memory[1:]}"
    first, second = ({"key": memory, "byte_size": 16, "offset": offset} for offset in (0, 16))
    assert regions(world, "alice", f"{place}/register", first).status_code == 200
    assert infer_in(world, "alice", memory[1:], by_grpc) == ("", [0.0, 1.0, 2.0, 3.0])
    assert unknown in infer_in(world, "bob", memory[1:], by_grpc)[0]
    assert regions(world, "bob", f"{place}/status").status_code == 404
    assert regions(world, "bob", "/status").json() == []
    assert regions(world, "bob", f"{place}/register", second).status_code == 200
    assert regions(world, "bob", f"{place}/register", second).status_code == 400  # it has that name already
    assert infer_in(world, "bob", memory[1:], by_grpc) == ("", [4.0, 5.0, 6.0, 7.0])
    assert infer_in(world, "alice", memory[1:], by_grpc) == ("", [0.0, 1.0, 2.0, 3.0])
    assert regions(world, "bob", "/unregister", {}).status_code == 200
    assert regions(world, "bob", "/status").json() == []
    assert [row["name"] for row in regions(world, "alice", "/status").json()] == [memory[1:]]
    assert regions(world, "alice", f"{place}/unregister", {}).status_code == 200
    assert unknown in infer_in(world, "alice", memory[1:], by_grpc)[0]


def test_the_regions_of_an_owner_are_limited_in_bytes(world: World, memory: str) -> None:
    for number, (size, status) in enumerate([(16, 200), (24, 200), (1, 429)]):
        answer = regions(world, "alice", f"/region/part-{number}/register", {"key": memory, "byte_size": size})
        assert answer.status_code == status
    assert answer.json() == {"error": "limit of 40 bytes of shared memory of 'alice' is used up"}
    assert regions(world, "alice", "/region/part-0/unregister", {}).status_code == 200
    assert regions(world, "alice", "/region/part-2/register", {"key": memory, "byte_size": 1}).status_code == 200
    assert regions(world, "alice", "/unregister", {}).status_code == 200


def test_another_gateway_decides_after_the_death_of_the_one_that_did(world: World) -> None:
    assert world.infer("killed").status_code == 200
    before = world.decides()
    psutil.Process(before[-1]).send_signal(signal.SIGKILL)

    def goes_on() -> bool:
        try:
            return world.infer("killed").status_code == 429 and len(world.decides()) > len(before)
        except httpx.TransportError:  # of the gateway that died
            return False

    wait_until(goes_on)
    assert world.decides()[-1] != before[-1]
    assert world.infer("killed").status_code == 429  # no new burst
    wait_until(lambda: world.infer("free").status_code == 200)
