"""`PeerConnectionPool`: the connections of a reader to owners of payloads that listen for readers.

`PeerConnectionPolicy` decides when to connect, and `PeerStream` is the protocol on a connection. Any error closes the
connection, and its fetches are returned to the caller, which fetches through the broker.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence

from bus.naming import subjects
from bus.nats.connection import Bus, Message
from bus.payloads.fetch_plan import FetchEnd
from bus.payloads.peer.authentication import connecting_context, fingerprint, is_encrypted, new_nonce
from bus.payloads.peer.policy import PeerConnectionPolicy
from bus.payloads.peer.stream import PeerProtocolError, PeerStream
from runtime.containment import report
from schemas.core.tensors import PayloadRef
from schemas.wire.codec import MalformedMessage
from schemas.wire.transfers import ADDRESS_REQUEST, OwnerAddress

logger = logging.getLogger("weir.bus")

CONNECT_TIMEOUT_S = 3.0
"""How long connecting to an owner and authentication may take."""

ADDRESS_FETCH = 0
"""The number of replies with addresses, which no fetch has."""


class PeerConnectionPool:
    """Fetches payloads on connections. `ended` is called with results, `lost` with fetches that are to go through the
    broker.
    """

    def __init__(
        self,
        bus: Bus,
        reader: str,
        background: asyncio.TaskGroup,
        ended: Callable[[Sequence[FetchEnd]], None],
        lost: Callable[[Sequence[tuple[int, PayloadRef]]], None],
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._background = background
        self._ended = ended
        self._lost = lost
        self._ways = PeerConnectionPolicy()
        self._links: dict[str, _PeerConnection] = {}
        self._trying: dict[int, asyncio.Task[None]] = {}
        self.fetched_bytes = 0

    def __len__(self) -> int:
        """The number of connections and tries."""
        return self._ways.connections

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is running."""
        return any(link.stream.is_busy for link in self._links.values())

    def starts(self, number: int, owner: str, ref: PayloadRef) -> bool:
        """Starts the fetch if its owner is connected; else returns False, and may try to connect for later ones."""
        now_s = time.monotonic()
        if self._ways.is_open(owner):
            link = self._links[owner]
            end = link.stream.begin(number, ref, now_s)
            if end is not None:
                asyncio.get_running_loop().call_soon(self._ended, (end,))
            link.send()
            return True
        attempt = self._ways.wanted(owner, now_s)
        if attempt:
            reply = f"{subjects.fetched(self._reader)}.{ADDRESS_FETCH}.{attempt}"
            self._bus.publish(subjects.fetch(owner), ADDRESS_REQUEST, reply)
        return False

    def cancel(self, number: int) -> None:
        """Ends a fetch without a result."""
        for link in self._links.values():
            link.stream.cancel(number)

    def on_address(self, attempt: int, message: Message) -> None:
        """Takes the address of an owner, or "no responders" from nats-server."""
        owner = self._ways.owner_of(attempt)
        if not owner or attempt in self._trying:
            return
        try:
            address = OwnerAddress() if message.status else OwnerAddress.unpack(message.data)
        except MalformedMessage as error:
            logger.warning("dropped a malformed address of an owner of payloads: %s", error)
            address = OwnerAddress()
        if address.port:
            self._trying[attempt] = self._background.create_task(self._try(attempt, owner, address))
        else:
            self._ways.failed(attempt, time.monotonic())

    def tick(self) -> None:
        """Handles timeouts."""
        now_s = time.monotonic()
        for owner, link in self._links.items():
            if link.stream.is_busy:
                self._ways.used(owner, now_s)
        for owner in self._ways.tick(now_s):
            self._links.pop(owner).close()
        for link in list(self._links.values()):
            if link.stream.is_overdue(now_s):
                logger.warning("closing the connection to %s: requested pieces did not arrive in time", link.owner)
                link.close()
                self.on_lost(link)

    def close(self) -> None:
        """Closes all connections; their fetches never end."""
        for task in self._trying.values():
            task.cancel()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def on_ended(self, link: _PeerConnection, ended: Sequence[FetchEnd]) -> None:
        """Reports fetches that have ended."""
        self._ways.served(link.owner, time.monotonic())
        self.fetched_bytes += sum(len(end.outcome) for end in ended if isinstance(end.outcome, (bytes, memoryview)))
        self._ended(ended)

    def on_lost(self, link: _PeerConnection) -> None:
        """A connection was lost."""
        if self._links.get(link.owner) is link:
            del self._links[link.owner]
            self._ways.failed(link.attempt, time.monotonic())
            self._lost(link.stream.unfinished())

    async def _try(self, attempt: int, owner: str, address: OwnerAddress) -> None:
        link = _PeerConnection(self, attempt, owner, address)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(link, address)
        except (OSError, TimeoutError, ValueError) as error:
            logger.info("no connection to %s at %s:%d: %s", owner, address.host, address.port, error or "timeout")
            link.close()
            self._ways.failed(attempt, time.monotonic())
        except asyncio.CancelledError:
            link.close()
            raise
        except Exception as error:  # noqa: BLE001 - contained: an address from the bus must not end the role
            report("bus.payloads.peer.pool: connecting to an owner of payloads", error)
            link.close()
            self._ways.failed(attempt, time.monotonic())
        else:
            if link.is_lost:
                self._ways.failed(attempt, time.monotonic())
            elif self._ways.opened(attempt, time.monotonic()):
                self._links[owner] = link
            else:
                link.close()
        finally:
            del self._trying[attempt]

    async def _connect(self, link: _PeerConnection, address: OwnerAddress) -> None:
        context = None
        if bool(address.certificate) != is_encrypted(self._bus):
            raise OSError("one of us encrypts its connections, and the other does not")
        if address.certificate:
            context = connecting_context(self._bus.access)
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: link,
            address.host,
            address.port,
            ssl=context,
            server_hostname=None if context is None else address.host,
        )
        if context is not None:
            secured = transport.get_extra_info("ssl_object")
            if fingerprint(secured.getpeercert(binary_form=True) or b"") != address.certificate:
                raise OSError("its certificate is not the one that it announced")
        await link.opened


class _PeerConnection(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, links: PeerConnectionPool, attempt: int, owner: str, address: OwnerAddress) -> None:
        self._links = links
        self._transport: asyncio.Transport | None = None
        self.attempt = attempt
        self.owner = owner
        self.is_lost = False
        self.stream = PeerStream(address.secret, new_nonce())
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Closes the connection and ignores it from now on."""
        if not self.opened.done():
            self.opened.cancel()
        if self._transport is not None:
            self._transport.abort()

    def send(self) -> None:
        """Sends what the stream has to send."""
        data = self.stream.to_send()
        if data and self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        connection = transport.get_extra_info("socket")
        if connection is not None:  # a host that is down does not close its connections
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.stream.place()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            ended = self.stream.received(nbytes, time.monotonic())
        except PeerProtocolError as error:
            self._fail(error)
            return
        self.send()
        if self.stream.is_open and not self.opened.done():
            self.opened.set_result(None)
        if ended:
            self._links.on_ended(self, ended)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the owner closed the connection"))

    def _fail(self, error: Exception) -> None:
        self.is_lost = True
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._transport is not None:
            self._transport.abort()
        self._links.on_lost(self)
