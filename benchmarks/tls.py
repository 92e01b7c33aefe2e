"""What TLS costs: CPU of a request over kept connections, to that without TLS, and of a handshake.

    python -m benchmarks.tls [--rounds 5] [--seconds 2]

Two servers of the same model (64 bytes in and out), one with a certificate that it has signed itself (P-256), are up at
once and take turns under the same load, each client on a connection of its own. CPU is that of all processes of a server;
the clients, which share the machine with them, do not count. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster.clients import table
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import ProcessTree
from benchmarks.compare.targets import Protocol
from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.grpc import open_channel
from weir.perf.clients.http import HttpConnection, http_head
from weir.runtime.certificates import client_context
from weir.server import Server

NETWORK = NETWORKS["identity_fp32"]
IN_FLIGHT = (1, 8, 64)
HANDSHAKES = 300
_TIMEOUT_S = 30.0

Ask = Callable[[], Awaitable[object]]


class Place(NamedTuple):
    """A running server: its name in the tables, its certificate (PEM), "" without TLS, and what its clients show."""

    name: str
    server: Server
    certificate: str = ""
    authorization: str = ""

    def address(self, protocol: Protocol) -> ServerAddress:
        """Where clients connect to."""
        place = self.server.grpc_url if protocol is Protocol.GRPC else self.server.http_address
        return ServerAddress.parse(place)._replace(is_secure=bool(self.certificate), pinned=self.certificate)


@contextlib.contextmanager
def both(folder: Path) -> Iterator[tuple[Place, Place]]:
    """A server without TLS, and one with it."""
    NETWORK.write(folder, "onnxruntime")
    with Server(folder) as plain, Server(folder, tls_self_signed=True) as encrypted:
        yield Place("plain", plain), Place("TLS", encrypted, Path(encrypted.tls_cert).read_text())


@contextlib.asynccontextmanager
async def connections(place: Place, protocol: Protocol, count: int):  # type: ignore[no-untyped-def]
    """`count` functions that each send a request on a connection of its own and wait for the response."""
    address, payload = place.address(protocol), Payload.of(protocol, NETWORK, NETWORK.sample(0))
    async with contextlib.AsyncExitStack() as stack:
        if protocol is Protocol.GRPC:
            channels = [await stack.enter_async_context(open_channel(address)) for _ in range(count)]
            calls = [channel.unary_unary(payload.path) for channel in channels]
            metadata = [("authorization", place.authorization)] if place.authorization else None
            yield [lambda call=call: call(payload.body, timeout=_TIMEOUT_S, metadata=metadata) for call in calls]
            return
        headers = dict(payload.headers)
        if place.authorization:
            headers["Authorization"] = place.authorization
        chunks = [http_head(address, "POST", payload.path, headers, len(payload.body)), payload.body]
        opened = [await HttpConnection.open(address, _TIMEOUT_S) for _ in range(count)]
        for connection in opened:
            stack.callback(connection.close)

        async def ask(connection: HttpConnection) -> None:
            reply = await connection.exchange(chunks)
            if reply.status != 200:
                raise SystemExit(f"{place.name} answers with HTTP status {reply.status}")

        yield [lambda one=one: ask(one) for one in opened]


async def request_us(place: Place, protocol: Protocol, in_flight: int, seconds: float) -> float:
    """CPU microseconds of a request, with so many in flight for so long."""
    async with connections(place, protocol, in_flight) as asks:
        await asyncio.gather(*(ask() for ask in asks))  # all are connected
        processes, answered, end_s = ProcessTree(place.server.pid), 0, time.monotonic() + seconds
        before_s = processes.cpu_s()

        async def client(ask: Ask) -> None:
            nonlocal answered
            while time.monotonic() < end_s:
                await ask()
                answered += 1

        await asyncio.gather(*map(client, asks))
        return (processes.cpu_s() - before_s) * 1e6 / answered


async def connection_us(place: Place, count: int) -> float:
    """CPU microseconds of a connection: it is opened, and closed after the handshake, `count` times one after another."""
    address, processes = place.address(Protocol.HTTP), ProcessTree(place.server.pid)
    context = client_context(place.certificate) if place.certificate else None
    before_s = processes.cpu_s()
    for _ in range(count):
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()
    return (processes.cpu_s() - before_s) * 1e6 / count


async def measured(places: tuple[Place, Place], rounds: int, seconds: float) -> None:
    """Measures and prints the tables."""
    rows = []
    for protocol in Protocol:
        for in_flight in IN_FLIGHT:
            pairs = []
            for number in range(rounds + 1):
                order = places if number % 2 else places[::-1]
                found = {place.name: await request_us(place, protocol, in_flight, seconds) for place in order}
                pairs.append([found[place.name] for place in places])
            plain, encrypted = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
            ratio = statistics.median(with_tls / without for without, with_tls in pairs[1:])
            rows.append((protocol.value, in_flight, f"{plain:.0f}", f"{encrypted:.0f}", f"{ratio:.2f}"))
    print(table(("protocol", "in flight", "plain us", "TLS us", "ratio"), rows))
    costs = [[await connection_us(place, HANDSHAKES) for place in places] for _ in range(rounds)]
    plain, encrypted = (statistics.median(column) for column in zip(*costs, strict=True))
    print(f"\na connection costs {encrypted:.0f} us of CPU with a TLS 1.3 handshake, {plain:.0f} us without:")
    print(f"{1e6 / encrypted:.0f} handshakes/s for each core of a gateway's process")


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tls-") as folder, both(Path(folder)) as places:
        asyncio.run(measured(places, options.rounds, options.seconds))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
