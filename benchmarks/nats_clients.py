"""CPU per message in the client: nats-py and `weir.bus.nats.connection`, publishing and receiving.

`python -m benchmarks.nats_clients` prints one line per case, with one and with 64 messages per turn of the loop. The
server and the peer are separate processes, so only the client is measured; both clients run on uvloop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from urllib.parse import urlsplit

import nats
import uvloop

from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats

SUBJECT = "bench"
DATA = bytes(100)
MESSAGES = 64 * 512
ROUNDS = 5
FLUSH_EVERY = 1024

Publish = Callable[[int], Awaitable[None]]
Subscribe = Callable[[Callable[[], None]], Awaitable[object]]
Client = tuple[Publish, Callable[[], Awaitable[None]], Subscribe]
"""Publish so many messages in this turn; wait for the server; call back for each message."""


@asynccontextmanager
async def nats_py(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url)

    async def publish(count: int) -> None:
        for _ in range(count):
            await client.publish(SUBJECT, DATA)

    async def subscribe(callback: Callable[[], None]) -> object:
        async def on_message(message: object) -> None:
            callback()

        return await client.subscribe(SUBJECT, cb=on_message)

    yield publish, client.flush, subscribe
    await client.close()


@asynccontextmanager
async def lean(url: str) -> AsyncIterator[Client]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "bench", background)

        async def publish(count: int) -> None:
            for _ in range(count):
                bus.publish(SUBJECT, DATA)

        async def subscribe(callback: Callable[[], None]) -> object:
            return await bus.subscribe(SUBJECT, lambda message: callback())

        yield publish, bus.flush, subscribe
        await bus.close()


async def publishing(client: Client, per_turn: int) -> float:
    """Seconds of CPU a message, without a subscriber."""
    publish, flush, _ = client
    began = time.process_time()
    for sent in range(0, MESSAGES, per_turn):
        await publish(per_turn)
        await asyncio.sleep(0)
        if sent % FLUSH_EVERY == 0:
            await flush()
    await flush()
    return (time.process_time() - began) / MESSAGES


async def receiving(client: Client, per_turn: int, url: str) -> float:
    """Seconds of CPU a message, with the next burst sent when the last one has been received."""
    _, flush, subscribe = client
    processes = multiprocessing.get_context("spawn")
    go = processes.Semaphore(0)
    received, done = 0, asyncio.get_running_loop().create_future()

    def on_message() -> None:
        nonlocal received
        received += 1
        if received == MESSAGES:
            done.set_result(None)
        elif received % per_turn == 0:
            go.release()

    await subscribe(on_message)
    await flush()
    sender = processes.Process(target=send_bursts, args=(url, per_turn, go))
    sender.start()
    began = time.process_time()
    go.release()
    await done
    spent = time.process_time() - began
    await asyncio.to_thread(sender.join)
    return spent / MESSAGES


def send_bursts(url: str, per_turn: int, go: Semaphore) -> None:
    """In a process of its own: a burst whenever the receiver lets it go."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b'CONNECT {"verbose": false}\r\n')
        burst = b"PUB %s %d\r\n%s\r\n" % (SUBJECT.encode(), len(DATA), DATA) * per_turn
        for _ in range(0, MESSAGES, per_turn):
            go.acquire()
            connection.sendall(burst)


async def measure(url: str) -> None:
    print(f"{'client':>8} {'a turn':>7} {'publish us':>11} {'receive us':>11}")
    for name, connect in (("nats-py", nats_py), ("bus", lean)):
        for per_turn in (1, 64):
            costs = []
            for _ in range(ROUNDS):
                async with connect(url) as client:
                    costs.append((await publishing(client, per_turn), await receiving(client, per_turn, url)))
            publish, receive = (min(column) * 1e6 for column in zip(*costs, strict=True))
            print(f"{name:>8} {per_turn:>7} {publish:>11.2f} {receive:>11.2f}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder))
        try:
            uvloop.run(measure(server.start()))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
