"""`PendingRequest`, a request from its submission to its last response, and `InFlight`, all of one caller's by key.

The caller keeps every request until its last response, since it may have to send it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

import msgspec

from weir.calls.cache.response_cache import CacheLookup
from weir.calls.catalog import ServedModel
from weir.calls.payload_store import Freeable, free_all
from weir.calls.queues import Destination
from weir.schemas.core.errors import WeirError, overloaded
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.wire.calls import RequestEnvelope, ResponseEnvelope, Timestamps
from weir.telemetry.tracing.trace import Trace

MAX_IN_FLIGHT = 50_000
"""Requests of one caller; more are rejected at once."""

MAX_IN_FLIGHT_BYTES = 1 << 30
"""Packed bodies of those requests together (large tensors are in shared memory, which has its own bound)."""

OnResponse = Callable[[InferResponse | WeirError | None, bool], None]
"""Called with each response and whether it is the last one. None is the end of the responses without a response."""

OrderKey = tuple[str, str, str]
"""A model's name, a version and an owner: requests of one caller with the same key have ordered responses."""


class SequenceCheck(Enum):
    """What a response is to the sequence of its request's responses."""

    NEXT = auto()
    """The one that follows."""
    OTHER = auto()
    """A response of another run, which continues."""
    BROKEN = auto()
    """Proof that the response which should follow is lost."""


class ResponseSequence:
    """The responses of one run of a decoupled model, which the caller receives in order.

    A request that was delivered twice runs twice, and a message may be lost with the broker. The caller sees neither: it
    receives all responses of the run whose response came first, or an error.
    """

    __slots__ = ("_received", "_run")

    def __init__(self, run: str) -> None:
        self._run = run
        self._received = 0

    def check(self, response: ResponseEnvelope) -> SequenceCheck:
        """Classifies `response`, and counts it if it is the next one."""
        if response.run != self._run:
            # If the worker of the first run were alive, that run would have ended before this one.
            return SequenceCheck.BROKEN if response.is_final else SequenceCheck.OTHER
        if response.number != self._received:
            return SequenceCheck.BROKEN
        self._received += 1
        return SequenceCheck.NEXT


class PendingRequest(msgspec.Struct, eq=False):
    """A request that was submitted and has not had its last response.

    With an `order_key`, its responses wait for those of earlier requests with that key. While the response cache looks
    it up (`lookup`), or a `DirectExecutor` runs it, it is not `is_queued`. `queue` is its destination. With
    `reads_content`, the caller reads the
    outputs even though it otherwise passes references on. `reruns` counts how often the request or its response was
    lost between hosts. Once `has_ended`, `on_response` is not called again. `timestamps` are those of the response that
    `on_response` is called with, where the request wants them.
    """

    key: int
    model: ServedModel
    request: InferRequest
    envelope: RequestEnvelope
    on_response: OnResponse
    slots: Sequence[Freeable]
    trace: Trace | None
    queue: Destination
    sequence: ResponseSequence | None = None
    order_key: OrderKey | None = None
    lookup: CacheLookup | None = None
    is_queued: bool = True
    reads_content: bool = False
    reruns: int = 0
    has_ended: bool = False
    timestamps: Timestamps | None = None


class DirectExecutor(Protocol):
    """Runs requests of its process without the broker, where it may."""

    def attach(
        self,
        find: Callable[[int], PendingRequest | None],
        on_responses: Callable[[bytes], None],
        on_requeue: Callable[[PendingRequest], None],
    ) -> None:
        """Sets how pending requests are found by key, and where responses messages and requests for the scheduler go."""

    def take(self, pending: PendingRequest) -> bool:
        """Whether it runs the request."""

    def cancel(self, pending: PendingRequest) -> None:
        """Cancels a request if it runs it."""


class InFlight(dict[int, PendingRequest]):
    """The pending requests of one caller by key, oldest first, within its bounds.

    `add` and `remove` change it, `get` finds a request that has not ended. `rejected` counts requests beyond the bounds.
    """

    __slots__ = ("_buffered", "_buffered_bytes", "_bytes", "rejected")

    def __init__(self) -> None:
        self._bytes = 0
        self._buffered = 0
        self._buffered_bytes = 0
        self.rejected = 0

    def check_room(self) -> None:
        """Raises WeirError (UNAVAILABLE) if another request would exceed the bounds."""
        if len(self) + self._buffered >= MAX_IN_FLIGHT or self._bytes >= MAX_IN_FLIGHT_BYTES:
            self.rejected += 1
            raise overloaded()

    def add(self, pending: PendingRequest) -> None:
        """Adds a request."""
        self[pending.key] = pending
        self._bytes += len(pending.envelope.body)

    def remove(self, key: int) -> PendingRequest | None:
        """Removes a request that has ended, and frees what it holds; returns None if it was removed before."""
        pending = self.pop(key, None)
        if pending is not None:
            self._bytes -= len(pending.envelope.body)
            if pending.slots:
                slots, pending.slots = pending.slots, ()
                free_all(slots)
        return pending

    def replace_envelope(self, pending: PendingRequest, envelope: RequestEnvelope) -> None:
        """Sets the form in which the request is sent from now on."""
        self._bytes += len(envelope.body) - len(pending.envelope.body)
        pending.envelope = envelope

    def set_buffered(self, responses: int, size_bytes: int) -> None:
        """Counts the responses that wait for earlier ones towards the bounds."""
        self._buffered = responses
        self._bytes += size_bytes - self._buffered_bytes
        self._buffered_bytes = size_bytes
