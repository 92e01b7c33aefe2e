"""`ObjectBodies`: bodies and answers that are larger than a message, in the object stores `requests` and `results`.

A few are read or written at a time, by tasks of their own, so that nobody behind them waits. A broker that is away, or has
just come back, is nobody's fault: it is waited for.
Source: NATS ADR-20 (object store).
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from nats.errors import Error as NatsError
from nats.js.errors import BadObjectMetaError, BucketNotFoundError, DigestMismatchError, NotFoundError

from bus import durable_subjects as subjects
from bus.connection import Bus
from schemas.errors import WeirError, internal, invalid, unavailable

logger = logging.getLogger("weir.gateway")

OBJECTS_AT_A_TIME = 4
"""Objects that a gateway reads or writes at once; others wait."""

_TIMEOUT_S = 60.0
_RETRY_S = 0.5
PATIENCE_S = 20.0
"""So long it is tried with a broker that is there all the time."""

_MAX_KEPT_NAME = 80


class ObjectBodies:
    """See the module. `max_bytes` is the largest body that is read."""

    def __init__(self, bus: Bus, max_bytes: int) -> None:
        self._bus = bus
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

    def fetch(self, name: str, on_body: Callable[[bytes | WeirError], None]) -> None:
        """Reads a body from store `requests`; tells it, or why there is none (INVALID_ARG: there never will be)."""
        self._queue(lambda: self._fetch(name, on_body))

    def put(self, name: str, data: bytes, on_put: Callable[[WeirError | None], None]) -> None:
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

    async def _fetch(self, name: str, on_body: Callable[[bytes | WeirError], None]) -> None:
        problem: WeirError = unavailable(f"object '{_shown(name)}' could not be read")
        async for _ in self._tries():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    on_body(await self._read(name))
                    return
            except WeirError as error:
                problem = error
                break
            except (NotFoundError, BucketNotFoundError):
                problem = invalid(f"object '{_shown(name)}' is not in object store '{subjects.REQUEST_OBJECTS}'")
                break
            except (BadObjectMetaError, DigestMismatchError) as error:
                problem = invalid(f"object '{_shown(name)}' is damaged: {type(error).__name__}")
                break
            except (NatsError, OSError, TimeoutError) as error:
                logger.debug("object %s: %s", name, error)
        if not self._is_stopping:
            on_body(problem)

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
        store = await self._bus.jetstream.object_store(subjects.REQUEST_OBJECTS)
        info = await store.get_info(name)
        if (info.size or 0) > self._max_bytes:
            raise invalid(
                f"object '{_shown(name)}' of {info.size} bytes exceeds the maximum allowed input size of "
                f"{self._max_bytes} bytes. Use --http-max-input-size to increase the limit."
            )
        content = io.BytesIO()
        await store.get(name, writeinto=content)
        return content.getvalue()

    async def _put(self, name: str, data: bytes, on_put: Callable[[WeirError | None], None]) -> None:
        async for _ in self._tries():
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    store = await self._bus.jetstream.object_store(subjects.RESULT_OBJECTS)
                    await store.put(name, data)
                on_put(None)
                return
            except (NatsError, OSError, TimeoutError) as error:
                logger.debug("an answer of %d bytes is not stored yet: %s", len(data), type(error).__name__)
        if not self._is_stopping:
            logger.warning("an answer of %d bytes could not be stored", len(data))
            on_put(internal("the response could not be stored"))

    async def _delete(self, name: str) -> None:
        try:
            store = await self._bus.jetstream.object_store(subjects.REQUEST_OBJECTS)
            await store.delete(name)
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("object %s is left to its age: %s", name, error)


def _shown(name: str) -> str:
    return name[:_MAX_KEPT_NAME]
