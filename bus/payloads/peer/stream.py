"""`PeerStream`: the reader's side of the protocol on a connection to an owner of payloads. Sans-IO.

The owner sends a nonce, the reader its own nonce and its code, the owner its code (`bus.payloads.peer.authentication`).
Then the reader requests pieces, a few at a time; payloads take turns. The owner responds in order: the length, the
content, and a byte that says whether the slot still had the payload after all of it was sent; or a negative length if the
payload was freed before. Content is received straight into its buffer. Times are seconds of any clock.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum
from typing import NamedTuple

import numpy as np

from bus.payloads.fetch_plan import FetchEnd, Loss, Outcome
from bus.payloads.peer.authentication import NONCE_BYTES, PROOF_BYTES, is_proof, owner_proof, reader_proof
from schemas.core.tensors import PayloadRef
from schemas.wire.transfers import PayloadFetch

PEER_PIECE_BYTES = 1 << 20
"""The size of a piece; small, so that a payload of 2 GB does not delay small ones for long."""

MAX_REQUESTED_PIECES = 4
"""Requested pieces on one connection."""

PEER_PIECE_TIMEOUT_S = 10.0
"""How long a piece may take before the connection counts as broken."""

PEER_SILENCE_TIMEOUT_S = 2.0
"""How long no byte may arrive while pieces are requested, likewise."""

REQUEST_LENGTH = struct.Struct("<H")
CONTENT_LENGTH = struct.Struct("<q")
GONE, STALE, CURRENT = -1, 0, 1


class PeerProtocolError(ConnectionError):
    """The other end violates the protocol."""


class _Part(Enum):
    GREETING = NONCE_BYTES
    PROOF = PROOF_BYTES
    LENGTH = CONTENT_LENGTH.size
    CONTENT = 0
    VERDICT = 1


class _Fetch:
    __slots__ = ("buffer", "has_ended", "missing", "next_offset", "number", "ref")

    def __init__(self, number: int, ref: PayloadRef, buffer: memoryview) -> None:
        self.number = number
        self.ref = ref
        self.buffer = buffer
        self.missing = ref.size
        self.next_offset = 0
        self.has_ended = False


class _Piece(NamedTuple):
    fetch: _Fetch
    offset: int
    size: int


class PeerStream:
    """One connection. Send what `to_send` returns; put received bytes into `place`, and pass their number to `received`.

    `secret` is that of the owner, `nonce` this end's. Raises PeerProtocolError.
    """

    def __init__(self, secret: bytes, nonce: bytes, piece_bytes: int = PEER_PIECE_BYTES) -> None:
        self._secret = secret
        self._nonce = nonce
        self._piece_bytes = piece_bytes
        self._unsent: list[bytes] = []
        self._expected = b""
        self._fetches: dict[int, _Fetch] = {}
        self._line: deque[_Fetch] = deque()
        self._asked: deque[_Piece] = deque()
        self._progress_s = self._heard_s = 0.0
        self._spare = memoryview(bytearray(PROOF_BYTES))
        self._part = _Part.GREETING
        self._place = self._spare[:NONCE_BYTES]
        self.is_open = False
        self.received_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is running."""
        return bool(self._asked)

    def begin(self, number: int, ref: PayloadRef, now_s: float) -> FetchEnd | None:
        """Starts to fetch `ref`, which is not empty; returns its end at once if there is no memory for it."""
        try:
            buffer = np.empty(ref.size, np.uint8).data
        except MemoryError:
            return FetchEnd(number, Loss.UNREACHABLE)
        fetch = self._fetches[number] = _Fetch(number, ref, buffer)
        self._line.append(fetch)
        self._request(now_s)
        return None

    def cancel(self, number: int) -> None:
        """Ends a fetch without a result."""
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            fetch.has_ended = True

    def unfinished(self) -> list[tuple[int, PayloadRef]]:
        """The fetches that have not ended, which are lost with the connection."""
        return [(fetch.number, fetch.ref) for fetch in self._fetches.values()]

    def to_send(self) -> bytes:
        """The bytes to send now."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data

    def place(self) -> memoryview:
        """Where to put the next bytes, at most so many."""
        return self._place

    def received(self, count: int, now_s: float) -> list[FetchEnd]:
        """Takes so many bytes in `place`; returns the fetches that they end."""
        self._place = self._place[count:]
        self._heard_s = now_s
        ended: list[FetchEnd] = []
        if not len(self._place):
            self._complete(now_s, ended)
        return ended

    def is_overdue(self, now_s: float) -> bool:
        """Whether requested pieces are overdue."""
        return bool(self._asked) and (
            now_s - self._heard_s >= PEER_SILENCE_TIMEOUT_S or now_s - self._progress_s >= PEER_PIECE_TIMEOUT_S
        )

    def _complete(self, now_s: float, ended: list[FetchEnd]) -> None:
        received = self._spare
        match self._part:
            case _Part.GREETING:
                greeting = bytes(received[:NONCE_BYTES])
                self._unsent.append(self._nonce + reader_proof(self._secret, greeting, self._nonce))
                self._expected = owner_proof(self._secret, greeting, self._nonce)
                self._expect(_Part.PROOF)
            case _Part.PROOF:
                if not is_proof(received[:PROOF_BYTES], self._expected):
                    raise PeerProtocolError("the owner does not prove who it is")
                self.is_open = True
                self._request(now_s)
                self._expect(_Part.LENGTH)
            case _Part.LENGTH:
                self._start_piece(CONTENT_LENGTH.unpack(received[: CONTENT_LENGTH.size])[0], now_s, ended)
            case _Part.CONTENT:
                self._expect(_Part.VERDICT)
            case _Part.VERDICT:
                if received[0] not in (STALE, CURRENT):
                    raise PeerProtocolError("not a verdict")
                self._end_piece(now_s, received[0] == CURRENT, ended)

    def _expect(self, part: _Part) -> None:
        self._part = part
        self._place = self._spare[: part.value]

    def _start_piece(self, length: int, now_s: float, ended: list[FetchEnd]) -> None:
        if not self._asked:
            raise PeerProtocolError("an answer to no question")
        fetch, offset, size = self._asked[0]
        if length == GONE:
            self._end_piece(now_s, False, ended)
        elif length == size:
            self._part = _Part.CONTENT
            self._place = fetch.buffer[offset : offset + size]
        else:
            raise PeerProtocolError("a piece of another length than requested")

    def _end_piece(self, now_s: float, is_current: bool, ended: list[FetchEnd]) -> None:
        fetch, _, size = self._asked.popleft()
        self._progress_s = now_s
        self._expect(_Part.LENGTH)
        if not fetch.has_ended:
            fetch.missing -= size
            if not is_current:
                self._end(fetch, Loss.STALE, ended)
            elif not fetch.missing:
                self.received_bytes += fetch.ref.size
                self._end(fetch, fetch.buffer, ended)
        self._request(now_s)

    def _end(self, fetch: _Fetch, outcome: Outcome, ended: list[FetchEnd]) -> None:
        fetch.has_ended = True
        del self._fetches[fetch.number]
        ended.append(FetchEnd(fetch.number, outcome))

    def _request(self, now_s: float) -> None:
        while self.is_open and self._line and len(self._asked) < MAX_REQUESTED_PIECES:
            fetch = self._line.popleft()
            if fetch.has_ended:
                continue
            if not self._asked:
                self._progress_s = self._heard_s = now_s
            offset, ref = fetch.next_offset, fetch.ref
            size = min(self._piece_bytes, ref.size - offset)
            question = PayloadFetch(ref._replace(offset=ref.offset + offset, size=size)).pack()
            self._unsent.append(REQUEST_LENGTH.pack(len(question)) + question)
            self._asked.append(_Piece(fetch, offset, size))
            fetch.next_offset += size
            if fetch.next_offset < ref.size:
                self._line.append(fetch)
