"""A server whose policy limits the requests in flight of owners: refused at every door, also after a scheduler has died."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nats
import numpy as np
import pytest

from tests.support.clients.stock import grpc_inputs
from tests.support.models.gated import Asked, write_gated_model
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import wait_until

POLICY = """
roles:
  anonymous:
    rules: [{actions: [health, metrics]}]
  caller:
    rules: [{actions: [infer, health, metadata]}]
    limits: {in_flight: 2, weight: 3}
  flood:
    rules: [{actions: [infer]}]
"""
LIMIT = "too many requests in flight: the access policy allows 'key %s' 2 at this model"


@dataclass
class Owners:
    server: Server
    client: Any
    keys: dict[str, str]

    def ask(self, owner: str, value: int = 1) -> Asked:
        """Sends a request; a `value` of 0 keeps the model busy until `release`."""
        return Asked(self.client, "m", value, 1, {"headers": {"authorization": f"Bearer {self.keys[owner]}"}})

    def release(self, asked: list[Asked]) -> None:
        """Lets the model go on until these have their responses: one that was running may run again."""

        def have_ended() -> bool:
            (self.server.folder / "models" / "m" / "go").touch()
            return all(each.is_over for each in asked)

        wait_until(have_ended)
        assert [each.output("BATCH") for each in asked] == [1] * len(asked)

    def waiting(self) -> float:
        return self.server.metrics()["nv_inference_pending_request_count", "m"]

    def post(self, path: str, owner: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[owner]}"}
        return httpx.post(f"http://{self.server.http_place}{path}", json=body, headers=headers, timeout=60.0)


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    write_gated_model(tmp_path / "models", "m", "")
    (tmp_path / "policy.yaml").write_text(POLICY)
    with Server(tmp_path, tmp_path / "models", f"--access-policy={tmp_path / 'policy.yaml'}") as server:
        keys = {}
        for name, role in (("ann", "caller"), ("bob", "caller"), ("eve", "flood")):
            words = [sys.executable, "-P", "-m", "weir", "key", "create", name, f"--role={role}"]
            made = subprocess.run(
                [*words, f"--nats={server.nats_url}"],
                env=clean_environment(tmp_path),
                capture_output=True,
                text=True,
                timeout=60.0,
            )
            assert made.returncode == 0, made.stderr
            keys[name] = made.stdout.strip()
        with server.grpc() as client:
            yield Owners(server, client, keys)


def over_http(owners: Owners) -> tuple[str, str]:
    inputs = [{"name": "VALUE", "shape": [1, 1], "datatype": "INT64", "data": [1]}]
    response = owners.post("/v2/models/m/infer", "ann", {"inputs": inputs})
    assert response.headers["retry-after"] == "1"
    return str(response.status_code), response.json()["error"]


def over_generate(owners: Owners) -> tuple[str, str]:
    response = owners.post("/v2/models/m/generate", "ann", {"VALUE": 1})
    assert response.headers["retry-after"] == "1"
    return str(response.status_code), response.json()["error"]


def over_grpc(owners: Owners) -> tuple[str, str]:
    code, text = owners.ask("ann").refusal
    assert code == "RESOURCE_EXHAUSTED"
    return "429", text


def over_grpc_stream(owners: Owners) -> tuple[str, str]:
    found: list[Any] = []
    with owners.server.grpc() as client:
        headers = {"authorization": f"Bearer {owners.keys['ann']}", "triton_grpc_error": "true"}
        client.start_stream(lambda result, error: found.append(error), headers=headers)
        client.async_stream_infer("m", grpc_inputs({"VALUE": np.full((1, 1), 1, np.int64)}))
        wait_until(lambda: found)
    assert found[0].status() == "StatusCode.RESOURCE_EXHAUSTED"
    return "429", found[0].message()


async def over_nats(owners: Owners) -> tuple[str, str]:
    client = await nats.connect(owners.server.nats_url)
    try:
        inputs = [{"name": "VALUE", "shape": [1, 1], "datatype": "INT64", "data": [1]}]
        headers = {"authorization": f"Bearer {owners.keys['ann']}"}
        answer = await client.request("infer.m", json.dumps({"inputs": inputs}).encode(), 60.0, headers=headers)
    finally:
        await client.close()
    assert answer.headers["Retry-After"] == "1"
    return answer.headers["Nats-Service-Error-Code"], answer.headers["Nats-Service-Error"]


def callers(owners: Owners) -> set[tuple[str, int, int]]:
    """Who has how many requests in flight and has been refused how many, as `weir status` prints it."""
    server = owners.server
    words = [sys.executable, "-P", "-m", "weir", "status", "--json", f"--nats={server.nats_url}"]
    run = subprocess.run(words, env=clean_environment(server.folder), capture_output=True, text=True, timeout=60.0)
    (queue,) = json.loads(run.stdout)["queues"]
    return {(one["name"], one["in_flight"], one["refused"]) for one in queue["callers"]}


async def test_every_door_refuses_more_than_the_limit_and_a_new_scheduler_does_too(owners: Owners) -> None:
    refused = ("429", LIMIT % "ann")
    doors: list[Callable[[Owners], tuple[str, str]]] = [over_http, over_generate, over_grpc, over_grpc_stream]
    asked = [owners.ask("ann", 0)]
    wait_until((owners.server.folder / "models" / "m" / "running").exists)
    asked.append(owners.ask("ann"))
    wait_until(lambda: owners.waiting() == 1)
    for door in doors:
        assert door(owners) == refused, door.__name__
    assert await over_nats(owners) == refused
    asked.append(owners.ask("bob"))
    wait_until(lambda: owners.waiting() == 2)

    assert callers(owners) == {("key ann", 2, 5), ("key bob", 1, 0)}
    owners.server.kill("scheduler")
    # It is behind the others in the stream: the next scheduler counts them first.
    assert over_http(owners) == refused

    owners.release(asked)
    owners.release([owners.ask("ann"), owners.ask("ann")])


def test_one_request_waits_for_a_turn_of_an_owner_with_many(owners: Owners) -> None:
    asked = [owners.ask("eve", 0)]
    wait_until((owners.server.folder / "models" / "m" / "running").exists)
    asked += [owners.ask("eve") for _ in range(12)]
    wait_until(lambda: owners.waiting() == 12)
    asked.append(owners.ask("bob"))
    wait_until(lambda: owners.waiting() == 13)
    owners.release(asked)
    # Before it: the request that kept the model busy, one sent to the instance already, one whose turn it was.
    assert asked[-1].output("TURN") <= 3
    assert max(each.output("TURN") for each in asked[:-1]) == 13
