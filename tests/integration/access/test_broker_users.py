"""Users of a real nats-server with the output of `weir nats-permissions --user`: each is the principal of its name."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from tests.support.clients.producers import int64_body, value_of
from tests.support.models.zoo import write_identity, write_streamer
from tests.support.servers.nats import PermittedNats
from tests.support.servers.roles import Start
from tests.support.waiting import eventually, wait_until
from weir.commands.app import main

USERS = ("orders", "camera-7", "stranger")

POLICY = """
roles:
  anonymous:
    rules: [{actions: [health]}]
  caller:
    rules: [{model: fast, actions: [infer]}, {model: streamer, actions: [infer]}, {model: closed, actions: [metadata]}]
broker_users:
  - {user: orders, tenant: acme, roles: [caller]}
  - {user: camera-7, principal: camera, roles: []}
"""


def configuration() -> str:
    """What an operator prints who lets only clients in that are users."""
    printed = io.StringIO()
    roles = "gateway,scheduler,worker,admin"
    words = ["nats-permissions", f"--users={roles}", *(f"--user={name}" for name in USERS)]
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return printed.getvalue()


class Cluster:
    """The roles of a cluster with a policy, behind a broker that knows the users."""

    def __init__(self, folder: Path, *options: str) -> None:
        for name in ("fast", "closed"):
            write_identity(folder / "models", name, "INT64")
        write_streamer(folder / "models", "streamer", "")
        self._logs = {kind: folder / f"{kind}.log" for kind in ("access", "audit")}
        self.nats = PermittedNats(folder / "nats", configuration(), USERS)
        self.start = Start(folder, self.nats)
        self.start("scheduler")
        self.start.worker()
        logs = [f"--{kind}-log={path}" for kind, path in self._logs.items()]
        wait_until(self.start.gateway(*options, *logs).is_ready)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """The lines of the access log or of the audit log."""
        path = self._logs[kind]
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @contextlib.asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[Client]:
        async def ignore(_error: Exception) -> None:
            """nats-server's log has the violations."""

        client = await nats.connect(self.nats.url_of_client(name), inbox_prefix=f"_INBOX.{name}", error_cb=ignore)
        try:
            yield client
        finally:
            await client.close()

    async def ask(self, name: str, subject: str, **headers: str) -> tuple[int, Any]:
        """(status, value or error) of a request of this user."""
        async with self.client(name) as client:
            answer = await client.request(subject, int64_body(7), timeout=20, headers=headers or None)
        status = int((answer.headers or {}).get("Nats-Service-Error-Code", 200))
        return status, value_of(answer.data) if status == 200 else json.loads(answer.data)["error"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("users")
    (folder / "policy.yaml").write_text(POLICY)
    started = Cluster(folder, f"--access-policy={folder / 'policy.yaml'}")
    yield started
    started.start.close()


@pytest.mark.timeout(120)
async def test_each_user_is_the_principal_that_the_policy_names(cluster: Cluster) -> None:
    assert await cluster.ask("orders", "by.orders.infer.fast") == (200, 7)
    assert await cluster.ask("orders", "by.orders.infer.fast.v1") == (200, 7)
    await eventually(lambda: [row for row in cluster.logged("access") if row["model"] == "fast"])
    row = next(row for row in cluster.logged("access") if row["model"] == "fast")
    assert (row["route"], row["status"], row["principal"]) == ("by.{user}.infer.{model}", 200, "orders")
    assert (await cluster.ask("orders", "by.orders.infer.closed"))[0] == 403
    unknown = await cluster.ask("orders", "by.orders.infer.absent")
    assert unknown == (404, "Request for unknown model: 'absent' is not found")
    assert await cluster.ask("camera-7", "by.camera-7.infer.fast") == (404, unknown[1].replace("absent", "fast"))
    assert (await cluster.ask("stranger", "by.stranger.infer.fast"))[0] == 401  # the policy does not name it
    assert (await cluster.ask("orders", "by.orders.infer.fast", Authorization="Bearer weir_x_y"))[0] == 401

    def denied() -> set[tuple[str, ...]]:
        fields = ("principal", "tenant", "credential", "proof", "model")
        return {tuple(row.get(name, "") for name in fields) for row in cluster.logged("audit") if not row["allowed"]}

    expected = {
        ("orders", "acme", "orders", "broker user", "closed"),
        ("camera", "", "camera-7", "broker user", "fast"),
        ("", "", "", "", "fast"),
    }
    await eventually(lambda: expected <= denied())


FORBIDDEN = (
    "by.camera-7.infer.fast",
    "by.camera-7.flow.gateway.1",
    "by.orders.event.fast",
    "by.orders.api.request",
    "infer.fast",
    "infer.fast.v1",
    "event.fast",
    "event.fast.job.x",
    "batch.fast",
    "flow.gateway.1",
    "result.fast.x",
    "$O.requests.C.x",
    "$JS.API.STREAM.INFO.RESULT",
    "_INBOX.camera-7.x",
)
"""Subjects on which the user `orders` must not publish."""


@pytest.mark.timeout(60)
async def test_no_user_publishes_as_another_or_hears_its_responses(cluster: Cluster) -> None:
    before = len(cluster.nats.violations)
    async with cluster.client("orders") as client:
        for subject in FORBIDDEN:
            await client.publish(subject, int64_body(7), reply="_INBOX.orders.forged")
        for subject in ("_INBOX.camera-7.>", "answers.camera-7.>", "_INBOX.>", "by.>", "result.>", "$KV.>"):
            await client.subscribe(subject)
        await client.flush()
        assert value_of((await client.request("by.orders.infer.fast", int64_body(8), timeout=20)).data) == 8
    violations = cluster.nats.violations[before:]
    published = [line for line in violations if "Publish Violation" in line]
    assert [subject for subject in FORBIDDEN if not any(f'Subject "{subject}"' in line for line in published)] == []
    assert sum("Subscription Violation" in line for line in violations) == 6


@pytest.mark.timeout(60)
async def test_a_user_acknowledges_responses_on_its_own_subject(cluster: Cluster) -> None:
    before = len(cluster.nats.violations)
    plan = json.dumps({"responses": 5, "size": 10})
    body = json.dumps({"inputs": [{"name": "PLAN", "datatype": "BYTES", "shape": [1, 1], "data": [plan]}]}).encode()
    async with cluster.client("orders") as client:
        inbox = client.new_inbox()
        coming = await client.subscribe(inbox)
        await client.publish("by.orders.infer.streamer", body, reply=inbox, headers={"Weir-Window": "1"})
        numbers, is_final = 0, False
        while not is_final:
            message = await coming.next_msg(timeout=20)
            is_final = (message.headers or {}).get("Weir-Final") == "true"
            numbers += bool(message.data)
            if not is_final:
                assert message.reply.startswith("by.orders.flow.")
                await client.publish(message.reply, b"")
    assert numbers == 5
    assert cluster.nats.violations[before:] == []


def test_without_a_policy_the_subjects_of_users_work_as_the_plain_ones(tmp_path: Path) -> None:
    open_cluster = Cluster(tmp_path)
    try:
        assert asyncio.run(open_cluster.ask("stranger", "by.stranger.infer.closed")) == (200, 7)
        assert open_cluster.nats.violations == []
    finally:
        open_cluster.start.close()
