"""What belongs to one owner is to another as if it were not there; producers of durable requests prove who they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import nats
import pytest

from tests.support.access.served import Guarded, infer_body, weir
from tests.support.models.ensembles import write_ensemble
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import Tensors, write_identity
from tests.support.waiting import wait_until

POLICY = """
response_cache: owner
roles:
  anonymous: {rules: [{actions: [health, metrics]}]}
  caller: {rules: [{model: "net*", actions: [infer, jobs, metadata]}]}
  broker: {rules: [{model: "net*", actions: [infer, jobs]}], acts_for_tenants: true}
  operator: {rules: [{actions: ["*"]}], acts_for_tenants: true}
"""


class World:
    def __init__(self, server: Guarded) -> None:
        self.server = server
        self.alice = server.new_key("alice", "caller", "--tenant=acme")
        self.anna = server.new_key("anna", "caller", "--tenant=acme")
        self.bob = server.new_key("bob", "caller")
        self.broker = server.new_key("broker", "broker")
        self.operator = server.new_key("operator", "operator")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("owners")
    for name in ("net", "other"):
        write_identity(folder / "models", name, "FP32")
    write_accumulator(folder / "models", "net_sum")
    number: Tensors = {"IN": ("FP32", [1])}
    steps = [("net_sum", {"IN": "IN"}, {"OUT": "OUT"})]
    write_ensemble(folder / "models", "net_steps", number, {"OUT": ("FP32", [1])}, steps, batch=4)
    write_identity(folder / "models", "net_cached", "FP32", "response_cache { enable: true }")
    (folder / "batch").mkdir()
    (folder / "batch" / "in.jsonl").write_text(json.dumps(infer_body()) + "\n")
    with Guarded(
        folder,
        folder / "models",
        POLICY,
        "--console-port=0",
        "--cache-config=local,size=1000000",
        f"--batch-root={folder / 'batch'}",
    ) as server:
        yield World(server)


def accepted(world: World, key: str, **headers: str) -> str:
    answer = world.server.ask(
        "POST", "/v2/models/net/infer", key, json=infer_body(), headers={"prefer": "respond-async", **headers}
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_a_request_is_its_owner_s(world: World) -> None:
    ask, id = world.server.ask, accepted(world, world.alice)
    wait_until(lambda: ask("GET", f"/v2/jobs/{id}", world.alice).json()["status"] == "succeeded")
    assert ask("GET", f"/v2/jobs/{id}/result", world.anna).status_code == 200  # of the same tenant
    unknown = id[:-1] + ("0" if id[-1] != "0" else "1")
    for method, path in (("GET", ""), ("GET", "/result"), ("POST", "/cancel")):
        hidden, absent = (ask(method, f"/v2/jobs/{each}{path}", world.bob) for each in (id, unknown))
        assert (hidden.status_code, hidden.text.replace(id, unknown)) == (404, absent.text)
    assert ask("DELETE", f"/v2/jobs/{id}", world.bob).status_code == 204  # as for an unknown id
    assert ask("GET", f"/v2/jobs/{id}", world.alice).status_code == 200
    assert ask("GET", f"/v2/jobs/{id}").status_code == 401


def test_an_idempotency_key_is_its_owner_s(world: World) -> None:
    first = accepted(world, world.alice, **{"idempotency-key": "order-1"})
    assert accepted(world, world.anna, **{"idempotency-key": "order-1"}) == first
    assert accepted(world, world.bob, **{"idempotency-key": "order-1"}) != first


def test_the_tenant_is_that_of_the_key_unless_a_role_acts_for_tenants(world: World) -> None:
    forged = accepted(world, world.bob, **{"weir-tenant": "acme"})
    assert world.server.ask("GET", f"/v2/jobs/{forged}", world.alice).status_code == 404
    passed_on = accepted(world, world.broker, **{"weir-tenant": "acme"})
    assert world.server.ask("GET", f"/v2/jobs/{passed_on}", world.alice).status_code == 200


def test_a_job_is_its_owner_s(world: World) -> None:
    ask = world.server.ask
    folder = world.server.folder / "batch"
    spec = {"model": "net", "input": str(folder / "in.jsonl"), "output": str(folder / "out")}
    assert ask("POST", "/v2/jobs", world.alice, json={**spec, "model": "other"}).status_code == 404
    made = ask("POST", "/v2/jobs", world.alice, json=spec)
    assert made.status_code == 202, made.text
    id = made.json()["id"]
    assert ask("GET", f"/v2/jobs/{id}", world.anna).status_code == 200
    hidden, absent = (ask("GET", f"/v2/jobs/{each}", world.bob) for each in (id, "batch-none"))
    assert (hidden.status_code, hidden.text) == (404, absent.text.replace("batch-none", id))
    for verb in ("pause", "resume", "cancel", "retry"):
        assert ask("POST", f"/v2/jobs/{id}/{verb}", world.bob).status_code == 404
    assert ask("DELETE", f"/v2/jobs/{id}", world.bob).status_code == 204
    listed = {key: {job["id"] for job in ask("GET", "/v2/jobs", key).json()["jobs"]} for key in (world.anna, world.bob)}
    assert listed == {world.anna: {id}, world.bob: set()}
    assert id in {job["id"] for job in ask("GET", "/v2/jobs", world.operator).json()["jobs"]}


async def published(world: World, subject: str, headers: dict[str, str] | None, id: str) -> Any:
    """The record of a durable request that is published straight to its subject."""
    client = await nats.connect(world.server.nats_url)
    try:
        stream = client.jetstream()
        sent = {"Nats-Msg-Id": id, **(headers or {})}
        await stream.publish(subject, json.dumps(infer_body()).encode(), headers=sent)
        model = subject.split(".")[1]
        async with asyncio.timeout(30):
            while True:
                try:
                    return await stream.get_last_msg("RESULT", f"result.{model}.{id}")
                except nats.js.errors.NotFoundError:
                    await asyncio.sleep(0.02)
    finally:
        await client.close()


@pytest.mark.parametrize("lane", ["event", "batch"])
async def test_producers_prove_who_they_are(world: World, lane: str) -> None:
    def shown(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}", "Weir-Tenant": "acme"}

    outcomes = {}
    for name, model, headers in (
        ("nothing", "net", None),
        ("bad", "net", shown("weir_0000000000_x")),
        ("bob", "net", shown(world.bob)),
        ("bob-other", "other", shown(world.bob)),
        ("alice", "net", shown(world.alice)),
    ):
        record = await published(world, f"{lane}.{model}", headers, f"{lane}-{name}")
        fields = {field.lower(): value for field, value in record.headers.items()}
        assert not any("weir_" in value for value in fields.values())
        outcomes[name] = fields["weir-status"], fields.get("weir-tenant", "")
    assert outcomes == {
        "nothing": ("401", ""),
        "bad": ("401", "acme"),
        "bob": ("200", ""),
        "bob-other": ("404", "acme"),
        "alice": ("200", "acme"),
    }


def test_a_revoked_key_is_refused_at_every_door(world: World) -> None:
    key = world.server.new_key("short", "caller")
    assert world.server.ask("POST", "/v2/models/net/infer", key, json=infer_body()).status_code == 200
    world.server.revoke("short")
    wait_until(lambda: world.server.ask("POST", "/v2/models/net/infer", key, json=infer_body()).status_code == 401)
    record = asyncio.run(published(world, "event.net", {"Authorization": f"Bearer {key}"}, "revoked"))
    assert record.headers["Weir-Status"] == "401"


def test_the_audit_log_names_who_was_refused_at_each_door(world: World) -> None:
    world.server.ask("POST", "/v2/repository/models/net/load", world.bob)
    asyncio.run(published(world, "event.other", {"Authorization": f"Bearer {world.bob}"}, "audited"))
    console = world.server.printed_value("console")
    headers = {"authorization": f"Bearer {world.bob}"}
    assert httpx.get(f"{console}/api/status", headers=headers).status_code == 403

    def told() -> bool:
        shown = weir(world.server.folder, "audit", "--denied", "--json", f"--nats={world.server.nats_url}")
        events = [json.loads(line) for line in shown.stdout.splitlines()]
        of_bob = {(event["door"], event["action"]) for event in events if event.get("principal") == "bob"}
        return of_bob >= {("http", "load"), ("durable", "infer"), ("console", "console-read")}

    wait_until(told)


def added(world: World, key: str, model: str, value: float, **more: Any) -> tuple[int, Any]:
    body = {
        "parameters": {"sequence_id": 7, **more},
        "inputs": [{"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [value]}],
    }
    answer = world.server.ask("POST", f"/v2/models/{model}/infer", key, json=body)
    document = answer.json()
    return answer.status_code, document["outputs"][0]["data"][0] if "outputs" in document else document["error"]


@pytest.mark.parametrize("model", ["net_sum", "net_steps"])
def test_a_sequence_is_its_owner_s(world: World, model: str) -> None:
    """Equal ids of two owners are two sequences; those of one tenant are one."""
    assert added(world, world.alice, model, 1, sequence_start=True) == (200, 1)
    status, text = added(world, world.bob, model, 10)
    assert status == 400
    assert "sequence 7 to model" in text
    assert "acme" not in text
    assert added(world, world.bob, model, 10, sequence_start=True) == (200, 10)
    assert added(world, world.anna, model, 2) == (200, 3)
    assert added(world, world.bob, model, 20) == (200, 30)
    assert added(world, world.alice, model, 4, sequence_end=True) == (200, 7)
    assert added(world, world.bob, model, 40, sequence_end=True) == (200, 70)


def test_a_cached_response_is_its_owner_s(world: World) -> None:
    def hits() -> float:
        return world.server.metrics()["nv_cache_num_hits_per_model", "net_cached"]

    def ask(key: str) -> None:
        assert world.server.ask("POST", "/v2/models/net_cached/infer", key, json=infer_body()).status_code == 200

    ask(world.alice)
    ask(world.bob)
    assert hits() == 0
    ask(world.anna)
    wait_until(lambda: hits() == 1)
