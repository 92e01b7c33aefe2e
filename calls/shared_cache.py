"""`SharedCache`: answers in a bucket of the broker's memory, which all gateways and workers share.

A look-up is one question to the broker and waits for its answer, but not long: a cache that doesn't answer knows nothing.
What is inserted is sent and forgotten. A full bucket loses what was written first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from bus.streams import ensure_response_cache
from calls.cached_answer import CachedAnswer
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from schemas.errors import WeirError
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

PATIENCE_S = 0.25
"""How long a request waits for the cache."""

_HEADERS_BYTES = 4096  # room for subjects and headers beside an answer in a message

OnFound = Callable[[CachedAnswer | None], None]


class SharedCache:
    """See the module. `malformed_messages` counts what lay in the bucket and was no answer."""

    def __init__(self, bus: Bus, caller_id: str, size_bytes: int, ttl_s: float) -> None:
        self._bus = bus
        self._subject = subjects.cache_answers(caller_id)
        self._size_bytes = size_bytes
        self._ttl_s = ttl_s
        self._numbers = count(1)
        self._waiting: dict[str, tuple[OnFound, asyncio.TimerHandle]] = {}
        self.malformed_messages = 0

    async def start(self) -> None:
        """Makes the bucket, now and whenever the broker comes back. Raises WeirError when it has no room for it."""
        await ensure_response_cache(self._bus, self._size_bytes, self._ttl_s)
        await self._bus.subscribe(f"{self._subject}.*", self._on_answer)
        self._bus.on_reconnect(self._recover)

    def find(self, key: bytes, on_found: OnFound) -> None:
        """Calls `on_found` with the answer that lies there, or None; later, and once."""
        loop = asyncio.get_running_loop()
        if not self._bus.is_connected:
            loop.call_soon(on_found, None)
            return
        subject = f"{self._subject}.{next(self._numbers)}"
        self._waiting[subject] = on_found, loop.call_later(PATIENCE_S, partial(self._found, subject, None))
        self._bus.publish(subjects.cache_read(key.hex()), b"", subject)

    def insert(self, key: bytes, answer: CachedAnswer) -> bool:
        """Has an answer kept, in the place of an earlier one; False when it is too large for a message or the bucket."""
        if answer.size_bytes > min(self._bus.max_payload_bytes - _HEADERS_BYTES, self._size_bytes):
            return False
        if self._bus.is_connected:
            self._bus.publish(subjects.cached(key.hex()), answer.pack())
        return True

    async def _recover(self) -> None:
        try:
            await ensure_response_cache(self._bus, self._size_bytes, self._ttl_s)
        except WeirError as error:
            logger.warning("nothing is found in the response cache: %s", error.message)

    @contained(on_error="_answer_failed")
    def _on_answer(self, message: Message) -> None:
        answer = None
        if not message.status:  # else it tells that there is nothing, or no bucket
            try:
                answer = CachedAnswer.unpack(message.data)
            except MalformedMessage as error:
                self.malformed_messages += 1
                _limited.warning("malformed entry", "ignored a malformed entry of the response cache: %s", error)
        self._found(message.subject, answer)

    def _answer_failed(self, _error: Exception, message: Message) -> None:
        self._found(message.subject, None)

    def _found(self, subject: str, answer: CachedAnswer | None) -> None:
        waiting = self._waiting.pop(subject, None)
        if waiting is not None:
            on_found, timer = waiting
            timer.cancel()
            on_found(answer)
