"""`SequenceStates`: checkpoints of the states of sequences, from which another worker continues them.

They are in a bucket in memory, with two places for each sequence: a checkpoint never overwrites the one before, because the
worker may die before the new one is known. A checkpoint is published on the same connection as the responses after it, so
after a response its checkpoint can be relied on. Reads are rare, and wait for a checkpoint that is still in flight.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from nats.errors import Error as NatsError

from bus.links.framing import Outgoing
from bus.naming import subjects
from bus.nats.connection import Bus
from bus.streams.declarations import ensure_states_bucket
from schemas.core.errors import WeirError, unavailable
from schemas.wire.codec import MalformedMessage
from schemas.wire.transfers import NOT_RESUMABLE, StatePiece, pack_pieces

logger = logging.getLogger("weir.bus")

PIECE_BYTES = 512 << 10
"""A larger checkpoint is split into several messages."""

MAX_STATE_BYTES = 64 << 20
"""A larger state is not checkpointed."""

FETCH_TIMEOUT_S = 1.0
"""How long a read waits for a checkpoint that has not arrived."""

_RETRY_S = 0.05
_PREPARE_TIMEOUT_S = 10.0

Wanted = tuple[str, int, int]
"""A checkpoint: (key of the sequence, number of requests before it, requests between two checkpoints)."""


class SequenceStates:
    """Encodes and reads checkpoints. `prepare` and `fetch` block; call them from threads other than the event loop's."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._is_needed = False
        bus.on_reconnect(self._recreate)

    def prepare(self) -> None:
        """Creates the bucket unless it exists. Raises UNAVAILABLE if the broker rejects it."""
        self._is_needed = True
        try:
            self._run(ensure_states_bucket(self._bus), _PREPARE_TIMEOUT_S)
        except (NatsError, OSError, TimeoutError) as error:
            raise unavailable(f"the message broker did not create the bucket for sequence states: {error}") from error

    def written(self, key: str, number: int, every: int, state: bytes) -> list[Outgoing]:
        """The messages of a checkpoint. For a state that is too large, those that invalidate earlier ones."""
        if len(state) > MAX_STATE_BYTES:
            return self.broken(key)
        place = number // every % 2
        pieces = pack_pieces(number, state, PIECE_BYTES)
        return [(subjects.sequence_state(key, place, piece), data) for piece, data in enumerate(pieces)]

    def broken(self, key: str) -> list[Outgoing]:
        """The messages that invalidate the earlier checkpoints of a sequence."""
        (data,) = pack_pieces(NOT_RESUMABLE, b"", PIECE_BYTES)
        return [(subjects.sequence_state(key, place, 0), data) for place in (0, 1)]

    def removed(self, key: str) -> list[Outgoing]:
        """The message that removes the checkpoints of a sequence."""
        return [(subjects.STATES_PURGE, json.dumps({"filter": subjects.sequence_states_of(key)}).encode())]

    def fetch(self, wanted: Iterable[Wanted]) -> dict[str, bytes]:
        """The states by key, without those that do not exist or are of another number."""
        states: dict[str, bytes] = self._run(self._fetch_all(list(wanted)), FETCH_TIMEOUT_S + _PREPARE_TIMEOUT_S)
        return states

    def _run(self, work: Any, timeout_s: float) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise

    async def _fetch_all(self, wanted: list[Wanted]) -> dict[str, bytes]:
        deadline_s = self._loop.time() + FETCH_TIMEOUT_S
        states = await asyncio.gather(*(self._fetch(*each, deadline_s) for each in wanted))
        return {key: state for (key, _, _), state in zip(wanted, states, strict=True) if state is not None}

    async def _fetch(self, key: str, number: int, every: int, deadline_s: float) -> bytes | None:
        while True:
            state = await self._read(key, number, number // every % 2)
            if state is not None or self._loop.time() >= deadline_s:
                return state
            await asyncio.sleep(_RETRY_S)

    async def _read(self, key: str, number: int, place: int) -> bytes | None:
        contents: list[bytes] = []
        pieces = 1
        while len(contents) < pieces:
            piece = await self._piece(subjects.sequence_state(key, place, len(contents)))
            if piece is None or piece.number != number:
                return None
            pieces = piece.pieces
            contents.append(piece.content)
        return b"".join(contents)

    async def _piece(self, subject: str) -> StatePiece | None:
        try:
            message = await self._bus.jetstream.stored(subjects.STATES_STREAM, subject=subject)
            return None if message is None else StatePiece.unpack(message.data)
        except (NatsError, OSError, TimeoutError, MalformedMessage):
            return None

    async def _recreate(self) -> None:
        if not self._is_needed:
            return
        try:
            await ensure_states_bucket(self._bus)
        except WeirError as error:
            logger.warning("states of sequences are not checkpointed: %s", error.message)
