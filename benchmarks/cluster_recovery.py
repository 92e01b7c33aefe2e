"""How long requests stand still after a server of a cluster of three nats-servers is killed that leads streams.

    python -m benchmarks.cluster_recovery --kills 12

A gateway, a scheduler and a worker run on this machine. Durable and live requests are sent continuously. For each server
that is killed (`kill -9`), or suspended, this prints

- election: when the last stream, consumer or API that durable requests need has a leader again, as the monitors of the
  other two servers report it. That is nats-server's own time: no client can do anything before;
- records: when the longest time without a new record in stream RESULT ended;
- live: the same for responses to live requests; 0 where there was no pause;
- ours: records less election.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from nats.js.api import ConsumerConfig, DeliverPolicy

from benchmarks.cluster.clients import quantile
from tests.support.clients.producers import Producer, int64_body, producer
from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.nats import ClusterNode, NatsCluster
from tests.support.servers.roles import Start
from tests.support.waiting import eventually, wait_until

MODEL = "fast"
NEEDED = ("API", "QUEUE", "RESULT", "LIVE", "KV_leases", "KV_queue-owners")
"""What durable requests need, streams with their consumers. Without a leader of its API JetStream answers no request to a
consumer."""

_SETTLE_S = 3.0
_WATCH_S = 30.0
_LAST_PAUSE_S = 8.0
_SEND_EVERY_S = 0.02
_PAUSE_S = 0.3


class Recovery(NamedTuple):
    """The seconds after one fault."""

    election: float
    records: float
    live: float

    @property
    def ours(self) -> float:
        """What came on top of the election."""
        return self.records - self.election


def main() -> None:
    """Measures, and prints a line for each fault."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--kills", type=int, default=12, help="number of faults")
    options.add_argument("--of", default="consumer,RESULT,QUEUE,KV_leases,API,LIVE", help="whose leaders, in turn")
    options.add_argument("--signal", choices=("kill", "stop"), default="kill", help="killed, or suspended")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _measure(Path(folder), given.kills, given.of.split(","), given.signal == "kill")


def _measure(folder: Path, faults: int, targets: Sequence[str], kills: bool) -> None:
    start = Start(folder, NatsCluster(folder / "nats"))
    try:
        write_identity(folder / "models", MODEL, "INT64", "dynamic_batching { }")
        start("scheduler")
        start.worker()
        served = start.gateway()
        wait_until(served.is_ready)
        turns = zip(range(faults), itertools.cycle(targets), strict=False)
        rows = [asyncio.run(_one_fault(start.nats, served, of, f"k{number}", kills)) for number, of in turns]
        print(f"\n{'':10}{'p50':>8}{'max':>8}  s")
        for name in (*Recovery._fields, "ours"):
            values = sorted(getattr(row, name) for row in rows)
            print(f"{name:10}{quantile(values, 0.5):8.2f}{values[-1]:8.2f}")
    finally:
        start.close()


async def _one_fault(cluster: NatsCluster, served: Endpoints, target: str, name: str, kills: bool) -> Recovery:
    async with producer(cluster.url) as to:
        stop, sent = asyncio.Event(), list[str]()
        sending = [asyncio.create_task(_send(to, stop, sent, f"{name}-{lane}")) for lane in range(2)]
        with _live(served) as answered_s:
            await asyncio.sleep(_SETTLE_S)
            victim = await asyncio.to_thread(_leader, cluster, target)
            led, roles = victim.led, sorted({client.split("-")[0] for client in victim.clients} - {""})
            hurt_s, hurt_unix_s = time.monotonic(), time.time()
            victim.kill() if kills else victim.process.send_signal(signal.SIGSTOP)
            elected = await asyncio.to_thread(cluster.elections, victim, led, hurt_s)
            await asyncio.sleep(_LAST_PAUSE_S)
            await eventually(lambda: answered_s[-1] > time.monotonic() - _PAUSE_S, _WATCH_S)
        stop.set()
        await asyncio.gather(*sending)
        await asyncio.to_thread(victim.start if kills else lambda: victim.process.send_signal(signal.SIGCONT))
        await asyncio.to_thread(wait_until, cluster.is_whole, 60.0)
        await _settled(to)
        stored_s = sorted(await _stored_s(to, name))
    assert len(stored_s) == len(sent), f"{len(stored_s)} records of {len(sent)} requests"
    election = max((at for group, at in elected.items() if group.split(" ")[0] in NEEDED), default=0.0)
    found = Recovery(election, _pause_end(stored_s, hurt_unix_s), _pause_end(answered_s, hurt_s))
    times = ", ".join(f"{group} {at:.1f}" for group, at in sorted(elected.items(), key=lambda pair: pair[1]))
    print(
        f"{target:10} {victim.name}: election {found.election:5.2f}  records {found.records:5.2f}  live {found.live:5.2f}"
        f"  ours {found.ours:5.2f}   ({len(sent)} requests; it served {' '.join(roles) or 'none'}; {times})",
        flush=True,
    )
    return found


def _pause_end(times_s: Sequence[float], hurt_s: float) -> float:
    """When the longest pause after the fault ended, in seconds after it; 0 for none."""
    later = [hurt_s, *(at_s for at_s in times_s if at_s > hurt_s)]
    pause_s, end_s = max(
        ((after - before, after) for before, after in itertools.pairwise(later)), default=(0.0, hurt_s)
    )
    return end_s - hurt_s if pause_s > _PAUSE_S else 0.0


async def _send(to: Producer, stop: asyncio.Event, sent: list[str], prefix: str) -> None:
    for number in itertools.count():
        if stop.is_set():
            return
        await to.send(f"event.{MODEL}", int64_body(number), Nats_Msg_Id=f"{prefix}-{number}")
        sent.append(f"{prefix}-{number}")
        await asyncio.sleep(_SEND_EVERY_S)


@contextmanager
def _live(served: Endpoints) -> Iterator[list[float]]:
    stop, answered_s = threading.Event(), [time.monotonic()]
    values = {"IN": np.zeros((1, 1), np.int64)}

    def send() -> None:
        with served.http() as client:
            while not stop.wait(_SEND_EVERY_S):
                client.infer(MODEL, http_inputs(values))
                answered_s.append(time.monotonic())

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield answered_s
    finally:
        stop.set()
        thread.join(60.0)


async def _settled(to: Producer) -> None:
    deadline_s = time.monotonic() + 60.0
    while await to.count("QUEUE") != 0:
        assert time.monotonic() < deadline_s, "requests are left in QUEUE"
        await asyncio.sleep(0.1)


async def _stored_s(to: Producer, name: str) -> list[float]:
    config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    pull = await to.jetstream.pull_subscribe(f"result.{MODEL}.*", stream="RESULT", config=config)
    found: list[float] = []
    while True:
        try:
            for message in await pull.fetch(500, timeout=1.0):
                if message.subject.rpartition(".")[2].startswith(f"{name}-"):
                    found.append(message.metadata.timestamp.timestamp())
                await message.ack()
        except TimeoutError:
            return found


def _leader(cluster: NatsCluster, target: str) -> ClusterNode:
    """The server that leads a stream, JetStream's API, or the consumer of the durable requests."""

    def leads(node: ClusterNode) -> bool:
        led = node.led
        return any(group.startswith("QUEUE ") for group in led) if target == "consumer" else target in led

    return wait_until(lambda: next(filter(leads, cluster.nodes), None), _WATCH_S)


if __name__ == "__main__":
    main()
