"""How exact a rate limit is over several gateways, and what limits cost.

    python -m benchmarks.rate_limits [--seconds 60] [--gateways 4] [--clients 32] [--rounds 5]

First clients with one key, which may send 100 requests/s, offer several times as many, over kept connections to all
gateways. Counted are the successful requests after the first two seconds, in which they use the burst. Then two servers
with the same policy, but for the limit, take turns under the same load (a limit that is never reached): CPU is that of all
processes of a server. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import yaml

from benchmarks.cluster.clients import table
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import ProcessTree
from benchmarks.compare.targets import Protocol
from weir.access.keys.ring import KeyRing
from weir.cluster.access.key_file import KeyFile
from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.http import HttpConnection, http_head
from weir.server import Server

NETWORK = NETWORKS["identity_fp32"]
RATE = 100
IN_FLIGHT = (1, 8, 64)
_WARM_UP_S = 2.0
_TIMEOUT_S = 30.0
_AFTER_REFUSAL_S = 0.05


def make_key(folder: Path) -> str:
    """Writes a file of keys with one of the role `caller`, and returns the key."""
    made = []

    def create(ring: KeyRing) -> KeyRing:
        ring, key = ring.create("bench", ["caller"], time.time())
        made.append(key)
        return ring

    KeyFile(folder / "keys.json").change(create)
    return made[0]


@contextlib.contextmanager
def server(folder: Path, requests_per_s: float | None, gateways: int = 1) -> Iterator[Server]:
    """A server whose policy has this limit."""
    limits = {} if requests_per_s is None else {"limits": {"requests_per_s": requests_per_s}}
    policy = {"roles": {"caller": {"rules": [{"actions": ["infer"]}], **limits}}}
    path = folder / f"policy-{requests_per_s}.yaml"
    path.write_text(yaml.safe_dump(policy))
    with Server(
        folder / "models", gateways=gateways, access_policy=str(path), access_keys=str(folder / "keys.json")
    ) as running:
        yield running


class Clients:
    """Kept connections to one server, each of which sends one request after another with the same key."""

    def __init__(self, running: Server, key: str) -> None:
        self._address = ServerAddress.parse(running.http_address)
        self._payload = Payload.of(Protocol.HTTP, NETWORK, NETWORK.sample(0))
        headers = {**dict(self._payload.headers), "Authorization": f"Bearer {key}"}
        head = http_head(self._address, "POST", self._payload.path, headers, len(self._payload.body))
        self._chunks = [head, self._payload.body]
        self.connections: list[HttpConnection] = []

    async def open(self, count: int) -> None:
        """Opens the connections."""
        self.connections = [await HttpConnection.open(self._address, _TIMEOUT_S) for _ in range(count)]

    async def ask(self, connection: HttpConnection) -> int:
        """Sends a request and returns the status of the response."""
        return (await connection.exchange(self._chunks)).status

    def close(self) -> None:
        """Closes the connections."""
        for connection in self.connections:
            connection.close()


def connections_by_process(running: Server) -> list[int]:
    """How many connections to its HTTP port each gateway has."""
    port = ServerAddress.parse(running.http_address).port
    found = Counter(
        process.pid
        for process in psutil.Process(running.pid).children(recursive=True)
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.laddr and each.laddr.port == port
    )
    return sorted(found.values())


async def exactness(running: Server, key: str, count: int, seconds: float) -> None:
    """Prints the rate of successful requests."""
    clients = Clients(running, key)
    await clients.open(count)
    begin_s = time.monotonic() + _WARM_UP_S
    statuses: Counter[int] = Counter()

    async def offer(connection: HttpConnection) -> None:
        while (now_s := time.monotonic()) < begin_s + seconds:
            status = await clients.ask(connection)
            if now_s >= begin_s:
                statuses[status] += 1
            if status == 429:
                await asyncio.sleep(_AFTER_REFUSAL_S)

    offers = [asyncio.create_task(offer(connection)) for connection in clients.connections]
    await asyncio.sleep(_WARM_UP_S)
    places = connections_by_process(running)
    await asyncio.gather(*offers)
    clients.close()
    rate = statuses[200] / seconds
    print(f"limit {RATE}/s, {count} connections at {len(places)} gateways ({places}), {seconds:g} s: {dict(statuses)}")
    print(f"{rate:.2f} requests/s succeed: {100 * (rate / RATE - 1):+.2f} % of the limit")


async def request_us(running: Server, key: str, in_flight: int, seconds: float) -> float:
    """CPU microseconds of a request, with so many in flight for so long."""
    clients = Clients(running, key)
    await clients.open(in_flight)
    processes, answered, end_s = ProcessTree(running.pid), 0, time.monotonic() + seconds
    before_s = processes.cpu_s()

    async def client(connection: HttpConnection) -> None:
        nonlocal answered
        while time.monotonic() < end_s:
            if await clients.ask(connection) != 200:
                raise SystemExit("a request is refused")
            answered += 1

    await asyncio.gather(*map(client, clients.connections))
    used_s = processes.cpu_s() - before_s
    clients.close()
    return used_s * 1e6 / answered


async def costs(places: tuple[Server, Server], key: str, rounds: int, seconds: float) -> None:
    """Prints the CPU of a request without and with a limit."""
    rows = []
    for in_flight in IN_FLIGHT:
        pairs = []
        for number in range(rounds + 1):
            order = places if number % 2 else places[::-1]
            found = {id(place): await request_us(place, key, in_flight, seconds) for place in order}
            pairs.append([found[id(place)] for place in places])
        without, limited = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
        ratio = statistics.median(second / first for first, second in pairs[1:])
        rows.append((in_flight, f"{without:.0f}", f"{limited:.0f}", f"{ratio:.3f}"))
    print(table(("in flight", "no limit us", "limit us", "ratio"), rows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-seconds", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rates-") as name:
        folder = Path(name)
        NETWORK.write(folder / "models", "onnxruntime")
        key = make_key(folder)
        if options.seconds:
            with server(folder, RATE, options.gateways) as running:
                asyncio.run(exactness(running, key, options.clients, options.seconds))
        if options.rounds:
            with server(folder, None) as without, server(folder, 1e6) as limited:
                asyncio.run(costs((without, limited), key, options.rounds, options.turn_seconds))


if __name__ == "__main__":
    main()
