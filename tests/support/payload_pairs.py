"""An owner and a reader of payloads, with a bus between them in place of the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from weir.bus.links.tcp import TcpListener
from weir.bus.naming.identity import new_id
from weir.bus.nats.access import NO_ACCESS, BrokerAccess, BrokerServer, ServerPool
from weir.bus.nats.connection import Message
from weir.bus.nats.remote_links import make_listener
from weir.bus.payloads.arena import PayloadArena
from weir.bus.payloads.fetch_plan import Loss, Outcome
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.server import PayloadServer
from weir.schemas.core.names import ListenAddress
from weir.schemas.core.tensors import PayloadRef

LOCALLY = ListenAddress("127.0.0.1")


class LocalBus:
    """Stands for the broker: delivers in a later turn of the loop, and says where nobody listens."""

    is_connected = True
    max_payload_bytes = 1 << 20
    unsent_bytes = 0
    local_host = "127.0.0.1"

    def __init__(self, access: BrokerAccess = NO_ACCESS) -> None:
        self.access = access
        self.server_info: dict[str, Any] = {}
        self.servers = ServerPool(["nats://127.0.0.1"])
        self.servers.current = BrokerServer.of("nats://127.0.0.1")
        self._callbacks: dict[str, Callable[[Message], None]] = {}

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        self._callbacks[subject.split(".*")[0]] = callback

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        asyncio.get_running_loop().call_soon(self._deliver, subject, data, reply)

    def _deliver(self, subject: str, data: bytes, reply: str) -> None:
        callback = self._callbacks.get(".".join(subject.split(".")[:2]))
        if callback is not None:
            callback(Message(subject, reply, data, ""))
        elif reply:
            self._deliver_status(reply)

    def _deliver_status(self, reply: str) -> None:
        self._callbacks[".".join(reply.split(".")[:2])](Message(reply, "", b"", "503"))


class Pair:
    """An owner with payloads and a reader, with a bus between them."""

    def __init__(self, fetcher: PayloadFetcher, server: PayloadServer, listener: TcpListener | None) -> None:
        self.fetcher = fetcher
        self.server = server
        self.listener = listener
        self.arena: PayloadArena

    def payload(self, size: int) -> tuple[PayloadRef, bytes]:
        slot = self.arena.allocate(size)
        assert slot is not None
        content = (bytes(range(251)) * (size // 251 + 1))[:size]
        slot.view[:] = content
        return slot.ref(), content

    async def fetched(self, ref: PayloadRef) -> bytes | Loss:
        came: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.fetcher.fetch(ref, came.set_result)
        outcome = await asyncio.wait_for(came, 20)
        return outcome if isinstance(outcome, Loss) else bytes(outcome)

    async def connected(self) -> None:
        """Returns when there is a link."""
        ref, content = self.payload(300_000)
        assert await self.fetched(ref) == content


@asynccontextmanager
async def pair(
    access: BrokerAccess = NO_ACCESS, listens: bool = True, reads_as: BrokerAccess | None = None
) -> AsyncIterator[Pair]:
    owner, reader = new_id("gateway"), new_id("worker")
    bus, reading = LocalBus(access), LocalBus(access if reads_as is None else reads_as)
    reading._callbacks = bus._callbacks
    async with asyncio.TaskGroup() as background:
        listener = None
        if listens:
            listener = make_listener(LOCALLY, access, is_encrypted=bool(access.ca))
            await listener.start()
        server = PayloadServer(bus, owner, listener)  # type: ignore[arg-type]
        await server.start()
        fetcher = PayloadFetcher(reading, reader)  # type: ignore[arg-type]
        await fetcher.start(background)
        made = Pair(fetcher, server, listener)
        made.arena = PayloadArena(owner)
        try:
            yield made
        finally:
            fetcher.close()
            server.close()
            made.arena.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """As roles run."""
    uvloop.run(test())
