"""`DirectLinks`: the connections of a reader to owners of payloads that listen for readers themselves.

To whom there is one, and when one is tried, is `DirectWays`' matter; what is said on it, `DirectStream`'s. Whatever goes
wrong ends the connection, and what was being fetched over it is handed back, to be fetched by the broker.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence

from bus import subjects
from bus.connection import Bus, Message
from bus.direct_proof import new_nonce
from bus.direct_stream import DirectBroken, DirectStream
from bus.direct_tls import connecting_context, fingerprint, is_encrypted
from bus.direct_ways import DirectWays
from bus.fetch_plan import Ended
from runtime.containment import report
from schemas.fetches import ADDRESS_QUESTION, OwnerAddress, unpack_address
from schemas.tensors import PayloadRef
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

CONNECT_TIMEOUT_S = 3.0
"""How long it may take to connect to an owner of payloads, and to prove who we are."""

ADDRESS_FETCH = 0
"""The number of no fetch, under which addresses are answered."""


class DirectLinks:
    """See the module. `ended` hears of fetches, `lost` of those that are to go by the broker."""

    def __init__(
        self,
        bus: Bus,
        reader: str,
        background: asyncio.TaskGroup,
        ended: Callable[[Sequence[Ended]], None],
        lost: Callable[[Sequence[tuple[int, PayloadRef]]], None],
    ) -> None:
        self._bus = bus
        self._reader = reader
        self._background = background
        self._ended = ended
        self._lost = lost
        self._ways = DirectWays()
        self._links: dict[str, _Link] = {}
        self._trying: dict[int, asyncio.Task[None]] = {}
        self.fetched_bytes = 0

    def __len__(self) -> int:
        """Connections that are there, or are being made."""
        return self._ways.connections

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return any(link.stream.is_busy for link in self._links.values())

    def takes(self, number: int, owner: str, ref: PayloadRef) -> bool:
        """Whether the payload is fetched here; if not, a connection is tried for the next one, where it is time to."""
        now_s = time.monotonic()
        if self._ways.is_open(owner):
            link = self._links[owner]
            end = link.stream.begin(number, ref, now_s)
            if end is not None:
                asyncio.get_running_loop().call_soon(self._ended, (end,))
            link.say()
            return True
        attempt = self._ways.wanted(owner, now_s)
        if attempt:
            reply = f"{subjects.fetched(self._reader)}.{ADDRESS_FETCH}.{attempt}"
            self._bus.publish(subjects.fetch(owner), ADDRESS_QUESTION, reply)
        return False

    def give_up(self, number: int) -> None:
        """Nobody wants what this fetch brings."""
        for link in self._links.values():
            link.stream.give_up(number)

    def on_address(self, attempt: int, message: Message) -> None:
        """An owner has said where it listens, or nats-server that it is not there."""
        owner = self._ways.owner_of(attempt)
        if not owner or attempt in self._trying:
            return
        try:
            address = OwnerAddress() if message.status else unpack_address(message.data)
        except MalformedMessage as error:
            logger.warning("dropped a message that is no address of an owner of payloads: %s", error)
            address = OwnerAddress()
        if address.port:
            self._trying[attempt] = self._background.create_task(self._try(attempt, owner, address))
        else:
            self._ways.failed(attempt, time.monotonic())

    def tick(self) -> None:
        """Time has passed."""
        now_s = time.monotonic()
        for owner, link in self._links.items():
            if link.stream.is_busy:
                self._ways.used(owner, now_s)
        for owner in self._ways.tick(now_s):
            self._links.pop(owner).close()
        for link in list(self._links.values()):
            if link.stream.is_overdue(now_s):
                logger.warning("%s does not send what was asked for on its connection", link.owner)
                link.close()
                self.gone(link)

    def close(self) -> None:
        """Ends all connections; what is being fetched never comes."""
        for task in self._trying.values():
            task.cancel()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()

    def came(self, link: _Link, ended: Sequence[Ended]) -> None:
        """Payloads have come, or are stale."""
        self._ways.served(link.owner, time.monotonic())
        self.fetched_bytes += sum(len(end.outcome) for end in ended if isinstance(end.outcome, (bytes, memoryview)))
        self._ended(ended)

    def gone(self, link: _Link) -> None:
        """A connection is lost."""
        if self._links.get(link.owner) is link:
            del self._links[link.owner]
            self._ways.failed(link.attempt, time.monotonic())
            self._lost(link.stream.unfinished())

    async def _try(self, attempt: int, owner: str, address: OwnerAddress) -> None:
        link = _Link(self, attempt, owner, address)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(link, address)
        except (OSError, TimeoutError, ValueError) as error:
            logger.info("no connection to %s at %s:%d: %s", owner, address.host, address.port, error or "too slow")
            link.close()
            self._ways.failed(attempt, time.monotonic())
        except asyncio.CancelledError:
            link.close()
            raise
        except Exception as error:  # noqa: BLE001 - contained: an address from the bus must not end the role
            report("bus.direct_links: connecting to an owner of payloads", error)
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

    async def _connect(self, link: _Link, address: OwnerAddress) -> None:
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
                raise OSError("it has another certificate than it said")
        await link.opened


class _Link(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, links: DirectLinks, attempt: int, owner: str, address: OwnerAddress) -> None:
        self._links = links
        self._transport: asyncio.Transport | None = None
        self.attempt = attempt
        self.owner = owner
        self.is_lost = False
        self.stream = DirectStream(address.secret, new_nonce())
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Ends it; nothing of it is heard any more."""
        if not self.opened.done():
            self.opened.cancel()
        if self._transport is not None:
            self._transport.abort()

    def say(self) -> None:
        """Sends what the stream has to say."""
        said = self.stream.to_send()
        if said and self._transport is not None:
            self._transport.write(said)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        connection = transport.get_extra_info("socket")
        if connection is not None:  # an owner whose host has gone says nothing, not even that
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.stream.place()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            ended = self.stream.received(nbytes, time.monotonic())
        except DirectBroken as error:
            self._fail(error)
            return
        self.say()
        if self.stream.is_open and not self.opened.done():
            self.opened.set_result(None)
        if ended:
            self._links.came(self, ended)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the owner closed the connection"))

    def _fail(self, error: Exception) -> None:
        self.is_lost = True
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._transport is not None:
            self._transport.abort()
        self._links.gone(self)
