"""`DirectListener`: gives readers on other hosts what lies in this process's shared memory, on connections to itself.

Content leaves straight out of the slot, without a copy in this process. The slot may be given to another payload meanwhile:
a look at the generation when all of a piece has left decides what the reader is told behind it.

Who connects must prove first that the broker has told it the secret of this process. Who does not in time, who asks for
what can't be, or does not take what it asked for, is sent away. Connections are bounded; who is refused fetches by the
broker.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from typing import Self

from bus.broker_access import BrokerAccess
from bus.connection import Bus
from bus.direct_proof import NONCE_BYTES, PROOF_BYTES, is_proof, new_nonce, new_secret, owner_proof, reader_proof
from bus.direct_stream import CONTENT_LENGTH, CURRENT, DIRECT_PIECE_BYTES, GONE, QUESTION_LENGTH, STALE
from bus.direct_tls import is_encrypted, listening_context, own_fingerprint, renew
from bus.identity import owner_of
from bus.payloads import PayloadReader, StalePayload
from schemas.fetches import OwnerAddress, unpack_fetch
from schemas.listen_address import ListenAddress
from schemas.tensors import PayloadRef
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

MAX_READERS = 512
"""Connections of readers to one process."""

MAX_UNPROVEN = 64
"""Of them, those that have not proven yet that they may read."""

PROOF_PATIENCE_S = 3.0
"""How long a reader may take for its proof."""

TAKING_PATIENCE_S = 10.0
"""How long a reader may take for a piece that it has asked for."""

SILENCE_LIMIT_S = 300.0
"""A reader that asks for nothing for so long has gone: it would have closed the connection before."""

_MAX_QUESTION_BYTES = 1024
_MAX_QUESTIONS = 16  # of one reader that are not answered: it asks for fewer
_CHECK_EVERY_S = 1.0


class DirectListener:
    """See the module. `owner` is this process; all of it is in the event loop."""

    def __init__(self, owner: str, where: ListenAddress, access: BrokerAccess, is_encrypted: bool) -> None:
        """With `is_encrypted`, by the certificate of `access`. Raises BrokerRefused where it can't be used."""
        self._owner = owner
        self._where = where
        self._access = access
        self._context: ssl.SSLContext | None = listening_context(access) if is_encrypted else None
        self._server: asyncio.Server | None = None
        self._check: asyncio.TimerHandle | None = None
        self._payloads = PayloadReader()
        self._secret = new_secret()
        self._readers: set[_Reader] = set()
        self.port = 0
        self.sent_bytes = 0
        self.refused = 0

    @classmethod
    async def opened(cls, bus: Bus, owner: str, where: str | None) -> Self | None:
        """Listens at `where` as the option names it, None for nowhere; encrypted if our connection to the broker is.

        Raises OSError or ValueError.
        """
        if where is None:
            return None
        listener = cls(owner, ListenAddress.of(where), bus.access, is_encrypted(bus))
        await listener.start()
        return listener

    async def start(self) -> None:
        """Listens. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Reader(self),
                self._where.host,
                self._where.port,
                ssl=self._context,
                backlog=MAX_UNPROVEN,
                ssl_handshake_timeout=None if self._context is None else PROOF_PATIENCE_S,
            )
        except OSError as error:
            raise OSError(f"--payload-listen={self._where.host}:{self._where.port}: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._check = loop.call_later(_CHECK_EVERY_S, self._send_away)

    def address(self, local_host: str) -> OwnerAddress:
        """What readers are told, where the broker sees this process at `local_host`; nowhere, if not at all."""
        host = local_host if self._where.is_any else self._where.host
        if self._server is None or not host:
            return OwnerAddress()
        if self._context is None:
            return OwnerAddress(host, self.port, self._secret)
        try:
            renew(self._context, self._access)
            return OwnerAddress(host, self.port, self._secret, own_fingerprint(self._access))
        except (OSError, ValueError) as error:
            logger.error("--nats-cert %s, for connections between processes: %s", self._access.cert, error)
            return OwnerAddress()

    def close(self) -> None:
        """Ends all connections."""
        if self._check is not None:
            self._check.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        for reader in list(self._readers):
            reader.transport.abort()

    def takes(self, reader: _Reader) -> bool:
        """Whether there is room for one more."""
        unproven = sum(not known.is_proven for known in self._readers)
        if self._server is None or len(self._readers) >= MAX_READERS or unproven >= MAX_UNPROVEN:
            self.refused += 1
            return False
        self._readers.add(reader)
        return True

    def has_gone(self, reader: _Reader) -> None:
        """A connection is lost."""
        self._readers.discard(reader)

    def content(self, piece: PayloadRef) -> memoryview | None:
        """What lies there, in place; None where it has gone."""
        if owner_of(piece.segment) != self._owner or not 0 < piece.size <= DIRECT_PIECE_BYTES:
            return None
        try:
            return self._payloads.view(piece)
        except (StalePayload, ValueError):
            return None

    def is_current(self, piece: PayloadRef) -> bool:
        """Whether what has been sent of it was whole."""
        return self._payloads.is_current(piece)

    def expected_proof(self, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
        """That of a reader who knows the secret."""
        return reader_proof(self._secret, owner_nonce, reader_nonce)

    def own_proof(self, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
        """That of this process."""
        return owner_proof(self._secret, owner_nonce, reader_nonce)

    def _send_away(self) -> None:
        now_s = time.monotonic()
        for reader in [reader for reader in self._readers if now_s >= reader.until_s]:
            reader.refuse()
        self._check = asyncio.get_running_loop().call_later(_CHECK_EVERY_S, self._send_away)


class _Reader(asyncio.Protocol):
    """One connection."""

    def __init__(self, listener: DirectListener) -> None:
        self._listener = listener
        self._nonce = new_nonce()
        self._heard = bytearray()
        self._questions: deque[PayloadRef] = deque()
        self._leaving: PayloadRef | None = None  # the piece that has not left yet
        self._is_paused = False
        self._is_due = False
        self.is_proven = False
        self.until_s = time.monotonic() + PROOF_PATIENCE_S
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if not self._listener.takes(self):
            self.transport.abort()
            return
        # Told when the last byte has left, not sooner: a slot is looked at after that.
        self.transport.set_write_buffer_limits(high=1, low=0)
        self.transport.write(self._nonce)

    def connection_lost(self, _error: Exception | None) -> None:
        self._questions.clear()
        self._leaving = None
        self._listener.has_gone(self)

    def refuse(self) -> None:
        """Ends the connection."""
        self._listener.refused += not self.is_proven
        self._questions.clear()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._heard += data
        if not self.is_proven and not self._is_proof_heard():
            return
        try:
            self._take_questions()
        except MalformedMessage:
            self.refuse()
            return
        if self._questions and not self._is_due and self._leaving is None:
            self._answer()

    def _is_proof_heard(self) -> bool:
        if len(self._heard) < NONCE_BYTES + PROOF_BYTES:
            return False
        nonce = bytes(self._heard[:NONCE_BYTES])
        proof = bytes(self._heard[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES])
        if not is_proof(proof, self._listener.expected_proof(self._nonce, nonce)):
            self.refuse()
            return False
        del self._heard[: NONCE_BYTES + PROOF_BYTES]
        self.is_proven = True
        self.until_s = time.monotonic() + SILENCE_LIMIT_S
        self.transport.write(self._listener.own_proof(self._nonce, nonce))
        return True

    def _take_questions(self) -> None:
        while len(self._heard) >= QUESTION_LENGTH.size:
            (length,) = QUESTION_LENGTH.unpack_from(self._heard)
            if length > _MAX_QUESTION_BYTES or len(self._questions) >= _MAX_QUESTIONS:
                raise MalformedMessage("more than a reader asks")
            end = QUESTION_LENGTH.size + length
            if len(self._heard) < end:
                return
            self._questions.append(unpack_fetch(bytes(self._heard[QUESTION_LENGTH.size : end])))
            del self._heard[:end]

    def _answer(self) -> None:
        """Sends one piece; what else is asked for waits for another turn of the loop, or until this one has left."""
        self._is_due = False
        if self.transport.is_closing() or not self._questions or self._is_paused:
            return
        piece = self._questions.popleft()
        content = self._listener.content(piece)
        if content is None:
            self.transport.write(CONTENT_LENGTH.pack(GONE))
            self._go_on()
            return
        self._leaving = piece
        self.until_s = time.monotonic() + TAKING_PATIENCE_S
        self.transport.writelines((CONTENT_LENGTH.pack(len(content)), content))
        if not self._is_paused:
            self._has_left()

    def _has_left(self) -> None:
        piece, self._leaving = self._leaving, None
        if piece is None or self.transport.is_closing():
            return
        self._listener.sent_bytes += piece.size
        self.until_s = time.monotonic() + SILENCE_LIMIT_S
        self.transport.write(bytes((CURRENT if self._listener.is_current(piece) else STALE,)))
        self._go_on()

    def _go_on(self) -> None:
        if self._questions and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._answer)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._leaving is not None:
            self._has_left()
        else:
            self._go_on()
