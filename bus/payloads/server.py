"""`PayloadServer`: sends pieces of payloads in this process's shared memory to readers on other hosts.

Each piece is copied out of its slot once: the slot may be given to another payload while the piece is queued, and a check
of the generation after the copy proves that it is complete. The bytes sent in one turn of the loop are bounded, and
nothing is sent while the broker is slow to read; requests are queued meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from bus.naming import subjects
from bus.naming.identity import owner_of
from bus.naming.reserved_subjects import may_reply_to
from bus.nats.connection import Bus, Message
from bus.payloads.arena import PayloadReader, StalePayload
from bus.payloads.peer.listener import PeerListener
from runtime.containment import contained
from schemas.core.tensors import PayloadRef
from schemas.wire.codec import MalformedMessage
from schemas.wire.transfers import ADDRESS_REQUEST, OwnerAddress, PayloadFetch

logger = logging.getLogger("weir.bus")

MAX_QUEUED_REQUESTS = 10_000
"""Requests for pieces in the queue; more are dropped, and readers repeat them."""

MAX_TURN_BYTES = 1 << 20
"""The most that is sent in one turn of the event loop."""

MAX_UNSENT_BYTES = 8 << 20
"""The unsent bytes of the connection to the broker beyond which no pieces are sent."""

_GONE = b""
_WAIT_S = 0.002


class PayloadServer:
    """Serves the payloads of process `owner`, also on connections to `listener`, if there is one.

    Everything runs in one event loop.
    """

    def __init__(self, bus: Bus, owner: str, listener: PeerListener | None = None) -> None:
        self._bus = bus
        self._listener = listener
        self._owner = owner
        self._reader = PayloadReader()
        self._requests: deque[tuple[PayloadRef, str]] = deque()
        self._is_due = False
        self.malformed_messages = 0
        self.sent_bytes = 0

    async def start(self) -> None:
        """Subscribes to requests."""
        await self._bus.subscribe(subjects.fetch(self._owner), self._on_request)

    @property
    def refused_readers(self) -> int:
        """Connections that were rejected, or whose readers did not authenticate."""
        return 0 if self._listener is None else self._listener.refused

    def close(self) -> None:
        """Closes the connections to readers."""
        if self._listener is not None:
            self._listener.close()

    def _on_request(self, message: Message) -> None:
        if message.data == ADDRESS_REQUEST:
            if may_reply_to(message, subjects.fetched("")):
                listener = self._listener
                address = OwnerAddress() if listener is None else listener.address(self._bus.local_host)
                self._bus.publish(message.reply, address.pack())
            return
        try:
            piece = PayloadFetch.unpack(message.data).piece
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a malformed request for a piece of a payload: %s", error)
            return
        if len(self._requests) < MAX_QUEUED_REQUESTS and may_reply_to(message, subjects.fetched("")):
            self._requests.append((piece, message.reply))
            if not self._is_due:
                self._serve()

    def _serve(self) -> None:
        self._is_due = False
        sent_bytes = 0
        while self._requests and sent_bytes < MAX_TURN_BYTES:
            if self._bus.unsent_bytes > MAX_UNSENT_BYTES:
                break
            piece, reply = self._requests.popleft()
            content = self._content(piece) or _GONE
            sent_bytes += len(content)
            self._bus.publish(reply, content)
        self.sent_bytes += sent_bytes
        if self._requests:
            self._is_due = True
            asyncio.get_running_loop().call_later(0 if sent_bytes else _WAIT_S, self._serve)

    @contained()  # a piece that can't be read must not stop the queued ones
    def _content(self, piece: PayloadRef) -> bytes:
        if owner_of(piece.segment) != self._owner or piece.size > self._bus.max_payload_bytes:
            return _GONE
        try:
            content = bytes(self._reader.view(piece))
        except (StalePayload, ValueError):
            return _GONE
        return content if self._reader.is_current(piece) else _GONE
