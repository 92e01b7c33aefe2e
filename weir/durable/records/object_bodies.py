"""`ObjectBodies`: request bodies and responses that are larger than a message, in object stores `requests` and
`results`.

A few objects are read and a few are written at a time, by tasks of their own. While the broker is unavailable or has
just come back, the tasks wait. They also wait for room in the memory ledger, to which a body is charged until it is
released; responses do not wait behind bodies, because they free that room.

The content of an object is up to its producer: one that can't be read ends the request that names it, and nothing else.
Source: NATS ADR-20 (object store).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.jetstream import JetStream
from weir.bus.streams.stored_objects import CorruptObject, StoredObject, has_object, remove_object
from weir.calls.inference.documents import digest_of
from weir.runtime.containment import contained
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.core.errors import WeirError, internal, invalid, unavailable

logger = logging.getLogger("weir.gateway")

OBJECTS_AT_A_TIME = 4
"""Objects that are read at a time, and the number of those written at a time; others wait."""

PRINCIPAL = "objects"
"""The principal of bodies of objects in the memory ledger, apart from the messages that name them."""

KIND = "object"
"""The kind of their memory."""

_TIMEOUT_S = 60.0
_RETRY_S = 0.5
OBJECT_TIMEOUT_S = 20.0
"""How long an operation is retried while the broker is available."""

_MAX_KEPT_NAME = 80

_STORE = subjects.REQUEST_OBJECTS

_ROOM_POLL_S = 0.05
_OFF_LOOP_BYTES = 1 << 20


class FetchedBody(NamedTuple):
    """A body and its `digest_of`. It is charged to the ledger until `ObjectBodies.release`."""

    data: bytes
    digest: str


OnBody = Callable[[FetchedBody | WeirError], None]
OnPut = Callable[[WeirError | None], None]
OnFailed = Callable[[WeirError], None]
Work = Callable[[], Awaitable[None]]


class ObjectBodies:
    """Reads and writes bodies in object stores. `max_bytes` is the largest body it reads; `messages` must be started."""

    def __init__(self, bus: Bus, messages: JetStream, max_bytes: int, ledger: MemoryLedger) -> None:
        self._bus = bus
        self._account = ledger.account(PRINCIPAL)
        self._messages = messages
        self._max_bytes = max_bytes
        self._background: asyncio.TaskGroup | None = None
        self._reads = _WorkQueue()
        self._writes = _WorkQueue()
        self._is_stopping = False

    def stop(self) -> None:
        """Stops retrying; the next owner does."""
        self._is_stopping = True
        self._reads.waiting.clear()
        self._writes.waiting.clear()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Works in tasks of `background` from now on."""
        self._background = background

    def fetch(self, name: str, on_body: OnBody) -> None:
        """Reads a body from store `requests`; passes it to `on_body`, or an error (INVALID_ARG: reading it again is of
        no use).
        """
        self._queue(self._reads, lambda: self._fetch(name, on_body), on_body)

    def release(self, body: bytes) -> None:
        """Releases the memory of a body that `fetch` passed."""
        self._account.release(KIND, len(body))

    def put(self, name: str, data: bytes, on_put: OnPut) -> None:
        """Writes a response to store `results`; calls `on_put` with None when it is stored, else with an error."""
        self._queue(self._writes, lambda: self._put(name, data, on_put), on_put)

    def delete(self, name: str) -> None:
        """Removes a body from store `requests` later."""
        self._queue(self._writes, lambda: self._delete(name), lambda _error: None)

    def _queue(self, queue: _WorkQueue, work: Work, on_failed: OnFailed) -> None:
        queue.waiting.append((work, on_failed))
        if queue.running < OBJECTS_AT_A_TIME and self._background is not None:
            queue.running += 1
            self._background.create_task(self._work(queue))

    async def _work(self, queue: _WorkQueue) -> None:
        try:
            while queue.waiting:
                await self._do(*queue.waiting.popleft())
        finally:
            queue.running -= 1

    @contained(on_error="_failed")
    async def _do(self, work: Work, on_failed: OnFailed) -> None:
        await work()

    def _failed(self, _error: Exception, _work: Work, on_failed: OnFailed) -> None:
        on_failed(internal("unexpected error at an object of a durable request: see the server's log"))

    async def _fetch(self, name: str, on_body: OnBody) -> None:
        problem: WeirError = unavailable(f"object '{_shortened(name)}' could not be read")
        async for _ in self._tries():
            try:
                body = await self._read(name)
            except WeirError as error:
                problem = error
                break
            except BROKER_ERRORS as error:
                logger.debug("object %s: %s: %s", name, type(error).__name__, error)
            else:
                on_body(body)
                return
        if not self._is_stopping:
            on_body(problem)

    async def _tries(self) -> AsyncIterator[None]:
        losses, since_s = -1, 0.0
        while not self._is_stopping:
            if losses != self._bus.losses or not self._bus.is_connected:
                losses, since_s = self._bus.losses, time.monotonic()
            elif time.monotonic() - since_s > OBJECT_TIMEOUT_S:
                return
            yield
            await asyncio.sleep(_RETRY_S)

    async def _read(self, name: str) -> FetchedBody:
        try:
            found = await StoredObject.find(self._messages, _STORE, name)
            if found is None:
                await self._check_missing(name)
                raise invalid(f"object '{_shortened(name)}' is not in object store '{_STORE}'")
            if found.size_bytes > self._max_bytes:
                raise invalid(
                    f"object '{_shortened(name)}' of {found.size_bytes} bytes exceeds the maximum allowed input size of "
                    f"{self._max_bytes} bytes. Use --http-max-input-size to increase the limit."
                )
            return await self._read_found(found)
        except CorruptObject as error:
            raise invalid(f"object '{_shortened(name)}' is damaged: {error}") from error
        except EOFError as error:
            if self._bus.is_clustered:  # a server that lags behind the stream's leader may have replied
                raise ConnectionError(str(error)) from error
            raise invalid(f"object '{_shortened(name)}' is damaged: {error}") from error

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
        """Raises ConnectionError if the object exists: a server that lags behind may have replied that it does not."""
        if self._bus.is_clustered and await has_object(self._bus, _STORE, name):
            raise ConnectionError("the server that replied does not have the object yet")

    async def _put(self, name: str, data: bytes, on_put: OnPut) -> None:
        async for _ in self._tries():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    store = await self._bus.jetstream.object_store(subjects.RESULT_OBJECTS)
                    await store.put(name, data)
            except BROKER_ERRORS as error:
                logger.debug("a response of %d bytes can't be stored yet: %s", len(data), type(error).__name__)
            else:
                on_put(None)
                return
        if not self._is_stopping:
            logger.warning(
                "a response of %d bytes could not be stored within %g s; its request fails", len(data), OBJECT_TIMEOUT_S
            )
            on_put(internal("the response could not be stored"))

    async def _delete(self, name: str) -> None:
        try:
            await remove_object(self._bus, _STORE, name)
        except BROKER_ERRORS as error:
            logger.debug("object %s was not deleted and expires later: %s", name, error)


class _WorkQueue:
    """Waiting operations, and the number of tasks that execute them."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Work, OnFailed]] = deque()
        self.running = 0


def _shortened(name: str) -> str:
    return name[:_MAX_KEPT_NAME]
