"""`RequestDispatcher`: sends requests to the queues of models and returns their responses, for frontends and for models.

A request is resolved, normalised and published (`weir.calls.outbox`). The caller keeps it until its last response: when the
broker returns without its memory stream, the caller sends all pending requests again. `on_response` is called with the
end of a request at most once, and exactly once for a request that is not cancelled. Only decoupled models send several
responses.

One message carries the responses of a whole batch. A failure while one of them is decoded, completed or delivered ends
that request with an internal error (`weir.runtime.containment`), and no other. An `on_response` that raises is called once
more, with that error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from weir.bus.naming import subjects
from weir.bus.naming.durable_subjects import lost_attempts
from weir.bus.naming.identity import host
from weir.bus.nats.connection import Bus, Message
from weir.bus.payloads.arena import Slot
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.calls.cache.response_cache import CacheLookup, ResponseCache
from weir.calls.catalog import Catalog, ServedModel
from weir.calls.in_flight import DirectExecutor, InFlight, OnResponse, PendingRequest, ResponseSequence, SequenceCheck
from weir.calls.outbox import Outbox
from weir.calls.payload_store import Freeable, PayloadStore, RegionRegistry, free_all, host_of_payloads
from weir.calls.queues import Destination, PartitionedQueue, queue_of_sequence
from weir.calls.responses.delivery import UNEXPECTED, ResponseDispatcher
from weir.calls.responses.outputs import RemoteOutputFetcher, ResponsePayloads
from weir.calls.tracing import Sampling, Tracing
from weir.runtime.containment import contained
from weir.runtime.log_limiter import LogLimiter
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded, unavailable
from weir.schemas.core.request_limits import cancelled_error, is_cancelled_error
from weir.schemas.core.requests import InferRequest, InferResponse, owned_id
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.calls import (
    ANYBODY,
    Caller,
    LostAttempts,
    RequestEnvelope,
    ResponseEnvelope,
    unpack_responses,
)
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.request_body import pack_body
from weir.telemetry.tracing.trace import Trace

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

MAX_RERUNS = 3
"""How often a request runs again after its content, or that of its response, was lost between two hosts."""

_LOST_STREAM = "the rest of the response was lost; the request may be sent again"
_LOST_PAYLOAD = "content was lost between two hosts; the request may be sent again"

_RERUN_WAIT_S = 0.05
_DRAIN_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """The optional parts of a `RequestDispatcher`.

    Without `regions`, requests cannot use shared memory of clients. Without a `cache`, every request is run. With
    `keeps_references`, large outputs stay references until `release`. A `fetcher` fetches outputs from other hosts.
    `direct` may run requests in this process.
    """

    regions: RegionRegistry | None = None
    tracing: Tracing | None = None
    cache: ResponseCache | None = None
    fetcher: PayloadFetcher | None = None
    keeps_references: bool = False
    direct: DirectExecutor | None = None


class _Attachments(NamedTuple):
    """What few requests have beside their body: memory they hold, a trace, a cache lookup, the host of their payloads."""

    slots: Sequence[Freeable] = ()
    trace: Trace | None = None
    lookup: CacheLookup | None = None
    payload_host: str = ""


_NO_ATTACHMENTS = _Attachments()


class RequestDispatcher:
    """Submits the requests of one caller, a gateway or a worker (`caller_id`). Everything runs in one event loop."""

    def __init__(
        self, bus: Bus, caller_id: str, catalog: Catalog, payloads: PayloadStore, options: DispatchOptions | None = None
    ) -> None:
        options = options or DispatchOptions()
        self.tracing = options.tracing or Tracing()
        self._cache = options.cache
        self._bus = bus
        self._id = caller_id
        self._catalog = catalog
        self._payloads = payloads
        self._regions = options.regions
        self._keys = count(1)
        self._in_flight = InFlight()
        self._outbox = Outbox(bus, caller_id, payloads, self._in_flight, self._fail)
        self.counters = self._outbox.counters
        self.backpressure = self._outbox.backpressure
        self._keeps_references = options.keeps_references
        self._outputs = ResponsePayloads(self._outbox.release_slot, options.keeps_references)
        self.release = self._outputs.release
        self._remote = RemoteOutputFetcher(options.fetcher, self._on_response, self._outputs)
        self._delivery = ResponseDispatcher(self.tracing, self._in_flight, self._remove, self._outputs.discard)
        self._direct = options.direct
        if self._direct is not None:
            self._direct.attach(
                self._in_flight.get, lambda data: self._on_responses(Message("", "", data, "")), self._requeue
            )
        self.duplicate_responses = 0
        self._malformed_messages = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to responses, and watches the broker in a task of `background`.

        Raises NatsError, OSError or TimeoutError if the broker disconnects meanwhile; then it may be called again.
        """
        await self._outbox.streams.start()
        await self._bus.subscribe_with_links(subjects.reply(self._id), self._on_responses)
        await self._outbox.start(background)

    async def on_lost_attempts(self, listener: Callable[[list[int], str], None]) -> None:
        """Calls `listener` with the keys of durable requests whose attempt was lost, and why.

        The call may come after the request has ended, or not at all: it is for the record only.
        """

        def on_message(message: Message) -> None:
            try:
                lost = LostAttempts.unpack(message.data)
            except MalformedMessage as error:
                self._malformed_messages += 1
                _limited.warning(
                    "malformed lost attempts", "dropped a malformed message about lost attempts: %s", error
                )
            else:
                listener(lost.keys, lost.reason)

        await self._bus.subscribe(lost_attempts(self._id), on_message)

    async def stop(self, timeout_s: float) -> None:
        """Waits for pending requests, then ends the remaining ones with UNAVAILABLE."""
        deadline = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._outbox.stop()
        for pending in list(self._in_flight.values()):
            if pending.is_queued:
                self._outbox.cancel(pending.queue, pending.key)
        self._fail(list(self._in_flight), overloaded("the server is stopping", reason=Reason.STOPPING))
        self._outbox.flush()

    @property
    def in_flight(self) -> int:
        """Pending requests."""
        return len(self._in_flight)

    @property
    def rejected(self) -> dict[str, int]:
        """Requests rejected because of too much load, by the bound that they exceeded."""
        return {
            "in_flight": self._in_flight.rejected,
            "stream": self._outbox.rejected,
            "wait": self.backpressure.rejected,
        }

    @property
    def malformed_messages(self) -> int:
        """Messages that could not be decoded."""
        return self._malformed_messages + (0 if self._cache is None else self._cache.malformed_messages)

    def submit(  # noqa: PLR0913 - as `_accept`
        self,
        request: InferRequest,
        on_response: OnResponse,
        body_slot: Slot | None = None,
        sampling: Sampling | None = None,
        traffic_key: str = "",
        served: ServedModel | None = None,
        caller: Caller = ANYBODY,
    ) -> PendingRequest:
        """Publishes the request; `on_response` is called later, from the event loop, with each response.

        `body_slot` is the payload slot that holds the request's tensors, if any; it belongs to the request from now on.
        `sampling` is the result of `tracing.samples`, if the frontend has called it. Requests with an equal
        `traffic_key` that name no version run on the same version while the model's traffic rule stays. `served` is the
        model, if it is resolved already. The request counts for `caller`. Raises WeirError for a request that is rejected
        here: then nothing was sent, and `body_slot` still belongs to the caller.
        """
        model = served or self._catalog.resolve(request.model_name, request.model_version)
        self._in_flight.check_room()
        if caller.owner and (request.correlation_id or (model.caches and self._cache is not None)):
            is_own = request.correlation_id or (self._cache is not None and self._cache.is_per_owner())
            request.owner = caller.owner if is_own else ""
        arm = ""
        if model.split is not None:
            model.normalizer.normalize(request)
            request = copy(request)  # the caller's stays without a version: it may become a template
            arm = model.split.route(request, traffic_key)
        if self.backpressure.active and not self.caches(model):
            self.backpressure.check(time.monotonic(), model.queue, request, caller.owner)
        if model.split is None:
            model.normalizer.normalize(request)
        trace = self.tracing.start(request, model.name, sampling)
        lookup = self._cache.look_up(model, request) if model.caches and self._cache is not None else None
        if lookup is not None and lookup.response is not None:
            if body_slot is not None:
                body_slot.free()
            attachments = _Attachments((), trace, lookup)
            return self._accept(model, request, b"", on_response, request.deadline_ms, attachments, arm, caller)
        slots = self._payloads.hold(model.name, request, self._regions, body_slot)
        try:
            body = pack_body(request)
            self._payloads.check_size(model.name, request.inputs, len(body), self._bus.max_payload_bytes)
        except Exception:
            free_all(slot for slot in slots if slot is not body_slot)
            raise
        if body_slot is not None and body_slot not in slots:
            body_slot.free()
        # What a caller that keeps references passes on lies in no slot of its own.
        payload_host = host_of_payloads(request.inputs) if slots or self._keeps_references else ""
        attachments = _Attachments(slots, trace, lookup, payload_host)
        return self._accept(model, request, body, on_response, request.deadline_ms, attachments, arm, caller)

    def caches(self, model: ServedModel) -> bool:
        """Whether responses of the model may come from a cache, so that its requests cannot use templates."""
        return model.caches and self._cache is not None

    def submit_packed(  # noqa: PLR0913 - as `_accept`
        self,
        model: ServedModel,
        request: InferRequest,
        body: bytes,
        on_response: OnResponse,
        deadline_ms: int = 0,
        body_slot: Slot | None = None,
        traffic_key: str = "",
        caller: Caller = ANYBODY,
    ) -> PendingRequest:
        """As `submit`, for a checked `request` that many share, with its own packed `body`, small enough for a message.

        `deadline_ms`, `traffic_key` and `caller` are its own too. `body` refers to content in `body_slot`.
        """
        self._in_flight.check_room()
        arm = ""
        if model.split is not None:
            request = copy(request)
            arm = model.split.route(request, traffic_key)
        if self.backpressure.active:
            self.backpressure.check(time.monotonic(), model.queue, request, caller.owner)
        attachments = _NO_ATTACHMENTS if body_slot is None else _Attachments((body_slot,), payload_host=host())
        return self._accept(model, request, body, on_response, deadline_ms, attachments, arm, caller)

    def submit_copy(self, copied: PendingRequest) -> None:
        """Sends a copy of a submitted request (`weir.calls.traffic.shadow`), after it and in a frame of its own."""
        copied.key = next(self._keys)
        copied.envelope = copied.envelope._replace(key=copied.key)
        self._in_flight.add(copied)
        asyncio.get_running_loop().call_soon(self._outbox.add, copied.queue, copied.envelope)

    def _accept(  # noqa: PLR0913 - runs for every request: an object for its arguments would cost as much
        self,
        model: ServedModel,
        request: InferRequest,
        body: bytes,
        on_response: OnResponse,
        deadline_ms: int,
        attachments: _Attachments,
        arm: str,
        caller: Caller,
    ) -> PendingRequest:
        """Submits a checked request, for which `arm` is how a traffic rule has chosen its version, "" without a rule."""
        key = next(self._keys)
        sequence = request.correlation_id
        if request.owner and sequence:
            sequence = owned_id(request.owner, sequence)
        envelope = RequestEnvelope(
            key,
            int(request.model_version) if request.model_version else -1,
            request.batch_size,
            request.shape_key,
            request.priority,
            request.timeout_us,
            deadline_ms,
            sequence,
            request.sequence_flags,
            request.traceparent,
            body,
            request.lane,
            attachments.payload_host,
            *caller,
        )
        queue: Destination = model.queue
        if type(queue) is PartitionedQueue and sequence:
            queue = queue_of_sequence(queue, sequence)
        slots, trace, lookup, _ = attachments
        pending = PendingRequest(key, model, request, envelope, on_response, slots, trace, queue)
        if model.preserves_ordering:
            self._delivery.enqueue_ordered(pending)
        self._in_flight.add(pending)
        if trace is not None:
            self._outbox.has_traced = True
        if lookup is not None:
            self._look_up(pending, lookup)
        elif self._direct is not None:
            self._queue(pending)
        else:
            self._outbox.add(queue, envelope)
        if model.split is not None:
            model.split.counters.observe(model.split, pending, arm)
        return pending

    def _look_up(self, pending: PendingRequest, lookup: CacheLookup) -> None:
        pending.lookup = lookup
        pending.is_queued = False
        if lookup.response is not None:
            asyncio.get_running_loop().call_soon(self._on_cache, pending)
        elif self._cache is not None and self._cache.is_shared:
            self._cache.fetch(lookup, partial(self._on_cache, pending))
        else:
            self._queue(pending)

    @contained(on_error="_cache_failed")
    def _on_cache(self, pending: PendingRequest) -> None:
        """Delivers the cached response, or queues the request if there is none."""
        if self._in_flight.get(pending.key) is None or self._cache is None or pending.lookup is None:
            return  # it was cancelled
        response = self._cache.hit(pending.lookup, pending.request.id)
        if response is None:
            self._queue(pending)
            return
        self._in_flight.remove(pending.key)
        self.counters.changed(len(self._in_flight))
        self._delivery.deliver(pending, response, True)

    def _cache_failed(self, _error: Exception, pending: PendingRequest) -> None:
        """Runs the request: a cache that fails counts as no cache."""
        if self._in_flight.get(pending.key) is not None:
            self._queue(pending)

    def _queue(self, pending: PendingRequest) -> None:
        pending.is_queued = self._direct is None or not self._direct.take(pending)
        if pending.is_queued:
            self._outbox.add(pending.queue, pending.envelope)

    def _requeue(self, pending: PendingRequest) -> None:
        """Sends a pending request to its queue that `direct` has not run."""
        if self._in_flight.get(pending.key) is pending:
            pending.is_queued = True
            self._outbox.add(pending.queue, pending.envelope)

    def _withdraw(self, pending: PendingRequest) -> None:
        """Reports an ended request to where it may run."""
        if pending.is_queued:
            self._outbox.cancel(pending.queue, pending.key)
        elif self._direct is not None:
            self._direct.cancel(pending)

    def cancel(self, pending: PendingRequest) -> None:
        """Cancels a request: `on_response` is not called again, and the request leaves its queue if it has not run."""
        pending.has_ended = True
        was_pending = self._remove(pending)
        was_ordered = pending.order_key is not None and self._delivery.remove_ordered(pending)
        if pending.trace is not None and (was_pending or was_ordered):
            self.tracing.cancel(pending.trace, pending.key)
            pending.trace = None

    def cancel_and_listen(self, pending: PendingRequest) -> None:
        """Cancels a request whose caller wants to know how it ends; `on_response` is called up to the last response.

        A stream of responses that has begun goes on until its model ends it, which sees that it is cancelled. Any other
        request ends with CANCELLED at once: its caller could not see a difference.
        """
        if self._in_flight.get(pending.key) is not pending:
            return  # its last response is here, and may wait for those of earlier requests
        if pending.sequence is None:
            self._end(pending, cancelled_error(), is_running=True)
        else:
            self._withdraw(pending)

    def _remove(self, pending: PendingRequest) -> bool:
        """Ends a request without a response; False when it had its last response before."""
        if self._in_flight.remove(pending.key) is None:
            return False
        self._withdraw(pending)
        return True

    def _on_responses(self, message: Message) -> None:
        try:
            version, responses = unpack_responses(message.data, self._on_malformed_response)
        except MalformedMessage as error:
            self._on_malformed_response(None, error)
            return
        for response in responses:
            self._on_response(version, response)
        self.counters.changed(len(self._in_flight))

    def _on_malformed_response(self, key: int | None, error: MalformedMessage) -> None:
        """Ends the request of a response that cannot be decoded, if its key can be."""
        self._malformed_messages += 1
        _limited.warning("malformed response", "dropped a malformed response: %s", error)
        pending = None if key is None else self._in_flight.get(key)
        if pending is not None:
            self._end(pending, internal("the response of the worker could not be decoded"), is_running=True)

    @contained(on_error="_response_failed")
    def _on_response(self, version: int, response: ResponseEnvelope, is_whole: bool | None = None) -> None:
        """Takes a response that has come, or one that was held until its outputs were here (`is_whole`) or lost."""
        pending = self._in_flight.get(response.key)
        if pending is None:
            self.duplicate_responses += response.is_final and is_whole is None
            self._outputs.discard(response)
            return
        if is_whole is None:
            if response.run and not self._is_next(pending, response):
                return
            is_here = not self._remote.by_key
            for tensor in response.outputs or ():
                if isinstance(tensor.data, PayloadRef):
                    is_here = False
            passes_references = self._keeps_references and not pending.reads_content
            if not is_here and self._remote.holds(version, response, passes_references):
                return
        if (response.error is not None or is_whole is False) and self._runs_again(pending, response, is_whole is False):
            return
        outcome = self._outputs.outcome(pending, version, response)
        if pending.lookup is not None and isinstance(outcome, InferResponse) and self._cache is not None:
            self._cache.store(pending.lookup, version, outcome, self._outputs.copy_of)
        if response.is_final:
            self._in_flight.remove(pending.key)
        self._delivery.deliver(pending, outcome, response.is_final, response.timestamps)

    def _response_failed(self, _error: Exception, _version: int, response: ResponseEnvelope, *_: object) -> None:
        pending = self._in_flight.get(response.key)
        if pending is not None:
            self._end(pending, internal(UNEXPECTED), is_running=not response.is_final)
        self._outputs.discard(response)

    def _end(self, pending: PendingRequest, error: WeirError, is_running: bool = False) -> None:
        """Ends a request with `error`, unless it has ended. One that may be running is cancelled at its worker."""
        if self._in_flight.remove(pending.key) is None and pending.has_ended:
            return
        if is_running:
            self._withdraw(pending)
        self._delivery.deliver(pending, error, True)

    def _runs_again(self, pending: PendingRequest, response: ResponseEnvelope, is_lost: bool) -> bool:
        """Starts the back-off that an error asks for. Runs a request again whose content, or response (`is_lost`), was lost
        between two hosts, or ends it; False where the error is the response.
        """
        error, envelope = response.error, pending.envelope
        if error is not None and error.backoff_us:
            self.backpressure.note(time.monotonic(), pending.queue, pending.request, error, envelope.owner)
        # A request that is not cancelled has such an error where its worker could not read content that lies here.
        if not is_lost and (error is None or not is_cancelled_error(error) or self._keeps_references):
            return False
        self._outputs.discard(response)
        may_run_again = not (response.run or envelope.correlation_id or envelope.sequence_flags)
        if may_run_again and pending.reruns < MAX_RERUNS:
            pending.reruns += 1
            # Its scheduler must receive the end of the last run before the request comes again.
            asyncio.get_running_loop().call_later(_RERUN_WAIT_S, self._outbox.resend, [pending.key])
        else:
            self._end(pending, unavailable(_LOST_PAYLOAD), is_running=not response.is_final)
        return True

    def _is_next(self, pending: PendingRequest, response: ResponseEnvelope) -> bool:
        """Whether this is the next response of its run; ends the request if that one is lost."""
        if pending.sequence is None:
            pending.sequence = ResponseSequence(response.run)
        check = pending.sequence.check(response)
        if check is SequenceCheck.NEXT:
            return True
        self._outputs.discard(response)
        if check is SequenceCheck.BROKEN:
            self._end(pending, unavailable(_LOST_STREAM), is_running=not response.is_final)
        return False

    def _fail(self, keys: Iterable[int], error: WeirError) -> None:
        for key in keys:
            pending = self._in_flight.get(key)
            if pending is not None:
                self._end(pending, error)
