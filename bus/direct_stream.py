"""`DirectStream`: what a reader says and hears on a connection to an owner of payloads. Sans-IO.

The owner greets with a nonce, the reader answers with its own and its proof, the owner proves itself (`bus.direct_proof`).
Then the reader asks for pieces, a few at a time; payloads take turns. The owner answers in order: the length, the content,
and a byte that says whether the content was still that payload's when all of it had left; or a length below 0, where it has
gone before. Content is received straight into its place. Times are seconds of any clock.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum
from typing import NamedTuple

import numpy as np

from bus.direct_proof import NONCE_BYTES, PROOF_BYTES, is_proof, owner_proof, reader_proof
from bus.fetch_plan import Ended, Loss, Outcome
from schemas.fetches import pack_fetch
from schemas.tensors import PayloadRef

DIRECT_PIECE_BYTES = 1 << 20
"""One piece; so a payload of 2 GB does not hold up small ones for long."""

MAX_ASKED_PIECES = 4
"""Pieces that are on their way on one connection."""

DIRECT_PATIENCE_S = 10.0
"""How long a piece may take, beyond which the connection counts as broken."""

SILENCE_PATIENCE_S = 2.0
"""How long nothing at all may come of what was asked for, likewise."""

QUESTION_LENGTH = struct.Struct("<H")
CONTENT_LENGTH = struct.Struct("<q")
GONE, STALE, CURRENT = -1, 0, 1


class DirectBroken(ConnectionError):
    """The other end does not say what it should."""


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


class DirectStream:
    """See the module. What is to be sent is taken by `to_send`; what comes goes into `place`, of which `received` is told.

    `nonce` is this end's. Raises DirectBroken.
    """

    def __init__(self, secret: bytes, nonce: bytes, piece_bytes: int = DIRECT_PIECE_BYTES) -> None:
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
        """Whether something is on its way."""
        return bool(self._asked)

    def begin(self, number: int, ref: PayloadRef, now_s: float) -> Ended | None:
        """All of `ref` is to be fetched, which is not empty; tells at once where there is no memory for it."""
        try:
            buffer = np.empty(ref.size, np.uint8).data
        except MemoryError:
            return Ended(number, Loss.UNREACHABLE)
        fetch = self._fetches[number] = _Fetch(number, ref, buffer)
        self._line.append(fetch)
        self._ask(now_s)
        return None

    def give_up(self, number: int) -> None:
        """Nobody wants it any more."""
        fetch = self._fetches.pop(number, None)
        if fetch is not None:
            fetch.has_ended = True

    def unfinished(self) -> list[tuple[int, PayloadRef]]:
        """The fetches that have not ended, which they do not here once the connection is lost."""
        return [(fetch.number, fetch.ref) for fetch in self._fetches.values()]

    def to_send(self) -> bytes:
        """What is to be said now."""
        said = b"".join(self._unsent)
        self._unsent.clear()
        return said

    def place(self) -> memoryview:
        """Where the next bytes are to be put, as many of them as there is room for."""
        return self._place

    def received(self, count: int, now_s: float) -> list[Ended]:
        """So many bytes have been put there: what has ended by them."""
        self._place = self._place[count:]
        self._heard_s = now_s
        ended: list[Ended] = []
        if not len(self._place):
            self._complete(now_s, ended)
        return ended

    def is_overdue(self, now_s: float) -> bool:
        """Whether what was asked for has been awaited for too long."""
        return bool(self._asked) and (
            now_s - self._heard_s >= SILENCE_PATIENCE_S or now_s - self._progress_s >= DIRECT_PATIENCE_S
        )

    def _complete(self, now_s: float, ended: list[Ended]) -> None:
        said = self._spare
        match self._part:
            case _Part.GREETING:
                greeting = bytes(said[:NONCE_BYTES])
                self._unsent.append(self._nonce + reader_proof(self._secret, greeting, self._nonce))
                self._expected = owner_proof(self._secret, greeting, self._nonce)
                self._expect(_Part.PROOF)
            case _Part.PROOF:
                if not is_proof(said[:PROOF_BYTES], self._expected):
                    raise DirectBroken("the owner does not prove who it is")
                self.is_open = True
                self._ask(now_s)
                self._expect(_Part.LENGTH)
            case _Part.LENGTH:
                self._begin_piece(CONTENT_LENGTH.unpack(said[: CONTENT_LENGTH.size])[0], now_s, ended)
            case _Part.CONTENT:
                self._expect(_Part.VERDICT)
            case _Part.VERDICT:
                if said[0] not in (STALE, CURRENT):
                    raise DirectBroken("not a verdict")
                self._end_piece(now_s, said[0] == CURRENT, ended)

    def _expect(self, part: _Part) -> None:
        self._part = part
        self._place = self._spare[: part.value]

    def _begin_piece(self, length: int, now_s: float, ended: list[Ended]) -> None:
        if not self._asked:
            raise DirectBroken("an answer to no question")
        fetch, offset, size = self._asked[0]
        if length == GONE:
            self._end_piece(now_s, False, ended)
        elif length == size:
            self._part = _Part.CONTENT
            self._place = fetch.buffer[offset : offset + size]
        else:
            raise DirectBroken("not the length that was asked for")

    def _end_piece(self, now_s: float, is_current: bool, ended: list[Ended]) -> None:
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
        self._ask(now_s)

    def _end(self, fetch: _Fetch, outcome: Outcome, ended: list[Ended]) -> None:
        fetch.has_ended = True
        del self._fetches[fetch.number]
        ended.append(Ended(fetch.number, outcome))

    def _ask(self, now_s: float) -> None:
        while self.is_open and self._line and len(self._asked) < MAX_ASKED_PIECES:
            fetch = self._line.popleft()
            if fetch.has_ended:
                continue
            if not self._asked:
                self._progress_s = self._heard_s = now_s
            offset, ref = fetch.next_offset, fetch.ref
            size = min(self._piece_bytes, ref.size - offset)
            question = pack_fetch(ref._replace(offset=ref.offset + offset, size=size))
            self._unsent.append(QUESTION_LENGTH.pack(len(question)) + question)
            self._asked.append(_Piece(fetch, offset, size))
            fetch.next_offset += size
            if fetch.next_offset < ref.size:
                self._line.append(fetch)
