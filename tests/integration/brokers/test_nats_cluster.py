"""A cluster of three nats-servers loses one: requests continue, and none is lost or recorded twice."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from nats.errors import Error as NatsError

from tests.support.clients.producers import Producer, int64_body, producer, value_of
from tests.support.clients.request_ledger import Ledger
from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity, write_small_zoo
from tests.support.servers.nats import ClusterNode, NatsCluster, replicas_of
from tests.support.servers.roles import Start
from tests.support.waiting import eventually, wait_until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = Start(tmp_path, NatsCluster(tmp_path / "nats"))
    yield started
    started.close()


@pytest.mark.timeout(120)
def test_the_gateway_s_server_is_lost(start: Start, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "INT64")
    start("scheduler")
    start.worker()
    served = start.gateway()
    wait_until(served.is_ready)
    assert asyncio.run(replicas_of(start.nats.url)) == {3}
    values = {"IN": np.arange(4, dtype=np.int64).reshape(1, 4)}
    with served.http() as client:
        answers = [client.infer("identity", http_inputs(values)).as_numpy("OUT")]
        next(node for node in start.nats.nodes if _serves(node, "gateway")).kill()
        answers.append(client.infer("identity", http_inputs(values)).as_numpy("OUT"))
    for answer in answers:
        np.testing.assert_array_equal(answer, values["IN"])


def _serves(node: ClusterNode, role: str) -> bool:
    return any(name.startswith(role) for name in node.clients)


NEEDED = {"API", "QUEUE", "RESULT", "LIVE", "KV_leases", "KV_queue-owners"}
"""What durable requests need, streams with their consumers."""

OURS_S = 2.0
"""How long records may take beyond the elections of nats-server."""


@pytest.mark.timing
@pytest.mark.timeout(300)
def test_records_continue_soon_after_the_election(start: Start, tmp_path: Path) -> None:
    """The leader of the consumer of durable requests is killed, and then that of the records."""
    write_identity(tmp_path / "models", "fast", "INT64", "dynamic_batching { }")
    start("scheduler")
    start.worker()
    wait_until(start.gateway().is_ready)
    cluster: NatsCluster = start.nats

    def kill(what: str) -> tuple[float, float]:
        """Kills the server that leads it; returns when (unix), and when the last that is needed had another leader."""
        victim = wait_until(
            lambda: next((node for node in cluster.nodes if any(name.startswith(what) for name in node.led)), None)
        )
        led = {name for name in victim.led if name.split(" ")[0] in NEEDED}
        killed_s, killed_unix_s = time.monotonic(), time.time()
        victim.kill()
        elected = cluster.elections(victim, led, killed_s)
        assert elected.keys() == led
        return killed_unix_s, killed_unix_s + max(elected.values())

    async def one(to: Producer, what: str, first: int) -> float:
        """Seconds from the last election to the first record after it; everything that was sent has one record."""
        stop, sent = asyncio.Event(), list[int]()
        sending = [asyncio.create_task(_send(to, stop, sent, count(first + lane, 2))) for lane in range(2)]
        await eventually(lambda: len(sent) > 20)
        killed_s, elected_s = await asyncio.to_thread(kill, what)
        while not (later := [at_s for at_s in await _recorded_s(to) if at_s > elected_s]):
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*sending)
        for node in cluster.nodes:
            if node.process.poll() is not None:
                node.start()
        await asyncio.to_thread(wait_until, cluster.is_whole, 60.0)
        print(
            f"leader of {what}: elections {elected_s - killed_s:.2f} s, first record {min(later) - elected_s:.2f} s later"
        )
        return min(later) - elected_s

    async def both() -> list[float]:
        async with producer(cluster.url) as to:
            found = [await one(to, what, 10_000 * turn) for turn, what in enumerate(("QUEUE event-fast", "RESULT"))]
            records = await to.records("fast")
            assert len({id for id, _ in records}) == len(records)
            assert all(id == f"n{value_of(body)}" for id, (_, body) in records)
            return found

    assert max(asyncio.run(both())) < OURS_S


async def _recorded_s(to: Producer) -> list[float]:
    """When the last record was stored, in unix time; nothing while the stream has no leader."""
    try:
        state = (await to.jetstream.stream_info("RESULT")).state
        found = await to.jetstream.get_msg("RESULT", state.last_seq)
    except (NatsError, TimeoutError, OSError):
        return []
    return [found.time.timestamp()] if found.time is not None else []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_server_is_lost_under_load(start: Start, tmp_path: Path) -> None:
    """The leaders of JetStream and of both queues, one that leads nothing of these, each in turn, and one that hangs."""
    write_small_zoo(tmp_path / "models")
    cluster: NatsCluster = start.nats
    schedulers = [start("scheduler") for _ in range(2)]
    workers = [start.worker() for _ in range(2)]
    served = start.gateway()
    wait_until(served.is_ready)
    ledger = Ledger(served)
    recoveries: dict[str, float] = {}

    def lose(what: str, node: ClusterNode, how: Callable[[ClusterNode], None] = ClusterNode.kill) -> None:
        ledger.wait_for_answers(time.monotonic())
        moment = time.monotonic()
        how(node)
        recoveries[what] = ledger.wait_for_answers(moment)
        if node.process.poll() is None:
            node.process.send_signal(signal.SIGCONT)
        else:
            node.start()
        wait_until(cluster.is_whole, 60.0)

    def faults() -> None:
        lose("leader of the API", cluster.leader_of(""))
        lose("leader of LIVE", cluster.leader_of("LIVE"))
        lose("leader of QUEUE", cluster.leader_of("QUEUE"))
        leaders = [cluster.leader_of(stream) for stream in ("", "LIVE", "QUEUE")]
        lose("another", next((node for node in cluster.nodes if node not in leaders), cluster.nodes[0]))
        for node in list(cluster.nodes):
            lose(f"{node.name} in its turn", node)
        lose("a leader that hangs", cluster.leader_of("LIVE"), lambda node: node.process.send_signal(signal.SIGSTOP))

    async def durable_load() -> tuple[int, list[tuple[str, int]]]:
        async with producer(cluster.url) as to:
            stop, sent = asyncio.Event(), list[int]()
            sending = [asyncio.create_task(_send(to, stop, sent, numbers)) for numbers in _shares(8)]
            try:
                await asyncio.to_thread(faults)
            finally:
                stop.set()
            await asyncio.gather(*sending)
            await to.settled(len(sent), 120.0)
            return len(sent), [(id, value_of(body)) for id, (_, body) in await to.records("fast")]

    with ledger.sending(120.0):
        total, records = asyncio.run(durable_load())
    wrong = [id for id, value in records if id != f"n{value}"]
    ids = {id for id, _ in records}
    print(ledger.summary("losses of one of three nats-servers", len(recoveries), list(recoveries.values())))
    print({what: round(seconds, 2) for what, seconds in recoveries.items()})
    print(
        f"durable: {total} requests, lost {total - len(ids)}, recorded twice {len(records) - len(ids)}, wrong {len(wrong)}"
    )
    assert (ledger.unanswered, ledger.faults) == (0, [])
    assert (len(ids), len(records), wrong) == (total, total, [])
    assert all(role.process.poll() is None for role in (*schedulers, *workers)), "a role has died meanwhile"


def _shares(count_of: int) -> list[count[int]]:
    return [count(first, count_of) for first in range(count_of)]


async def _send(to: Producer, stop: asyncio.Event, sent: list[int], numbers: count[int]) -> None:
    for number in numbers:
        if stop.is_set():
            return
        await to.send("event.fast", int64_body(number), Nats_Msg_Id=f"n{number}")
        sent.append(number)
        await asyncio.sleep(0.02)
