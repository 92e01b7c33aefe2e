"""Delivery of responses to callers, in the order of their requests where the model requires it (`preserve_ordering`).

`ResponseDispatcher` calls `on_response` and completes the trace. `ReorderBuffer` holds responses that came before those of
earlier requests.

Source: Triton's dynamic batcher, which releases the responses of a model version in the order of their enqueueing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from weir.calls.in_flight import InFlight, OrderKey, PendingRequest
from weir.calls.tracing import Tracing
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError, internal, overloaded
from weir.schemas.core.requests import InferResponse
from weir.schemas.wire.calls import Timestamps

Response = TypeVar("Response")

MAX_BUFFERED_RESPONSES = 50_000
"""Responses of one caller that wait for those of earlier requests; a request whose responses exceed it fails."""

MAX_BUFFERED_BYTES = 512 << 20
"""Outputs of those responses together."""

UNEXPECTED = "an unexpected error occurred while the response was handled; the server's log has the details"

_TOO_MANY_BUFFERED = "too many responses wait for those of earlier requests"

Outcome = InferResponse | WeirError | None
"""A response, an error, or the end of the responses without a response."""


class ReorderBuffer(Generic[Response]):
    """Responses that wait until all earlier requests with the same order key have had their last response.

    Sans-IO. `buffered` and `buffered_bytes` count the waiting responses of all keys.
    """

    def __init__(self) -> None:
        # By order key, the requests in order, each with its waiting responses: (response, bytes, whether it is the last).
        self._requests: dict[Hashable, OrderedDict[int, deque[tuple[Response, int, bool]] | None]] = {}
        self.buffered = 0
        self.buffered_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether a request that is not next should not get more responses."""
        return self.buffered >= MAX_BUFFERED_RESPONSES or self.buffered_bytes >= MAX_BUFFERED_BYTES

    def enqueue(self, order_key: Hashable, key: int) -> None:
        """Adds a request behind all others with this order key; `key` is unique among them."""
        requests = self._requests.get(order_key)
        if requests is None:
            requests = self._requests[order_key] = OrderedDict()
        requests[key] = None

    def is_next(self, order_key: Hashable, key: int) -> bool:
        """Whether no earlier request is without its last response."""
        requests = self._requests.get(order_key)
        return requests is not None and next(iter(requests)) == key

    def add(self, order_key: Hashable, key: int, response: Response, size_bytes: int, is_last: bool) -> None:
        """Adds a response to an enqueued request; none may follow the last one."""
        requests = self._requests[order_key]
        waiting = requests[key]
        if waiting is None:
            waiting = requests[key] = deque()
        waiting.append((response, size_bytes, is_last))
        self.buffered += 1
        self.buffered_bytes += size_bytes

    def pop(self, order_key: Hashable) -> Response | None:
        """Removes and returns the next response, None while it has not come."""
        requests = self._requests.get(order_key)
        if requests is None:
            return None
        waiting = next(iter(requests.values()))
        if not waiting:
            return None
        response, size_bytes, is_last = waiting.popleft()
        self.buffered -= 1
        self.buffered_bytes -= size_bytes
        if is_last:
            requests.popitem(last=False)
            if not requests:
                del self._requests[order_key]
        return response

    def remove(self, order_key: Hashable, key: int) -> list[Response] | None:
        """Removes a cancelled request; returns its waiting responses, None if it had ended before."""
        requests = self._requests.get(order_key)
        if requests is None or key not in requests:
            return None
        waiting = requests.pop(key) or ()
        self.buffered -= len(waiting)
        self.buffered_bytes -= sum(size_bytes for _, size_bytes, _ in waiting)
        if not requests:
            del self._requests[order_key]
        return [response for response, _, _ in waiting]


class ResponseDispatcher:
    """Delivers responses to the callers of their requests.

    Requests to one version of a model that preserves ordering get their responses in the order of submission at this
    caller; there is no order among callers, and none among owners, who take turns in the queue. `cancel(pending)` is called
    with a request that fails here, `discard` with each response that was received and is not delivered.
    """

    def __init__(
        self,
        tracing: Tracing,
        in_flight: InFlight,
        cancel: Callable[[PendingRequest], object],
        discard: Callable[[InferResponse], None],
    ) -> None:
        self._tracing = tracing
        self._in_flight = in_flight
        self._cancel = cancel
        self._discard = discard
        self._order: ReorderBuffer[tuple[PendingRequest, Outcome, bool, Timestamps | None]] = ReorderBuffer()
        self._releasing: list[OrderKey] = []

    def enqueue_ordered(self, pending: PendingRequest) -> None:
        """Makes the responses of a submitted request wait for those of all earlier ones of its owner."""
        version = pending.request.model_version or pending.model.latest
        pending.order_key = pending.model.name, version, pending.envelope.owner
        self._order.enqueue(pending.order_key, pending.key)

    def remove_ordered(self, pending: PendingRequest) -> bool:
        """Removes a cancelled request from the order; False if it had its last response before."""
        order_key = pending.order_key
        assert order_key is not None  # noqa: S101 - the request was enqueued
        waiting = self._order.remove(order_key, pending.key)
        for _, outcome, _, _ in waiting or ():
            if isinstance(outcome, InferResponse):
                self._discard(outcome)
        self._release(order_key)
        return waiting is not None

    @contained(on_error="_delivery_failed")
    def deliver(
        self,
        pending: PendingRequest,
        outcome: Outcome,
        is_final: bool,
        timestamps: Timestamps | None = None,
        is_next: bool = False,
    ) -> None:
        """Delivers a response now, or once it is the next in its order."""
        if pending.order_key is not None and not is_next:
            self._buffer(pending.order_key, pending, outcome, is_final, timestamps)
            return
        pending.timestamps = timestamps
        pending.has_ended = is_final
        if pending.trace is None:
            pending.on_response(outcome, is_final)
        else:
            self._tracing.deliver(pending.trace, pending, outcome, is_final, timestamps)

    def _delivery_failed(self, _error: Exception, pending: PendingRequest, *_: object) -> None:
        """Ends a request whose response could not be delivered: `on_response` is called once more, with an internal error.

        The frontends end a call once and ignore what comes after, so a response that was delivered in part stays so.
        """
        pending.has_ended = True
        self._cancel(pending)
        if pending.order_key is not None:
            self.remove_ordered(pending)
        pending.on_response(internal(UNEXPECTED), True)

    def _buffer(
        self,
        order_key: OrderKey,
        pending: PendingRequest,
        outcome: Outcome,
        is_final: bool,
        timestamps: Timestamps | None,
    ) -> None:
        if not is_final and self._order.is_full and not self._order.is_next(order_key, pending.key):
            self._cancel(pending)
            if isinstance(outcome, InferResponse):
                self._discard(outcome)
            outcome, is_final = overloaded(_TOO_MANY_BUFFERED), True
        response = pending, outcome, is_final, timestamps
        self._order.add(order_key, pending.key, response, _size_bytes(outcome), is_final)
        self._release(order_key)

    def _release(self, order_key: OrderKey) -> None:
        """Delivers the buffered responses with this order key that are next."""
        self._releasing.append(order_key)
        if len(self._releasing) > 1:
            return  # an `on_response` called below has submitted or cancelled a request: the loop below continues with it
        try:
            while self._releasing:
                while (response := self._order.pop(self._releasing[0])) is not None:
                    self.deliver(*response, is_next=True)
                self._releasing.pop(0)
        finally:
            self._releasing.clear()
            self._in_flight.set_buffered(self._order.buffered, self._order.buffered_bytes)


def _size_bytes(outcome: Outcome) -> int:
    return sum(tensor.size_bytes for tensor in outcome.outputs) if isinstance(outcome, InferResponse) else 0
