"""Durable requests from producers to their records: `python -m benchmarks.events` prints a table.

Requests of 64 B to an identity model, published to `event.identity_fp32` by producer processes and executed by `weir
serve`: requests per second until each has its record, and CPU per request of each role. The baseline is NATS alone: the
same producers, and in place of Weir one process that stores each message of the queue in a second stream once and
acknowledges it. Both run with a nats-server that syncs before it acknowledges, as the embedded one does, and with one
that syncs every two minutes, NATS's default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import nats
import numpy as np
import psutil
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import ProcessTree
from benchmarks.compare.targets import Protocol
from benchmarks.durable.flood import Flood, Worker, owner, producer
from tests.support.durable.models import IDENTITY, write_identity
from weir import Server
from weir.bus.naming.durable_subjects import QUEUE_STREAM, RESULT_STREAM, event
from weir.bus.nats.embedded_server import EmbeddedNats

WARM_UP = 2000
ATOMIC = 100
ROLES = ("producers", "gateway", "durable", "scheduler", "worker", "owner", "nats-server")
_POLL_S = 0.05
_PATIENCE_S = 300.0
_CEILING, _CEILING_RESULT = "CEILING", "CEILING_RESULT"


class LazyNats(EmbeddedNats):
    """The embedded nats-server, but one that syncs when NATS's defaults say so: every two minutes. Its monitor tells so."""

    monitor_url = ""

    def _write_config(self) -> Path:
        path = super()._write_config()
        config = json.loads(path.read_text())
        del config["jetstream"]["sync_interval"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config["http"] = f"127.0.0.1:{port}"
        self.monitor_url = f"http://127.0.0.1:{port}"
        path.write_text(json.dumps(config))
        return path


@dataclass(frozen=True)
class Case:
    """One row: who does it, how it is published, and whether nats-server syncs."""

    who: str
    syncs: bool
    body: str
    atomic: int
    in_flight: int

    def cells(self) -> tuple[str, ...]:
        how = f"atomic, {self.atomic}" if self.atomic else "single"
        return self.who, "always" if self.syncs else "2 min", self.body, how, str(self.in_flight)


@dataclass
class Cost:
    """Of one window: requests/s, and seconds of CPU by role."""

    requests: int
    seconds: float
    published_s: float
    cpu_s: Counter[str] = field(default_factory=Counter)

    def cells(self) -> tuple[str, ...]:
        served_us = sum(self.cpu_s[role] for role in ROLES[1:]) / self.requests * 1e6
        by_role = (f"{self.cpu_s[role] / self.requests * 1e6:.0f}" if self.cpu_s[role] else "-" for role in ROLES)
        rates = f"{self.requests / self.seconds:,.0f}", f"{self.requests / self.published_s:,.0f}"
        return *rates, f"{served_us / 1000:.3f}", *by_role


def body_of(kind: str) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """One request, and the headers that it needs."""
    network = NETWORKS[IDENTITY]
    x = network.sample(0)
    if kind == "binary":
        payload = Payload.of(Protocol.HTTP, network, x)
        name = "Inference-Header-Content-Length"
        return payload.body, ((name, payload.headers[name]),)
    tensor = {"name": "X", "datatype": "FP32", "shape": list(x.shape), "data": np.round(x, 4).reshape(-1).tolist()}
    return json.dumps({"inputs": [tensor]}).encode(), ()


@contextmanager
def broker(syncs: bool) -> Iterator[EmbeddedNats]:
    """A nats-server of its own for each row: what the one before left to be written costs the next one nothing."""
    with tempfile.TemporaryDirectory(prefix="events-") as folder:
        nats_server = (EmbeddedNats if syncs else LazyNats)(Path(folder))
        nats_server.start()
        try:
            yield nats_server
        finally:
            nats_server.stop()


async def weir_row(case: Case, requests: int, producers: int, models: Path) -> Cost:
    """Through `weir serve`."""
    with broker(case.syncs) as nats_server, Server(models, nats=nats_server.url, **_monitor(nats_server)) as server:
        client = await nats.connect(nats_server.url)
        jetstream = client.jetstream()
        await _flood(case, "warm", WARM_UP, 1, nats_server.url, event(IDENTITY), client, RESULT_STREAM)
        await jetstream.purge_stream(RESULT_STREAM)
        tree = ProcessTree(server.pid)
        await asyncio.to_thread(tree.wait_until_quiet)
        before = tree.cpu_s_by_role()
        cost = await _flood(
            case, "p", requests, producers, nats_server.url, event(IDENTITY), client, RESULT_STREAM, nats_server.pid
        )
        await _wait_for(client, QUEUE_STREAM, 0)
        await asyncio.to_thread(tree.wait_until_quiet)
        cost.cpu_s.update(tree.cpu_s_by_role() - before)
        await _check_one(client)
        await client.close()
    return cost


def _monitor(nats_server: EmbeddedNats) -> dict[str, str]:
    return {"nats_monitor": nats_server.monitor_url} if isinstance(nats_server, LazyNats) else {}


async def ceiling_row(case: Case, requests: int, producers: int) -> Cost:
    """Through NATS alone."""
    with broker(case.syncs) as nats_server:
        client = await nats.connect(nats_server.url)
        jetstream = client.jetstream()
        shared = {"storage": StorageType.FILE, "num_replicas": 1, "allow_atomic": True}
        await jetstream.add_stream(
            StreamConfig(
                name=_CEILING,
                subjects=["ceiling.*"],
                retention=RetentionPolicy.WORK_QUEUE,
                discard=DiscardPolicy.NEW,
                duplicate_window=120,
                **shared,  # type: ignore[arg-type]
            )
        )
        await jetstream.add_stream(
            StreamConfig(
                name=_CEILING_RESULT,
                subjects=["ceiling-result.*"],
                max_msgs_per_subject=1,
                **shared,  # type: ignore[arg-type]
            )
        )
        consumer = ConsumerConfig(durable_name="owner", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=8192)
        await jetstream.add_consumer(_CEILING, consumer)
        process = owner(nats_server.url, _CEILING, "owner", "ceiling-result", requests, case.atomic)
        process.go()
        cost = await _flood(
            case, "p", requests, producers, nats_server.url, "ceiling.m", client, _CEILING_RESULT, nats_server.pid
        )
        cost.cpu_s["owner"] = (await asyncio.to_thread(process.spent)).cpu_s
        await client.close()
    return cost


async def _flood(
    case: Case,
    prefix: str,
    requests: int,
    producers: int,
    url: str,
    subject: str,
    client: Client,
    result_stream: str,
    nats_pid: int | None = None,
) -> Cost:
    """Publishes so many requests, and waits until each has its record."""
    body, headers = body_of(case.body)
    floods = [
        Flood(
            url=url,
            prefix=f"{prefix}{number}",
            subject=subject,
            body=body,
            headers=headers,
            count=requests // producers,
            in_flight=max(1, case.in_flight // producers),
            atomic=case.atomic,
        )
        for number in range(producers)
    ]
    workers: list[Worker] = [await asyncio.to_thread(producer, flood) for flood in floods]
    before_s = _cpu_s(nats_pid)
    began_s = time.monotonic()
    for worker in workers:
        worker.go()
    total = sum(flood.count for flood in floods)
    await _wait_for(client, result_stream, total)
    seconds = time.monotonic() - began_s
    cost = Cost(total, seconds, 0.0)
    cost.cpu_s["nats-server"] = _cpu_s(nats_pid) - before_s
    for worker in workers:
        spent = await asyncio.to_thread(worker.spent)
        cost.published_s = max(cost.published_s, spent.seconds)
        cost.cpu_s["producers"] += spent.cpu_s
    return cost


def _cpu_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def _wait_for(client: Client, stream: str, messages: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := (await client.jetstream().stream_info(stream)).state.messages) != messages:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"stream {stream} holds {found} messages, not {messages}")
        await asyncio.sleep(_POLL_S)


async def _check_one(client: Client) -> None:
    """What is measured must also be right."""
    state = (await client.jetstream().stream_info(RESULT_STREAM)).state
    record = await client.jetstream().get_msg(RESULT_STREAM, state.last_seq)
    reply = record.headers or {}
    if reply.get("Weir-Outcome") != "succeeded" or reply.get("Weir-Attempts") != "1":
        raise SystemExit(f"not done: {reply} {(record.data or b'')[:200]!r}")


async def measure(options: argparse.Namespace, models: Path) -> list[tuple[Case, Cost]]:
    rows = []
    whos = [who for who, wanted in (("weir", not options.only_nats), ("nats alone", not options.only_weir)) if wanted]
    bodies = ("binary", "json") if options.json else ("binary",)
    for who, syncs, body, atomic, in_flight in product(whos, (True, False), bodies, (0, ATOMIC), options.in_flight):
        if who != "weir" and body != "binary":
            continue
        case = Case(who, syncs, body, atomic, in_flight)
        doing = weir_row(case, options.requests, options.producers, models)
        if who != "weir":
            doing.close()
            doing = ceiling_row(case, options.requests, options.producers)
        cost = await doing
        rows.append((case, cost))
        print(*case.cells(), *cost.cells(), flush=True)
    return rows


def table_of(rows: list[tuple[Case, Cost]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="64 B from producers to their records; CPU in us a request")
    for heading in ("who", "syncs", "body", "published", "in flight", "requests/s", "published/s", "CPU ms", *ROLES):
        table.add_column(heading, justify="left" if heading in ("who", "syncs", "body", "published") else "right")
    for case, cost in rows:
        table.add_row(*case.cells(), *cost.cells())
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40_000, help="of each row")
    parser.add_argument("--producers", type=int, default=2, help="processes that publish")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512], help="unacknowledged, of all producers")
    parser.add_argument("--json", action="store_true", help="bodies of bare JSON, too")
    parser.add_argument("--only-weir", action="store_true", help="without NATS alone")
    parser.add_argument("--only-nats", action="store_true", help="NATS alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_identity(Path(folder))
        rows = asyncio.run(measure(options, Path(folder)))
    console = Console(width=200)
    console.print(table_of(rows))
    console.print(
        "CPU ms: all but the producers. published/s: acknowledged, while the requests were done beside it. "
        "NATS alone, atomic: the owner stores in batches too, and removes what is done by purging up to it."
    )


if __name__ == "__main__":
    main()
