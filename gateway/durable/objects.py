"""`ObjectBodies`: bodies and answers that are larger than a message, in the object stores `requests` and `results`.

A few are read or written at a time, by tasks of their own, so that nobody behind them waits. A broker that is away, or has
just come back, is nobody's fault: it is waited for. An object is what a producer has made of it: one that cannot be read
ends the request that names it, and nothing else.
Source: NATS ADR-20 (object store).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from nats.errors import Error as NatsError

from bus import durable_subjects as subjects
from bus.connection import Bus
from bus.stored_messages import StoredMessages
from bus.stored_objects import DamagedObject, StoredObject, has_object, remove_object
from runtime.containment import contained
from schemas.errors import WeirError, internal, invalid, unavailable

logger = logging.getLogger("weir.gateway")

OBJECTS_AT_A_TIME = 4
"""Objects that a gateway reads or writes at once; others wait."""

_TIMEOUT_S = 60.0
_RETRY_S = 0.5
PATIENCE_S = 20.0
"""So long it is tried with a broker that is there all the time."""

_MAX_KEPT_NAME = 80

_STORE = subjects.REQUEST_OBJECTS

OnBody = Callable[[bytes | WeirError], None]
OnPut = Callable[[WeirError | None], None]


class ObjectBodies:
    """See the module. `max_bytes` is the largest body that is read; `messages` must be started."""

    def __init__(self, bus: Bus, messages: StoredMessages, max_bytes: int) -> None:
        self._bus = bus
        self._messages = messages
        self._max_bytes = max_bytes
        self._background: asyncio.TaskGroup | None = None
        self._waiting: deque[Callable[[], Awaitable[None]]] = deque()
        self._running = 0
        self._is_stopping = False

    def stop(self) -> None:
        """Tries nothing again: who comes after us does it."""
        self._is_stopping = True
        self._waiting.clear()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Works in tasks of `background` from now on."""
        self._background = background

    def fetch(self, name: str, on_body: OnBody) -> None:
        """Reads a body from store `requests`; tells it, or why there is none (INVALID_ARG: there never will be)."""
        self._queue(lambda: self._fetch(name, on_body))

    def put(self, name: str, data: bytes, on_put: OnPut) -> None:
        """Writes an answer to store `results`; tells when it is there, or why it isn't."""
        self._queue(lambda: self._put(name, data, on_put))

    def delete(self, name: str) -> None:
        """Removes a body from store `requests`, in a while."""
        self._queue(lambda: self._delete(name))

    def _queue(self, work: Callable[[], Awaitable[None]]) -> None:
        self._waiting.append(work)
        if self._running < OBJECTS_AT_A_TIME and self._background is not None:
            self._running += 1
            self._background.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._waiting.popleft()()
        finally:
            self._running -= 1

    @contained(on_error="_fetch_failed")
    async def _fetch(self, name: str, on_body: OnBody) -> None:
        problem: WeirError = unavailable(f"object '{_shown(name)}' could not be read")
        async for _ in self._tries():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
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

    async def _read(self, name: str) -> bytes:
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
            return await found.read()
        except DamagedObject as error:
            raise invalid(f"object '{_shown(name)}' is damaged: {error}") from error
        except EOFError as error:
            if self._bus.is_clustered:  # a server that lags behind the stream's leader may have answered
                raise ConnectionError(str(error)) from error
            raise invalid(f"object '{_shown(name)}' is damaged: {error}") from error

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


def _shown(name: str) -> str:
    return name[:_MAX_KEPT_NAME]
