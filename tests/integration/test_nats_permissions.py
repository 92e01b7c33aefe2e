"""The users of `weir nats-permissions` at a real nats-server: each role can do all that it must, and nothing else."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
import tritonclient.grpc
from asking import grpc_inputs, http_inputs
from endpoints import Endpoints
from model_zoo import write_identity, write_small_zoo
from nats_servers import PermittedNats
from producers import Producer, int64_body, value_of
from role_starter import Start
from sequence_zoo import write_checkpointed
from serving import wait_until

from bus.permissions import USERS, allows, nats_conf, permissions
from weir.cli import main

CACHED = "response_cache { enable: true }"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    folder = tmp_path_factory.mktemp("permitted")
    write_small_zoo(folder / "models")
    write_checkpointed(folder / "models", "sums", 1)
    write_identity(folder / "models", "cached", "INT64", CACHED)
    started = Start(folder, PermittedNats(folder / "nats", nats_conf()))
    yield started
    started.close()


@pytest.fixture(scope="module")
def served(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Endpoints:
    shared = ("--allow-client-shm", "--cache-config=nats,size=1000000")
    start("scheduler")
    start.worker(*shared, "--model-control-mode=explicit", "--load-model=*")
    root = tmp_path_factory.mktemp("jobs")
    gateway = start.gateway(*shared, "--model-control-mode=explicit", f"--batch-root={root}")
    gateway.root = root  # type: ignore[attr-defined]
    wait_until(gateway.is_ready)
    return gateway


def asked(served: Endpoints, method: str, path: str, body: Any = None, **headers: str) -> Any:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{served.http_place}{path}", data, named, method=method)
    with urllib.request.urlopen(request, timeout=15) as answer:
        return json.loads(answer.read() or b"null")


@pytest.mark.timeout(120)
def test_each_role_can_do_what_it_must(start: Start, served: Endpoints, capsys: pytest.CaptureFixture[str]) -> None:
    permitted: PermittedNats = start.nats
    one = {"IN": np.array([[7]], np.int64)}
    large = {"IN": np.arange(150_000, dtype=np.float32).reshape(1, -1)}
    with served.http() as client, served.grpc() as grpc:
        for _ in range(2):
            assert client.infer("cached", http_inputs(one)).as_numpy("OUT") == 7
        assert grpc.infer("fast", grpc_inputs(one)).as_numpy("OUT") == 7
        np.testing.assert_array_equal(client.infer("identity_FP32", http_inputs(large)).as_numpy("OUT"), large["IN"])
        for step in range(3):
            flags = {"sequence_id": 5, "sequence_start": step == 0, "sequence_end": step == 2}
            total = client.infer("sums", http_inputs({"IN": np.ones((1, 1), np.float32)}), **flags).as_numpy("OUT")
            assert total == step + 1
        client.register_system_shared_memory("region", "/permitted", 64) if _shared("/permitted") else None
        assert client.get_system_shared_memory_status()
        client.unregister_system_shared_memory()
        client.unload_model("fast")
        wait_until(lambda: not served.is_ready("fast"))
        client.load_model("fast")
        wait_until(lambda: served.is_ready("fast"))
        client.load_model("fast", config=json.dumps({"max_batch_size": 4}))
        client.update_log_settings({"log_verbose_level": 0})
        client.update_trace_settings("fast", {"trace_rate": "100"})
        assert client.get_inference_statistics()["model_stats"]
        assert client.get_model_repository_index()
        assert served.metrics()
    job = asked(served, "POST", "/v2/models/fast/infer", int64_body(3), Prefer="respond-async")
    wait_until(lambda: asked(served, "GET", f"/v2/jobs/{job['id']}").get("ended"))
    asyncio.run(_as_producer(permitted.url_of("producer")))
    root: Path = served.root  # type: ignore[attr-defined]
    (root / "in.jsonl").write_text("".join(json.dumps(json.loads(int64_body(n))) + "\n" for n in range(20)))
    batch = asked(
        served, "POST", "/v2/jobs", {"model": "fast", "input": str(root / "in.jsonl"), "output": str(root / "out")}
    )
    wait_until(lambda: asked(served, "GET", f"/v2/jobs/{batch['id']}")["state"] in ("completed", "done", "succeeded"))
    _tool(permitted, "dead", "list")
    _tool(permitted, "push", str(root.parent.parent / "none"), "--list", status=1)
    assert permitted.violations == []


def _shared(name: str) -> bool:
    Path("/dev/shm", name.strip("/")).write_bytes(bytes(64))
    return True


def _tool(permitted: PermittedNats, *words: str, status: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, f"--nats={permitted.url_of('admin')}"])
    assert ended.value.code == status


async def _as_producer(url: str) -> None:
    client = await nats.connect(url)
    producer = Producer(client)
    answer = await client.request("infer.fast", int64_body(4), timeout=10)
    assert value_of(answer.data) == 4
    headers, body = await producer.ask("event.fast", int64_body(5), Nats_Msg_Id="five")
    assert value_of(body) == 5
    headers, body = await producer.record("fast", "five")
    assert headers["Weir-Outcome"] == "succeeded"
    await client.close()
