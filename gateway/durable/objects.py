"""`ObjectBodies`: bodies and answers that are larger than a message, in the object stores `requests` and `results`.

A few are read at a time, and a few written, by tasks of their own. A broker that is away, or has just come back, is
nobody's fault: it is waited for. So is room in the gateway's memory ledger, to which a body is charged until whoever has
got it releases it; answers do not wait behind bodies, for it is by them that room is made.

An object is what a producer has made of it: one that cannot be read ends the request that names it, and nothing else.
Source: NATS ADR-20 (object store).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from nats.errors import Error as NatsError

from bus import durable_subjects as subjects
from bus.connection import Bus
from bus.stored_messages import StoredMessages
from bus.stored_objects import DamagedObject, StoredObject, has_object, remove_object
from gateway.durable.bodies import digest_of
from runtime.containment import contained
from runtime.memory_ledger import MemoryLedger
from schemas.errors import WeirError, internal, invalid, unavailable

logger = logging.getLogger("weir.gateway")

OBJECTS_AT_A_TIME = 4
"""Objects that a gateway reads at once, and so many more that it writes; others wait."""

PRINCIPAL = "objects"
"""Who holds bodies of objects, in the memory ledger: not the messages that wait for them."""

KIND = "object"
"""What they are, in the memory ledger."""

_TIMEOUT_S = 60.0
_RETRY_S = 0.5
PATIENCE_S = 20.0
"""So long it is tried with a broker that is there all the time."""

_MAX_KEPT_NAME = 80

_STORE = subjects.REQUEST_OBJECTS

_ROOM_POLL_S = 0.05
_OFF_LOOP_BYTES = 1 << 20


class FetchedBody(NamedTuple):
    """A body that was read, and its `digest_of`. It is charged to the ledger until `ObjectBodies.release`."""

    data: bytes
    digest: str


OnBody = Callable[[FetchedBody | WeirError], None]
OnPut = Callable[[WeirError | None], None]
Work = Callable[[], Awaitable[None]]


class ObjectBodies:
    """Reads and writes bodies in object stores. `max_bytes` is the largest body it reads; `messages` must be started."""

    def __init__(self, bus: Bus, messages: StoredMessages, max_bytes: int, ledger: MemoryLedger) -> None:
        self._bus = bus
        self._account = ledger.account(PRINCIPAL)
        self._messages = messages
        self._max_bytes = max_bytes
        self._background: asyncio.TaskGroup | None = None
        self._reads = _WorkQueue()
        self._writes = _WorkQueue()
        self._is_stopping = False

    def stop(self) -> None:
        """Tries nothing again: who comes after us does it."""
        self._is_stopping = True
        self._reads.waiting.clear()
        self._writes.waiting.clear()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Works in tasks of `background` from now on."""
        self._background = background

    def fetch(self, name: str, on_body: OnBody) -> None:
        """Reads a body from store `requests`; tells it, or why there is none (INVALID_ARG: there never will be)."""
        self._queue(self._reads, lambda: self._fetch(name, on_body))

    def release(self, body: bytes) -> None:
        """A body that was told by `fetch` is not held any more."""
        self._account.release(KIND, len(body))

    def put(self, name: str, data: bytes, on_put: OnPut) -> None:
        """Writes an answer to store `results`; tells when it is there, or why it isn't."""
        self._queue(self._writes, lambda: self._put(name, data, on_put))

    def delete(self, name: str) -> None:
        """Removes a body from store `requests`, in a while."""
        self._queue(self._writes, lambda: self._delete(name))

    def _queue(self, queue: _WorkQueue, work: Work) -> None:
        queue.waiting.append(work)
        if queue.running < OBJECTS_AT_A_TIME and self._background is not None:
            queue.running += 1
            self._background.create_task(self._work(queue))

    @staticmethod
    async def _work(queue: _WorkQueue) -> None:
        try:
            while queue.waiting:
                await queue.waiting.popleft()()
        finally:
            queue.running -= 1

    @contained(on_error="_fetch_failed")
    async def _fetch(self, name: str, on_body: OnBody) -> None:
        problem: WeirError = unavailable(f"object '{_shown(name)}' could not be read")
        async for _ in self._tries():
            try:
                body = await self._read(name)
            except WeirError as error:
                problem = error
                break
            except (NatsError, OSError, TimeoutError) as error:
                logger.debug("object %s: %s: %s", name, type(error).__name__, error)
            else:
                on_body(body)
                return
        if not self._is_stopping:
            on_body(problem)

    def _fetch_failed(self, _error: Exception, name: str, on_body: OnBody) -> None:
        on_body(internal(f"object '{_shown(name)}' could not be read: unexpected error, see the gateway's log"))

    async def _tries(self) -> AsyncIterator[None]:
        losses, since_s = -1, 0.0
        while not self._is_stopping:
            if losses != self._bus.losses or not self._bus.is_connected:
                losses, since_s = self._bus.losses, time.monotonic()
            elif time.monotonic() - since_s > PATIENCE_S:
                return
            yield
            await asyncio.sleep(_RETRY_S)

    async def _read(self, name: str) -> FetchedBody:
        try:
            found = await StoredObject.find(self._messages, _STORE, name)
            if found is None:
                await self._check_missing(name)
                raise invalid(f"object '{_shown(name)}' is not in object store '{_STORE}'")
            if found.size_bytes > self._max_bytes:
                raise invalid(
                    f"object '{_shown(name)}' of {found.size_bytes} bytes exceeds the maximum allowed input size of "
                    f"{self._max_bytes} bytes. Use --http-max-input-size to increase the limit."
                )
            return await self._read_found(found)
        except DamagedObject as error:
            raise invalid(f"object '{_shown(name)}' is damaged: {error}") from error
        except EOFError as error:
            if self._bus.is_clustered:  # a server that lags behind the stream's leader may have answered
                raise ConnectionError(str(error)) from error
            raise invalid(f"object '{_shown(name)}' is damaged: {error}") from error

    async def _read_found(self, found: StoredObject) -> FetchedBody:
        while not self._account.fits(found.size_bytes):
            await asyncio.sleep(_ROOM_POLL_S)
        self._account.charge(KIND, found.size_bytes)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                data = await found.read()
            if len(data) < _OFF_LOOP_BYTES:
                return FetchedBody(data, digest_of(data))
            return FetchedBody(data, await asyncio.to_thread(digest_of, data))
        except BaseException:
            self._account.release(KIND, found.size_bytes)
            raise

    async def _check_missing(self, name: str) -> None:
        """Raises ConnectionError where the object is there after all: a server that lags behind may have answered."""
        if self._bus.is_clustered and await has_object(self._bus, _STORE, name):
            raise ConnectionError("the server that was asked has not heard of the object yet")

    @contained(on_error="_put_failed")
    async def _put(self, name: str, data: bytes, on_put: OnPut) -> None:
        async for _ in self._tries():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    store = await self._bus.jetstream.object_store(subjects.RESULT_OBJECTS)
                    await store.put(name, data)
            except (NatsError, OSError, TimeoutError) as error:
                logger.debug("an answer of %d bytes is not stored yet: %s", len(data), type(error).__name__)
            else:
                on_put(None)
                return
        if not self._is_stopping:
            logger.warning("an answer of %d bytes could not be stored", len(data))
            on_put(internal("the response could not be stored"))

    def _put_failed(self, _error: Exception, _name: str, _data: bytes, on_put: OnPut) -> None:
        on_put(internal("the response could not be stored: unexpected error, see the gateway's log"))

    @contained()
    async def _delete(self, name: str) -> None:
        try:
            await remove_object(self._bus, _STORE, name)
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("object %s is left to its age: %s", name, error)


class _WorkQueue:
    """What waits for its turn, and how many tasks take it."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Work] = deque()
        self.running = 0


def _shown(name: str) -> str:
    return name[:_MAX_KEPT_NAME]
