"""`PayloadServer`: sends pieces of payloads in this process's shared memory to readers on other hosts.

A piece leaves straight from its slot. The slot may be given to another payload meanwhile: a check of the generation after
that decides what the message behind it says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial

from weir.bus.links.framing import Outgoing
from weir.bus.links.link import Frames, LinkEnd
from weir.bus.links.tcp import TcpListener
from weir.bus.links.tcp_link import TcpLink
from weir.bus.naming import subjects
from weir.bus.naming.identity import owner_of
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.payloads.arena import PayloadReader, StalePayload
from weir.bus.payloads.fetch_plan import PIECE_BYTES
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.transfers import ADDRESS_REQUEST, FREED, KEPT, OwnerAddress, PayloadFetch

logger = logging.getLogger("weir.bus")

MAX_LINK_REQUESTS = 16
"""Requests of one link in the queue; a reader sends fewer, and is disconnected beyond it."""


class PayloadServer:
    """Serves the payloads of process `owner` on links to `listener`; without one, tells readers so.

    Everything runs in one event loop.
    """

    def __init__(self, bus: Bus, owner: str, listener: TcpListener | None = None) -> None:
        self._bus = bus
        self._listener = listener
        self._owner = owner
        self._reader = PayloadReader()
        # Of links with requests; the first one is being sent.
        self._of_links: dict[TcpLink, deque[tuple[PayloadRef, bytes]]] = {}
        if listener is not None:
            listener.on_frames, listener.on_end = self._on_frames, self._on_link_end
        self.malformed_messages = 0
        self.sent_bytes = 0

    async def start(self) -> None:
        """Subscribes to requests for the address."""
        await self._bus.subscribe(subjects.fetch(self._owner), self._on_request)

    @property
    def refused_readers(self) -> int:
        """Links that were rejected, or whose readers did not prove that they may read."""
        return 0 if self._listener is None else self._listener.refused

    def close(self) -> None:
        """Closes the links of readers."""
        if self._listener is not None:
            self._listener.close()

    def _on_request(self, message: Message) -> None:
        if message.data != ADDRESS_REQUEST:
            self.malformed_messages += 1
            logger.warning("dropped a malformed request for the address of payloads")
        elif may_reply_to(message, subjects.fetched("")):
            listener = self._listener
            address = OwnerAddress() if listener is None else listener.address(self._bus.local_host)
            self._bus.publish(message.reply, address.pack())

    def _view(self, piece: PayloadRef) -> memoryview | None:
        """The content of a piece, in place; None if the payload was freed."""
        if owner_of(piece.segment) != self._owner or not 0 <= piece.size <= PIECE_BYTES:
            return None
        try:
            return self._reader.view(piece)
        except (StalePayload, ValueError):
            return None

    def _on_frames(self, link: TcpLink, frames: Frames) -> None:
        is_idle = link not in self._of_links
        queue = self._of_links.setdefault(link, deque())
        try:
            for subject, data in frames:
                if subject:
                    queue.append((PayloadFetch.unpack(data).piece, subject))
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("link to %s: closing it, because of a malformed request for a piece: %s", link.name, error)
            link.break_off()
            return
        if len(queue) > MAX_LINK_REQUESTS:
            logger.warning("link to %s: closing it, because of %d requests at once", link.name, len(queue))
            link.break_off()
        elif is_idle:
            self._send_next(link)

    def _on_link_end(self, link: TcpLink, _end: LinkEnd) -> None:
        self._of_links.pop(link, None)

    def _send_next(self, link: TcpLink) -> None:
        """Sends one piece. Further ones wait until it has left, and for another turn of the loop."""
        queue = self._of_links.get(link)
        if not queue:
            return
        piece, subject = queue[0]
        content = self._view(piece)
        if content is None:
            link.send([self._end_piece(link, FREED)])
        else:
            link.send_content(subject, content, partial(self._on_sent, link))

    def _on_sent(self, link: TcpLink) -> Outgoing:
        piece, _ = self._of_links[link][0]
        self.sent_bytes += piece.size
        return self._end_piece(link, KEPT if self._reader.is_current(piece) else FREED)

    def _end_piece(self, link: TcpLink, verdict: str) -> Outgoing:
        queue = self._of_links[link]
        queue.popleft()
        if queue:
            asyncio.get_running_loop().call_soon(self._send_next, link)
        else:
            del self._of_links[link]
        return verdict, b""
