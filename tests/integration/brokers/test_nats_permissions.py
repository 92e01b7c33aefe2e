"""The users of `weir nats-permissions` at a real nats-server: each role can do what it needs, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
from nats.js.api import ObjectInfo
from nats.js.errors import ObjectNotFoundError
from nats.js.object_store import ObjectStore

from tests.support.clients.producers import Producer, int64_body, value_of
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.sequences import write_checkpointed
from tests.support.models.zoo import write_identity, write_small_zoo
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.nats import PermittedNats
from tests.support.servers.roles import Start
from tests.support.waiting import eventually, wait_until
from weir.bus.kv.access_keys import AccessKeys
from weir.bus.naming.permissions import USERS, allows, nats_conf, permissions
from weir.bus.nats.connection import Bus
from weir.bus.nats.replies import ReplyInbox
from weir.calls.gateway_api import GatewayApi
from weir.cluster.observation.observer import Observation
from weir.cluster.status.snapshot import ClusterStatus
from weir.commands.app import main
from weir.console.collection.view import ClusterView

CACHED = "response_cache { enable: true }"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    folder = tmp_path_factory.mktemp("permitted")
    write_small_zoo(folder / "models")
    write_checkpointed(folder / "models", "sums", 1)
    write_identity(folder / "models", "cached", "INT64", CACHED)
    write_identity(folder / "elsewhere", "far", "FP32")
    started = Start(folder, PermittedNats(folder / "nats", nats_conf()))
    yield started
    started.close()


@pytest.fixture(scope="module")
def served(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Endpoints:
    shared = ("--allow-client-shm", "--cache-config=nats,size=1000000")
    start("scheduler")
    start("scheduler", "--scale-to-zero")
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    start.worker(*shared, *explicit)
    root = tmp_path_factory.mktemp("jobs")
    gateway = start.gateway(*shared, f"--batch-root={root}")
    gateway.root = root  # type: ignore[attr-defined]
    start("worker", f"--model-repository={start.folder / 'elsewhere'}", *explicit, host="there")
    wait_until(gateway.is_ready)
    wait_until(lambda: gateway.is_ready("far"))
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
        np.testing.assert_array_equal(client.infer("far", http_inputs(large)).as_numpy("OUT"), large["IN"])
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
    console = start("console", "--console-port=0", "--console-allow-changes")
    _use_console(console.facts["console_port"], batch["id"])
    assert console.end() == 0
    capsys.readouterr()
    wait_until(lambda: _is_healthy(permitted, capsys))
    _tool(permitted, "top", "--once")
    asyncio.run(_as_console(permitted.url_of("console")))
    _tool(permitted, "push", str(root.parent.parent / "none"), "--list", status=1)
    assert permitted.violations == []


def _use_console(port: int, job: str) -> None:
    def call(path: str, method: str = "GET", body: bytes | None = None) -> Any:
        url = f"http://127.0.0.1:{port}/api/{path}"
        request = urllib.request.Request(url, body, {"X-Weir-Console": "1"}, method=method)
        with urllib.request.urlopen(request, timeout=15) as answer:
            return json.loads(answer.read() or b"null")

    wait_until(lambda: {row["id"] for row in call("models")["models"]} >= {"fast", "far", "sums"})
    wait_until(lambda: len(call("series")["resolution"][0]["at_ms"]) > 1)
    assert call("status")["state"] == "healthy"
    assert call("models/fast")["metadata"]["inputs"]
    tried = call("try/fast", "POST", int64_body(6))
    assert (tried["status"], tried["response"]["outputs"][0]["data"]) == (200, [6])
    call("models/fast/traffic", "PUT", b'{"weights": {"1": 100}}')
    call("models/fast/traffic", "DELETE")
    assert job in [row["id"] for row in call("jobs")["jobs"]]
    assert call("dead")["letters"] == []
    assert call("requests/five")["record"]["outcome"] == "succeeded"


def _shared(name: str) -> bool:
    Path("/dev/shm", name.strip("/")).write_bytes(bytes(64))
    return True


def _tool(permitted: PermittedNats, *words: str, status: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, f"--nats={permitted.url_of('admin')}"])
    assert ended.value.code == status


def _is_healthy(permitted: PermittedNats, capsys: pytest.CaptureFixture[str]) -> bool:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--json", f"--nats={permitted.url_of('admin')}"])
    status = ClusterStatus.model_validate_json(capsys.readouterr().out)
    roles = sorted(role.role for role in status.roles)
    assert roles == ["gateway", "scheduler", "scheduler", "worker", "worker"]
    return ended.value.code == 0 and len({queue.owner for queue in status.queues}) == 2


async def _as_console(url: str) -> None:
    """Collects state and load, asks a gateway, observes a request, and asks a model, with the rights of a console."""
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "console-permitted", background, role="console")
        view, ticked = ClusterView(bus, "console-permitted", url, 0.5), asyncio.Event()
        await view.start(background, ticked.set)
        api, observation = GatewayApi(bus, "console-permitted"), Observation(bus, "console-permitted")
        answers = ReplyInbox(bus, "answers.console.console-permitted")
        await api.start()
        await answers.start()
        await observation.start()
        observation.watch("fast", 10, 10)
        await bus.flush()
        async with asyncio.timeout(20):
            while not (observation.traces("fast") and observation.batches("fast").batches):
                answer = await answers.request("infer.fast", int64_body(4), timeout_s=10)
                assert value_of(answer.data) == 4
                await ticked.wait()
                ticked.clear()
        assert (await api.request("GET", "/v2/models/fast")).status == 200
        assert {role.role for role in (await view.status()).roles} == {"gateway", "scheduler", "worker"}
        observation.close()
        await bus.close()
        view.stop()


async def test_gateways_follow_the_keys_that_only_the_operator_writes(start: Start) -> None:
    permitted: PermittedNats = start.nats
    before = list(permitted.violations)
    async with asyncio.TaskGroup() as background:
        buses = {
            user: await Bus.connect(permitted.url_of(user), "keys", background, role=user)
            for user in ("gateway", "console", "admin")
        }
        followers = [AccessKeys(buses[user]) for user in ("gateway", "console")]
        for keys in followers:
            await keys.start(is_maker=False)
        operator = AccessKeys(buses["admin"])
        await operator.start()
        await operator.change("a", lambda ring: ring.create("a", ["r"], 1)[0])
        await eventually(lambda: all(keys.get("a") for keys in followers))
        for keys in followers:
            await keys.read_again()
        await operator.change("a", lambda ring: ring.revoke("a"))
        await eventually(lambda: not any(keys.get("a") for keys in followers))
        assert permitted.violations == before
        for user in ("gateway", "console"):
            buses[user].publish("$KV.access_keys.a", b"{}")
            await buses[user].flush()
        await eventually(lambda: len(permitted.violations) == len(before) + 2)
        await operator.read_again()
        assert operator.all() == []
        for bus in buses.values():
            await bus.close()


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


FORGED = (
    "result.fast.forged",
    "$JS.API.STREAM.PURGE.RESULT",
    "$JS.API.STREAM.DELETE.LIVE",
    "$KV.settings.logging",
    "work.anybody",
    "_INBOX_admin.x",
    "event.fast",
    "flow.anybody.1",
)
"""Reply subjects on which a producer must not make a role publish."""


@pytest.mark.timeout(60)
def test_a_producer_may_load_test_a_model(start: Start, served: Endpoints, capsys: pytest.CaptureFixture[str]) -> None:
    permitted: PermittedNats = start.nats
    command = ["perf", "fast", "--protocol=nats", "--shape=IN:1", "--json", "--measure=0.2", "--max-windows=1"]
    with pytest.raises(SystemExit) as done:
        main([*command, f"--url={served.http_place}", f"--nats={permitted.url_of('producer')}"])
    printed = capsys.readouterr()
    assert done.value.code == 0, printed.err
    (level,) = json.loads(printed.out)["levels"]
    assert level["succeeded"] > 0 == level["failed"]
    assert permitted.url_of("producer") not in printed.out  # it has the password


async def test_no_producer_has_a_gateway_publish_where_the_producer_may_not(start: Start, served: Endpoints) -> None:
    permitted: PermittedNats = start.nats
    client = await nats.connect(permitted.url_of("producer"))
    gateway = await nats.connect(permitted.url_of("gateway"), inbox_prefix="_INBOX_gateway")
    jetstream = gateway.jetstream()
    headers, _ = await Producer(client).ask("event.fast", int64_body(5), Nats_Msg_Id="kept")
    assert headers["Weir-Outcome"] == "succeeded"
    before = (await jetstream.stream_info("RESULT")).state
    violations = len(permitted.violations)
    for reply in FORGED:
        await client.publish("infer.fast", int64_body(6), reply=reply)
        await client.publish("$SRV.PING", b"", reply=reply)
    assert value_of((await client.request("infer.fast", int64_body(7), timeout=10)).data) == 7
    assert (await client.request("$SRV.PING.weir", b"", timeout=10)).data
    after = (await jetstream.stream_info("RESULT")).state
    assert (after.messages, after.last_seq) == (before.messages, before.last_seq)
    await jetstream.stream_info("LIVE")
    assert len(permitted.violations) == violations, "the gateway has tried"
    assert "which is reserved" in start.logs()
    # Not reserved, and yet no place where this gateway's user may publish: nats-server has the last word.
    await client.publish("infer.fast", int64_body(8), reply="orders.new")
    async with asyncio.timeout(10):
        while len(permitted.violations) == violations:
            await asyncio.sleep(0.02)
    await client.close()
    await gateway.close()


@pytest.mark.timeout(60)
async def test_a_producer_uploads_a_large_body_and_reads_none(start: Start, served: Endpoints) -> None:
    permitted: PermittedNats = start.nats
    client = await nats.connect(permitted.url_of("producer"))
    jetstream = client.jetstream(timeout=0.5)
    store = UploadOnly("requests", "OBJ_requests", jetstream)
    await store.put("0b0e3a52-upload", int64_body(9))
    headers, body = await Producer(client).ask("event.fast", b"", Nats_Msg_Id="large", Weir_Object="0b0e3a52-upload")
    assert (headers["Weir-Outcome"], value_of(body)) == ("succeeded", 9)
    await store.put("another", int64_body(10))
    for question in ("STREAM.MSG.GET", "DIRECT.GET", "STREAM.PURGE", "STREAM.MSG.DELETE"):
        with pytest.raises(TimeoutError):
            await client.request(f"$JS.API.{question}.OBJ_requests", b'{"seq":1}', timeout=0.3)
    await client.close()


class UploadOnly(ObjectStore):
    """As docs/nats.md has it."""

    async def get_info(self, name: str, show_deleted: bool | None = False) -> ObjectInfo:
        raise ObjectNotFoundError


OTHERS = (
    "anything",
    "live.a",
    "live.a=p1",
    "live.a.s1",
    "cancel.a",
    "work.w",
    "reply.g",
    "ack.g.1",
    "done.s",
    "lost.s.w",
    "inbox.s.a",
    "abandoned.w",
    "drain.a",
    "drained.w",
    "release.w",
    "probe.w",
    "heartbeat.w",
    "presence.gateway.g",
    "presence.scheduler.s",
    "presence.worker.w",
    "presence.query",
    "statistics.query",
    "statistics.last",
    "statistics.answer.g.1",
    "readiness.w",
    "ready.g.1",
    "api.request",
    "api.answer.c.1",
    "presence.console.c",
    "observe.request",
    "observed.c",
    "answers.console.c.1",
    "repository.query",
    "repository.g",
    "cuda-open.h",
    "cuda-close.h",
    "cuda-opened.g.1",
    "cached.g.1",
    "flow.g.1",
    "infer.a",
    "infer.a.v1",
    "by.orders.infer.a",
    "by.orders.infer.a.v1",
    "by.orders.flow.g.1",
    "event.a",
    "event.a.v1",
    "event.a.job.x",
    "event.a.job.x.v1",
    "batch.a",
    "result.a.x",
    "dead.a",
    "durable.cancel",
    "durable-inbox.g.event.a.1",
    "lost-attempts.g",
    "found.g.1",
    "stored.g.1",
    "callback.x.y",
    "fetch.w",
    "fetched.g.1",
    "fetched.g.1.0",
    "owner.a",
    "_INBOX.x.y",
    "_INBOX_gateway.x",
    "_INBOX_scheduler.x",
    "_INBOX_worker.x",
    "_INBOX_admin.x",
    "_INBOX_console.x",
    "answers.x",
    "$KV.registry.w",
    "$KV.settings.logging",
    "$KV.models.a",
    "$KV.client-regions.h.r",
    "$KV.sequence-states.a.1.s.1.0.0",
    "$KV.response-cache.abc",
    "$KV.queue-owners.a",
    "$KV.known-models.a",
    "$KV.leases.intake.a",
    "$KV.jobs.j",
    "$KV.repository-models.a",
    "$O.requests.C.x",
    "$O.results.C.x",
    "$O.model-files.C.x",
    "$O.repository-models.C.x",
    "$JS.ACK.LIVE.live-a.1.1.1.1.0",
    "$JS.ACK.QUEUE.event-a.1.1.1.1.0",
    "$JS.API.INFO",
    "$JS.API.STREAM.NAMES",
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.CREATE.LIVE",
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.STREAM.DELETE.QUEUE",
    "$JS.API.STREAM.DELETE.LIVE",
    "$JS.API.STREAM.DELETE.KV_queue-owners",
    "$JS.API.STREAM.DELETE.KV_registry",
    "$JS.API.STREAM.PURGE.QUEUE",
    "$JS.API.STREAM.PURGE.DEAD",
    "$JS.API.STREAM.PURGE.KV_sequence-states",
    "$JS.API.STREAM.MSG.GET.QUEUE",
    "$JS.API.STREAM.MSG.GET.LIVE",
    "$JS.API.STREAM.MSG.GET.OBJ_requests",
    "$JS.API.DIRECT.GET.OBJ_requests",
    "$JS.API.STREAM.PURGE.OBJ_requests",
    "$JS.API.STREAM.MSG.DELETE.OBJ_requests",
    "$JS.API.STREAM.MSG.DELETE.RESULT",
    "$JS.API.STREAM.UPDATE.QUEUE",
    "$JS.API.STREAM.SNAPSHOT.QUEUE",
    "$JS.API.DIRECT.GET.KV_response-cache.x",
    "$JS.API.DIRECT.GET.RESULT.result.a.x",
    "$JS.API.CONSUMER.CREATE.LIVE.live-a",
    "$JS.API.CONSUMER.CREATE.QUEUE.event-a",
    "$JS.API.CONSUMER.DELETE.LIVE.live-a",
    "$JS.API.CONSUMER.MSG.NEXT.LIVE.live-a",
    "$JS.API.CONSUMER.MSG.NEXT.QUEUE.event-a",
    "$JS.API.CONSUMER.MSG.NEXT.RESULT.x",
    "$JS.API.META.LEADER.STEPDOWN",
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.SERVER.PING.JSZ",
    "$SRV.PING",
    "live.>",
    "work.*",
    "_INBOX.>",
    "$JS.API.>",
    "$SYS.>",
    ">",
)
"""Subjects of all kinds; those with wildcards are for subscriptions."""


@pytest.mark.parametrize("user", USERS)
async def test_what_is_allowed_is_what_the_table_says(start: Start, user: str) -> None:
    permitted: PermittedNats = start.nats
    refused: set[tuple[str, str]] = set()
    may = permissions()[user]

    async def hear(error: Exception) -> None:
        found = re.search(r'permissions violation for (publish|subscription) to "([^"]+)"', str(error).lower())
        if found is not None:
            refused.add((found[1], found[2]))

    client = await nats.connect(permitted.url_of(user), error_cb=hear, allow_reconnect=False)
    tried: dict[tuple[str, str], bool] = {}
    for subject in OTHERS:
        tried["subscription", subject.lower()] = allows(may.subscribe, subject)
        await client.subscribe(subject)
        if "*" not in subject and ">" not in subject:
            tried["publish", subject.lower()] = allows(may.publish, subject)
            # To where nobody listens, and as what nobody takes: it is about what the server says of it.
            await client.publish(subject, b"")
    await client.flush()
    async with asyncio.timeout(10):
        while refused != {cell for cell, allowed in tried.items() if not allowed}:
            await asyncio.sleep(0.05)
    await client.close()
    print(f"{user}: {len(tried)} cells, {sum(tried.values())} allowed")
