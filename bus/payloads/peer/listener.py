"""`PeerListener`: sends payloads in this process's shared memory to readers on other hosts, on TCP connections to itself.

Content is sent straight from the slot, without a copy in this process. The slot may be given to another payload
meanwhile: a check of the generation after all of a piece was sent decides what the byte after it says.

A reader must first prove that it knows the secret of this process (`bus.payloads.peer.authentication`). One that does not
in time, sends a malformed request, or does not read what it requested, is disconnected. The number of connections is
bounded; a rejected reader fetches through the broker.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from typing import Self

from bus.naming.identity import owner_of
from bus.nats.access import BrokerAccess
from bus.nats.connection import Bus
from bus.payloads.arena import PayloadReader, StalePayload
from bus.payloads.peer.authentication import (
    NONCE_BYTES,
    PROOF_BYTES,
    is_encrypted,
    is_proof,
    listening_context,
    new_nonce,
    new_secret,
    own_fingerprint,
    owner_proof,
    reader_proof,
    renew,
)
from bus.payloads.peer.stream import CONTENT_LENGTH, CURRENT, GONE, PEER_PIECE_BYTES, REQUEST_LENGTH, STALE
from schemas.core.names import ListenAddress
from schemas.core.tensors import PayloadRef
from schemas.wire.codec import MalformedMessage
from schemas.wire.transfers import OwnerAddress, PayloadFetch

logger = logging.getLogger("weir.bus")

MAX_READERS = 512
"""Connections of readers to one process."""

MAX_UNPROVEN = 64
"""Those of readers that have not authenticated yet."""

PROOF_TIMEOUT_S = 3.0
"""How long a reader may take to authenticate."""

SEND_TIMEOUT_S = 10.0
"""How long a reader may take to read a requested piece."""

IDLE_READER_LIMIT_S = 300.0
"""A reader without a request for so long is disconnected: it would have closed the connection before."""

_MAX_REQUEST_BYTES = 1024
_MAX_REQUESTS = 16  # of one reader in the queue: it sends fewer
_CHECK_EVERY_S = 1.0


class PeerListener:
    """Listens for process `owner`. Everything runs in one event loop."""

    def __init__(self, owner: str, where: ListenAddress, access: BrokerAccess, is_encrypted: bool) -> None:
        """With `is_encrypted` uses the certificate of `access`. Raises BrokerRefused if that is not possible."""
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
        """Listens on the address of the option, on none if `where` is None; encrypted if the connection to the broker is.

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
                ssl_handshake_timeout=None if self._context is None else PROOF_TIMEOUT_S,
            )
        except OSError as error:
            raise OSError(f"--payload-listen={self._where.host}:{self._where.port}: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._check = loop.call_later(_CHECK_EVERY_S, self._disconnect_idle)

    def address(self, local_host: str) -> OwnerAddress:
        """The address for readers, with `local_host` if the option names no host; without one if this process does not
        listen.
        """
        host = local_host if self._where.is_any else self._where.host
        if self._server is None or not host:
            return OwnerAddress()
        if self._context is None:
            return OwnerAddress(host, self.port, self._secret)
        try:
            renew(self._context, self._access)
            return OwnerAddress(host, self.port, self._secret, own_fingerprint(self._access))
        except (OSError, ValueError) as error:
            logger.error("--nats-cert %s can't be used for connections between processes: %s", self._access.cert, error)
            return OwnerAddress()

    def close(self) -> None:
        """Closes all connections."""
        if self._check is not None:
            self._check.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        for reader in list(self._readers):
            reader.transport.abort()

    def admits(self, reader: _Reader) -> bool:
        """Whether another connection is allowed."""
        unproven = sum(not known.is_proven for known in self._readers)
        if self._server is None or len(self._readers) >= MAX_READERS or unproven >= MAX_UNPROVEN:
            self.refused += 1
            return False
        self._readers.add(reader)
        return True

    def on_closed(self, reader: _Reader) -> None:
        """A connection was lost."""
        self._readers.discard(reader)

    def content(self, piece: PayloadRef) -> memoryview | None:
        """The content of a piece, in place; None if the payload was freed."""
        if owner_of(piece.segment) != self._owner or not 0 < piece.size <= PEER_PIECE_BYTES:
            return None
        try:
            return self._payloads.view(piece)
        except (StalePayload, ValueError):
            return None

    def is_current(self, piece: PayloadRef) -> bool:
        """Whether the content that was sent was complete."""
        return self._payloads.is_current(piece)

    def expected_proof(self, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
        """The code of a reader that knows the secret."""
        return reader_proof(self._secret, owner_nonce, reader_nonce)

    def own_proof(self, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
        """The code of this process."""
        return owner_proof(self._secret, owner_nonce, reader_nonce)

    def _disconnect_idle(self) -> None:
        now_s = time.monotonic()
        for reader in [reader for reader in self._readers if now_s >= reader.until_s]:
            reader.reject()
        self._check = asyncio.get_running_loop().call_later(_CHECK_EVERY_S, self._disconnect_idle)


class _Reader(asyncio.Protocol):
    """One connection."""

    def __init__(self, listener: PeerListener) -> None:
        self._listener = listener
        self._nonce = new_nonce()
        self._heard = bytearray()
        self._questions: deque[PayloadRef] = deque()
        self._sending: PayloadRef | None = None  # the piece that is not sent completely
        self._is_paused = False
        self._is_due = False
        self.is_proven = False
        self.until_s = time.monotonic() + PROOF_TIMEOUT_S
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if not self._listener.admits(self):
            self.transport.abort()
            return
        # Called when the last byte was sent, not sooner: the slot is checked after that.
        self.transport.set_write_buffer_limits(high=1, low=0)
        self.transport.write(self._nonce)

    def connection_lost(self, _error: Exception | None) -> None:
        self._questions.clear()
        self._sending = None
        self._listener.on_closed(self)

    def reject(self) -> None:
        """Closes the connection and counts it as rejected."""
        self._listener.refused += not self.is_proven
        self._questions.clear()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._heard += data
        if not self.is_proven and not self._is_authenticated():
            return
        try:
            self._read_requests()
        except MalformedMessage:
            self.reject()
            return
        if self._questions and not self._is_due and self._sending is None:
            self._send_piece()

    def _is_authenticated(self) -> bool:
        if len(self._heard) < NONCE_BYTES + PROOF_BYTES:
            return False
        nonce = bytes(self._heard[:NONCE_BYTES])
        proof = bytes(self._heard[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES])
        if not is_proof(proof, self._listener.expected_proof(self._nonce, nonce)):
            self.reject()
            return False
        del self._heard[: NONCE_BYTES + PROOF_BYTES]
        self.is_proven = True
        self.until_s = time.monotonic() + IDLE_READER_LIMIT_S
        self.transport.write(self._listener.own_proof(self._nonce, nonce))
        return True

    def _read_requests(self) -> None:
        while len(self._heard) >= REQUEST_LENGTH.size:
            (length,) = REQUEST_LENGTH.unpack_from(self._heard)
            if length > _MAX_REQUEST_BYTES or len(self._questions) >= _MAX_REQUESTS:
                raise MalformedMessage("more requests than a reader may send")
            end = REQUEST_LENGTH.size + length
            if len(self._heard) < end:
                return
            self._questions.append(PayloadFetch.unpack(bytes(self._heard[REQUEST_LENGTH.size : end])).piece)
            del self._heard[:end]

    def _send_piece(self) -> None:
        """Sends one piece. Further requests wait until this one was sent, or for another turn of the loop."""
        self._is_due = False
        if self.transport.is_closing() or not self._questions or self._is_paused:
            return
        piece = self._questions.popleft()
        content = self._listener.content(piece)
        if content is None:
            self.transport.write(CONTENT_LENGTH.pack(GONE))
            self._continue()
            return
        self._sending = piece
        self.until_s = time.monotonic() + SEND_TIMEOUT_S
        self.transport.writelines((CONTENT_LENGTH.pack(len(content)), content))
        if not self._is_paused:
            self._on_sent()

    def _on_sent(self) -> None:
        piece, self._sending = self._sending, None
        if piece is None or self.transport.is_closing():
            return
        self._listener.sent_bytes += piece.size
        self.until_s = time.monotonic() + IDLE_READER_LIMIT_S
        self.transport.write(bytes((CURRENT if self._listener.is_current(piece) else STALE,)))
        self._continue()

    def _continue(self) -> None:
        if self._questions and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_piece)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._sending is not None:
            self._on_sent()
        else:
            self._continue()
