"""`SequenceStates`: checkpoints of the states of sequences, from which another worker continues them.

They are in a bucket in memory, with two places for each sequence: a checkpoint never overwrites the one before, because the
worker may die before the new one is known. A checkpoint is published on the same connection as the responses after it, so
after a response its checkpoint can be relied on. Reads are rare, and wait for a checkpoint that is still in flight.

`CheckpointReader`: finds what is stored of a sequence whose scheduler was lost, so that it continues at another one.
Between two checkpoints the bucket has the requests since the last one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from nats.errors import Error as NatsError

from weir.bus.links.framing import Outgoing
from weir.bus.naming import subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.streams.declarations import ensure_states_bucket
from weir.schemas.core.errors import WeirError, unavailable
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.request_body import body_ref
from weir.schemas.wire.transfers import NOT_RESUMABLE, StatePiece, pack_pieces

logger = logging.getLogger("weir.bus")

PIECE_BYTES = 512 << 10
"""A larger checkpoint is split into several messages."""

MAX_STATE_BYTES = 64 << 20
"""A larger state is not checkpointed."""

FETCH_TIMEOUT_S = 1.0
"""How long a read waits for a checkpoint that has not arrived."""

_RETRY_S = 0.05
_PREPARE_TIMEOUT_S = 10.0

NO_REQUEST = "", 0

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
        except BROKER_ERRORS as error:
            raise unavailable(f"the message broker did not create the bucket for sequence states: {error}") from error

    def written(
        self, key: str, number: int, every: int, state: bytes, last: tuple[str, int] = NO_REQUEST
    ) -> list[Outgoing]:
        """The messages of a checkpoint. For a state that is too large, those that invalidate earlier ones.

        `last` are gateway and key of the last request that led to the state.
        """
        if len(state) > MAX_STATE_BYTES:
            return self.broken(key)
        place = number // every % 2
        pieces = pack_pieces(number, state, PIECE_BYTES, *last)
        return [(subjects.sequence_state(key, place, piece), data) for piece, data in enumerate(pieces)]

    def requested(self, key: str, number: int, every: int, body: bytes, last: tuple[str, int]) -> list[Outgoing]:
        """The message of a request between two checkpoints, from which another scheduler can have it run again.

        For a request that cannot run again, the messages that invalidate earlier checkpoints.
        """
        if len(body) > PIECE_BYTES or body_ref(body) is not None:
            return self.broken(key)
        (data,) = pack_pieces(number, body, PIECE_BYTES, *last)
        return [(subjects.sequence_request(key, number, every), data)]

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


class StoredSequence(NamedTuple):
    """What is stored of a sequence: its checkpoint, after `checkpoint` requests, and the requests since.

    `origin` are the scheduler and the run with which it started. `last` are gateway and key of its last request, which
    ended `age_us` ago. `requests` are flags and bodies.
    """

    origin: tuple[str, int]
    checkpoint: int
    last: tuple[str, int]
    age_us: int
    requests: list[tuple[int, bytes]]


class CheckpointReader:
    """Reads checkpoints for a scheduler."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def find(self, model: str, version: int, id: int | str, every: int, number: int) -> StoredSequence | None:
        """The sequence of this correlation id that ran last, None if it cannot continue.

        `every` is the number of requests between two checkpoints. `number` is how many requests it has had at least, as a
        worker knows: what it has stored may not have arrived yet.
        """
        deadline_s = time.monotonic() + FETCH_TIMEOUT_S
        while True:
            try:
                found = await self._find(subjects.sequences_key(model, version, id), every, number)
            except (NatsError, OSError, TimeoutError, MalformedMessage) as error:
                logger.warning("model '%s': a checkpoint of sequence %s could not be read: %s", model, id, error)
                return None
            if found is not None or time.monotonic() >= deadline_s:
                return found
            await asyncio.sleep(_RETRY_S)

    async def _find(self, start: str, every: int, number: int) -> StoredSequence | None:
        stream = self._bus.jetstream
        # Of its leader: a replica may not have the newest message yet.
        newest = await stream.stored(subjects.STATES_STREAM, subject=f"$KV.{subjects.STATES_BUCKET}.{start}.*.*.*.0")
        if newest is None:
            return None
        piece = StatePiece.unpack(newest.data)
        if piece.number == NOT_RESUMABLE or piece.number < number:
            return None
        *_, scheduler, run, _, _ = newest.subject.split(".")
        key = f"{start}.{scheduler}.{run}"
        checkpoint = piece.number - piece.number % every
        requests: list[tuple[int, bytes]] = []
        for at in range(checkpoint + 1, piece.number + 1):
            subject = subjects.sequence_request(key, at, every)
            stored = await stream.stored(subjects.STATES_STREAM, subject=subject)
            request = None if stored is None else StatePiece.unpack(stored.data)
            if request is None or request.number != at:
                return None
            requests.append((SEQUENCE_START if at == 1 else 0, request.content))
        age_us = max(0, time.time_ns() // 1_000_000 - newest.stored_ms) * 1000
        return StoredSequence((scheduler, int(run)), checkpoint, (piece.gateway, piece.key), age_us, requests)
