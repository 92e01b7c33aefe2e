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

from tests.support.clients.producers import Producer, int64_body, producer, value_of
from tests.support.clients.request_ledger import Ledger
from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity, write_small_zoo
from tests.support.servers.nats import ClusterNode, NatsCluster, replicas_of
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until


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
