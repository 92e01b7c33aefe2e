"""`SequenceStates`: where workers keep checkpoints of the states of sequences, for others to go on from.

A bucket in memory, with two places for each sequence: a checkpoint never overwrites the one before it, for the worker may
die before anybody has heard of the new one. Writing is publishing, on the connection on which the answers follow:
whoever has an answer can rely on the checkpoint before it. Reading is rare, and waits for what is still on its way.
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
from nats.js.errors import NotFoundError

from bus import subjects
from bus.connection import Bus
from bus.streams import ensure_states_bucket
from bus.thread_publisher import Outgoing
from schemas.errors import WeirError, unavailable
from schemas.sequence_states import BROKEN, StatePiece, pack_pieces, unpack_piece
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

PIECE_BYTES = 512 << 10
"""A checkpoint that is larger travels in several messages."""

MAX_STATE_BYTES = 64 << 20
"""A larger state of one sequence is not checkpointed."""

FETCH_TIMEOUT_S = 1.0
"""How long is waited for a checkpoint that is not there, or not yet."""

_RETRY_S = 0.05
_PREPARE_TIMEOUT_S = 10.0

Wanted = tuple[str, int, int]
"""A checkpoint: (key of the sequence, number of requests after which it was taken, how many lie between two)."""


class SequenceStates:
    """See the module. `prepare` and `fetch` block, and are for threads that are not the event loop's."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._is_needed = False
        bus.on_reconnect(self._make_again)

    def prepare(self) -> None:
        """Makes the bucket unless it is there. Raises UNAVAILABLE when the broker doesn't."""
        self._is_needed = True
        try:
            self._run(ensure_states_bucket(self._bus), _PREPARE_TIMEOUT_S)
        except (NatsError, OSError, TimeoutError) as error:
            raise unavailable(f"the broker has no place for the states of sequences: {error}") from error

    def written(self, key: str, number: int, every: int, state: bytes) -> list[Outgoing]:
        """The messages that write a checkpoint; none for a state that is too large."""
        if len(state) > MAX_STATE_BYTES:
            return self.broken(key)
        place = number // every % 2
        pieces = pack_pieces(number, state, PIECE_BYTES)
        return [(subjects.sequence_state(key, place, piece), data) for piece, data in enumerate(pieces)]

    def broken(self, key: str) -> list[Outgoing]:
        """The messages after which nobody goes on from an earlier checkpoint of the sequence."""
        (data,) = pack_pieces(BROKEN, b"", PIECE_BYTES)
        return [(subjects.sequence_state(key, place, 0), data) for place in (0, 1)]

    def removed(self, key: str) -> list[Outgoing]:
        """The message that removes what is kept of a sequence."""
        return [(subjects.STATES_PURGE, json.dumps({"filter": subjects.sequence_states_of(key)}).encode())]

    def fetch(self, wanted: Iterable[Wanted]) -> dict[str, bytes]:
        """The states by key; those are missing that are not there, or not of that number."""
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
            message = await self._bus.jetstream.get_last_msg(subjects.STATES_STREAM, subject)
            return unpack_piece(message.data or b"")
        except (NotFoundError, NatsError, OSError, TimeoutError, MalformedMessage):
            return None

    async def _make_again(self) -> None:
        if not self._is_needed:
            return
        try:
            await ensure_states_bucket(self._bus)
        except WeirError as error:
            logger.warning("states of sequences are not checkpointed: %s", error.message)
