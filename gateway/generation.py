"""`Generation`: the answers to one generate request, from the loop that hands them over to the reader that takes them.

The reader may be slower than the model. What waits for it is bounded: a reader that falls further behind has its request
abandoned, for nobody could be told how long to keep it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from calls.inference import Inference
from calls.pending import Pending
from gateway.connection_memory import RequestMemory
from runtime.offload import Offload
from schemas.errors import WeirError
from schemas.kserve_generate import build_generate_response
from schemas.kserve_response import MAX_WRITTEN_BYTES, error_body
from schemas.offloaded import WRITE_GENERATE, generate_response_job
from schemas.requests import InferRequest, InferResponse

MAX_UNREAD_BYTES = 16 << 20
"""Answers of one request that may wait for their reader."""

_EVENT_BYTES = 200  # what an event costs besides its text

WRONG_COUNT = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class Event(NamedTuple):
    """One answer: its HTTP status, its JSON, and for an error when to come again (0: nothing is said about it)."""

    status: int
    body: bytes
    retry_after_s: int = 0


class Generation:
    """One generate request; `start` sends it. Its answers come from `next`, in order.

    `on_overflow` is called when its reader has fallen behind and it was given up. Answers that wait for the reader are
    charged to `memory`; where that has no room, the reader has fallen behind too.
    """

    def __init__(
        self,
        inference: Inference,
        on_overflow: Callable[[], None] | None = None,
        memory: RequestMemory | None = None,
        offload: Offload | None = None,
    ) -> None:
        self._offload = offload or Offload()
        self._memory = memory
        self._inference = inference
        self._on_overflow = on_overflow
        self._pending: Pending | None = None
        self._events: deque[Event | InferResponse] = deque()  # a long response is written when it is read
        self._unread_bytes = 0
        self._charged_bytes = 0  # all of them, but for the first one where there was no room for it
        self._is_over = False
        self._wakeup = asyncio.Event()

    def start(self, request: InferRequest) -> None:
        """Submits the request. Raises WeirError for what is refused at the door."""
        self._pending = self._inference.submit(request, self._on_answer)

    async def next(self) -> Event | None:
        """The next answer, None when there are no more."""
        while not self._events and not self._is_over:
            self._wakeup.clear()
            await self._wakeup.wait()
        if not self._events:
            return None
        event = self._events.popleft()
        self._count_unread(-_size_bytes(event))
        return await self._written(event) if isinstance(event, InferResponse) else event

    async def _written(self, response: InferResponse) -> Event:
        try:
            parts = await self._offload.run(WRITE_GENERATE, generate_response_job(response))
        except WeirError as error:
            return _event(error)
        return Event(200, bytes(parts[0]))

    async def only(self) -> Event:
        """The answer of a request that must have exactly one."""
        first = await self.next()
        second = await self.next() if first is not None else None
        if first is not None and second is None:
            return first
        self.close()
        return Event(first.status if first is not None else 200, error_body(WRONG_COUNT))

    def _count_unread(self, size_bytes: int) -> bool:
        """Counts answers that begin to wait for the reader, or have been read. False where there is no room for them."""
        self._unread_bytes += size_bytes
        if self._memory is None:
            return True
        if size_bytes < 0:
            self._memory.release_some("unsent", min(-size_bytes, self._charged_bytes))
            self._charged_bytes = max(0, self._charged_bytes + size_bytes)
            return True
        if not self._memory.charge("unsent", size_bytes):
            return False
        self._charged_bytes += size_bytes
        return True

    def close(self) -> None:
        """Nobody waits for answers any more: the request is abandoned if it has some to come."""
        self._is_over = True
        self._wakeup.set()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._inference.abandon(pending)

    def _on_answer(self, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if is_final:
            self._is_over = True
            self._pending = None
        if outcome is not None:
            is_long = isinstance(outcome, InferResponse) and _size_bytes(outcome) > MAX_WRITTEN_BYTES
            event = outcome if isinstance(outcome, InferResponse) and is_long else _event(outcome)
            has_room = self._count_unread(_size_bytes(event))
            if (not has_room or self._unread_bytes > MAX_UNREAD_BYTES) and self._events:
                self._events.clear()
                self.close()
                if self._on_overflow is not None:
                    self._on_overflow()
            else:
                self._events.append(event)
        self._wakeup.set()


def _size_bytes(event: Event | InferResponse) -> int:
    if isinstance(event, InferResponse):
        return sum(tensor.size_bytes for tensor in event.outputs) + _EVENT_BYTES
    return len(event.body) + _EVENT_BYTES


def _event(outcome: InferResponse | WeirError) -> Event:
    try:
        if isinstance(outcome, InferResponse):
            return Event(200, build_generate_response(outcome))
        error = outcome
    except WeirError as unwritable:
        error = unwritable
    return Event(error.http_status, error_body(error.message), error.retry_after_s)
