"""Garbage on the bus is dropped: no role dies of it, and valid requests are answered.

Garbage is derived from real messages: a message of each kind is recorded, then truncated, and each of its fields is
replaced by an invalid value.
"""

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import nats
import numpy as np
import pytest
from nats.aio.msg import Msg

from tests.support.clients.nats_flush import flush
from tests.support.clients.stock import RawConnection, http_inputs, infer_body, post
from tests.support.models.zoo import write_small_zoo
from tests.support.servers.nats import publish_raw
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

STRANGE: list[Any] = [None, True, -1, 2**63, 1.5, "", "x", b"x", [], [[]], {}, {"a": 1}]
PLAIN = [
    b"",
    b"\0",
    b"+ACK",
    b"{}",
    b"[1, 2, 3]",
    b"\xc1",
    b"\x91\x01",
    b"\xdd\xff\xff\xff\xff",
    b"\x94\x01\xc0\xc0\xc0",
]

WORKER_RECORD, MODEL_RECORD = "$KV.registry.worker", "$KV.registry.model"
SCHEDULER_STATISTICS = "statistics of a scheduler"
KINDS = (
    "work",
    "reply",
    "done",
    "cancel",
    "abandoned",
    "release",
    "heartbeat",
    "statistics",
    SCHEDULER_STATISTICS,
    WORKER_RECORD,
    MODEL_RECORD,
    "live",
)


def strange_versions_of(message: bytes) -> Iterator[bytes]:
    """The message cut, with bits turned over, and with each field replaced by something else."""
    draw = random.Random(5)
    for _ in range(10):
        yield message[: draw.randrange(len(message) + 1)]
        position = draw.randrange(len(message)) if message else 0
        yield message[:position] + draw.randbytes(3) + message[position + 3 :]
    yield draw.randbytes(200)
    tree = msgpack.unpackb(message, strict_map_key=False)
    for path in _paths(tree):
        for value in STRANGE:
            changed = copy.deepcopy(tree)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            yield msgpack.packb(changed)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in items:
        yield (*path, key)
        if len(path) < 4:
            yield from _paths(value, (*path, key))


def kind_of(subject: str, data: bytes = b"") -> str:
    first = subject.split(".", 1)[0]
    if first == "statistics" and b"scheduler" in data[:16]:
        return SCHEDULER_STATISTICS
    if first != "$KV":
        return first
    return WORKER_RECORD if subject.count(".") == 2 else MODEL_RECORD


async def _listen(server: Server) -> dict[str, tuple[str, bytes]]:
    """(subject, data) of a real message of each kind, while requests are answered."""
    received: dict[str, tuple[str, bytes]] = {}

    async def hear(message: Msg) -> None:
        if message.data and (kind_of(message.subject) != "live" or "fast" in message.subject):
            received.setdefault(kind_of(message.subject, message.data), (message.subject, message.data))

    client = await nats.connect(server.nats_url)
    await client.subscribe(">", cb=hear)
    bucket = await client.jetstream().key_value("registry")
    for key in await bucket.keys():
        entry = await bucket.get(key)
        assert entry.value is not None
        received.setdefault(kind_of(f"$KV.registry.{key}"), (f"$KV.registry.{key}", entry.value))
    while set(KINDS) - received.keys():
        await asyncio.to_thread(_ask_for_everything, server)
        await client.flush()
    await client.close()
    return received


def _ask_for_everything(server: Server) -> None:
    with server.http() as client:
        client.infer("fast", http_inputs({"IN": np.array([[1, 2]], np.int64)}))
        client.infer("identity_FP32", http_inputs({"IN": np.zeros((1, 100_000), np.float32)}))
    with RawConnection(server.port) as connection:
        arrays = {"VALUE": np.array([[1]], np.int64), "DELAY_MS": np.array([[50]], np.float32)}
        connection.send(post("/v2/models/slow/infer", infer_body(arrays)))
        wait_until(lambda: server.in_flight() >= 1)  # and so statistics are asked for


def assert_serves(server: Server) -> None:
    with server.http(timeout_s=10) as client:
        for number in range(5):
            value = np.array([[number, -number]], np.int64)
            answer = client.infer("fast", http_inputs({"IN": value}))
            np.testing.assert_array_equal(answer.as_numpy("OUT"), value)
    with server.grpc() as client:
        assert client.is_server_live()


async def _publish(server: Server, subject: str, messages: list[bytes]) -> None:
    client = await nats.connect(server.nats_url)
    for message in messages:
        await client.publish(subject, message)
    await flush(client)
    await client.close()


async def _queued_frames(server: Server) -> int:
    client = await nats.connect(server.nats_url)
    info = await client.jetstream().stream_info("LIVE")
    await client.close()
    return int(info.state.messages)


class Target(NamedTuple):
    """A server to be thrown at, its processes, and a real message of each kind that was heard on its bus."""

    server: Server
    pids: dict[str, int]
    received: dict[str, tuple[str, bytes]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server all of whose messages can be heard at the broker."""
    folder = tmp_path_factory.mktemp("garbage")
    write_small_zoo(folder / "models")
    with Server(folder, folder / "models", environment={"WEIR_LINKS": "off"}) as server:
        yield Target(server, server.pids(), asyncio.run(_listen(server)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_like_a_message(target: Target, kind: str) -> None:
    subject, real = target.received[kind]
    if kind.startswith("$KV"):
        # Not a live worker's key: whoever may write that may speak for the worker.
        subject = "$KV.registry.x" if kind == WORKER_RECORD else "$KV.registry.x.fast"
    messages = [*PLAIN, *strange_versions_of(real)]
    asyncio.run(_publish(target.server, subject, messages))
    assert_serves(target.server)
    wait_until(lambda: target.server.in_flight() == 0)
    assert target.server.pids() == target.pids


@pytest.mark.parametrize(
    "subject",
    ["statistics.query", "statistics.gateway-x", "heartbeat.x", "cancel.nowhere", "live.nowhere", "probe.x", "nothing"],
)
def test_what_looks_like_nothing(target: Target, subject: str) -> None:
    asyncio.run(_publish(target.server, subject, [*PLAIN, random.Random(1).randbytes(300)]))
    assert_serves(target.server)
    assert target.server.pids() == target.pids


def test_garbage_does_not_stay_in_a_model_s_queue(target: Target) -> None:
    subject, real = target.received["live"]
    before = asyncio.run(_queued_frames(target.server))
    asyncio.run(_publish(target.server, subject, [*PLAIN, *strange_versions_of(real)]))
    wait_until(lambda: asyncio.run(_queued_frames(target.server)) <= before)


def test_who_starts_anew_with_what_was_left_in_the_registry_starts_well(target: Target) -> None:
    for kind, key in ((WORKER_RECORD, "y"), (MODEL_RECORD, "y.fast")):
        real = target.received[kind][1]
        messages = [*PLAIN, *strange_versions_of(real)]
        # Each under a key of its own: a bucket keeps the last one only.
        for number, message in enumerate(messages):
            asyncio.run(_publish(target.server, f"$KV.registry.{key}{number}", [message]))
    for role in ("scheduler", "gateway", "worker"):
        target.server.kill(role)
        target.server.wait_ready("fast")
    assert_serves(target.server)


def test_bytes_that_are_not_utf8_cost_no_connection(target: Target) -> None:
    pids = target.server.pids()
    lost = target.server.log().count("lost the connection to nats-server")
    body = infer_body({"IN": np.array([[1]], np.int64)})
    for subject, reply in (
        (b"infer.fast", b"_INBOX.\xff\xfe"),
        (b"infer.\xff", b"_INBOX.x"),
        (b"infer.fast.v\xff", b"_INBOX.x"),
        (b"$SRV.PING", b"_INBOX.\xff"),
        (b"heartbeat.\xff", b""),
        (b"$KV.registry.\xff", b""),
        (b"$KV.models.\xff", b""),
        (b"$KV.settings.trace.\xff", b""),
        (b"presence.worker.\xff", b""),
        (b"statistics.query", b"answer.\xff"),
        (b"repository.query", b"answer.\xff"),
    ):
        publish_raw(target.server.nats_url, (subject, reply, body), (subject, reply, b""))
    assert_serves(target.server)
    assert target.server.log().count("lost the connection to nats-server") == lost
    assert target.server.pids() == pids
