"""`PayloadServer`: gives readers on other hosts what lies in this process's shared memory, piece by piece.

Each piece is copied once, out of the slot: the slot may be given to another payload while the piece waits to be sent, and
a look at the generation after the copy proves that it is whole. What is sent in one turn of the loop is bounded, and
nothing is while the broker is slow to take it; questions wait meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from bus import subjects
from bus.connection import Bus, Message
from bus.direct_listener import DirectListener
from bus.identity import owner_of
from bus.payloads import PayloadReader, StalePayload
from bus.reserved_subjects import may_answer
from runtime.containment import contained
from schemas.fetches import ADDRESS_QUESTION, OwnerAddress, pack_address, unpack_fetch
from schemas.tensors import PayloadRef
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

MAX_QUESTIONS = 10_000
"""Pieces that were asked for and wait to be sent; readers ask again for others."""

MAX_TURN_BYTES = 1 << 20
"""What is sent in one turn of the event loop."""

MAX_UNSENT_BYTES = 8 << 20
"""What waits for the broker to take it, beyond which no more pieces are sent."""

_GONE = b""
_WAIT_S = 0.002


class PayloadServer:
    """See the module. `owner` is this process, `listener` where it gives payloads on connections to itself, if it does.

    All of it is in the event loop.
    """

    def __init__(self, bus: Bus, owner: str, listener: DirectListener | None = None) -> None:
        self._bus = bus
        self._listener = listener
        self._owner = owner
        self._reader = PayloadReader()
        self._questions: deque[tuple[PayloadRef, str]] = deque()
        self._is_due = False
        self.malformed_messages = 0
        self.sent_bytes = 0

    async def start(self) -> None:
        """Listens for readers."""
        await self._bus.subscribe(subjects.fetch(self._owner), self._on_question)

    @property
    def refused_readers(self) -> int:
        """Connections that were not taken, or whose readers did not prove that they may read."""
        return 0 if self._listener is None else self._listener.refused

    def close(self) -> None:
        """Takes readers on connections no more."""
        if self._listener is not None:
            self._listener.close()

    def _on_question(self, message: Message) -> None:
        if message.data == ADDRESS_QUESTION:
            if may_answer(message, subjects.fetched("")):
                listener = self._listener
                address = OwnerAddress() if listener is None else listener.address(self._bus.local_host)
                self._bus.publish(message.reply, pack_address(address))
            return
        try:
            piece = unpack_fetch(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message that asks for no piece of a payload: %s", error)
            return
        if len(self._questions) < MAX_QUESTIONS and may_answer(message, subjects.fetched("")):
            self._questions.append((piece, message.reply))
            if not self._is_due:
                self._answer()

    def _answer(self) -> None:
        self._is_due = False
        sent_bytes = 0
        while self._questions and sent_bytes < MAX_TURN_BYTES:
            if self._bus.unsent_bytes > MAX_UNSENT_BYTES:
                break
            piece, reply = self._questions.popleft()
            content = self._content(piece) or _GONE
            sent_bytes += len(content)
            self._bus.publish(reply, content)
        self.sent_bytes += sent_bytes
        if self._questions:
            self._is_due = True
            asyncio.get_running_loop().call_later(0 if sent_bytes else _WAIT_S, self._answer)

    @contained()  # one piece that can't be read must not stop the others that wait
    def _content(self, piece: PayloadRef) -> bytes:
        if owner_of(piece.segment) != self._owner or piece.size > self._bus.max_payload_bytes:
            return _GONE
        try:
            content = bytes(self._reader.view(piece))
        except (StalePayload, ValueError):
            return _GONE
        return content if self._reader.is_current(piece) else _GONE
