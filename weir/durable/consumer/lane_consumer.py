"""`LaneConsumer`: one durable lane of one model while this process holds the model's lease: from the pull to the
acknowledgement of each message.

```text
 pull ─▶ headers ─▶ recorded already? ─▶ model served? ─▶ body fetched? ─▶ turn in its sequence ─▶ fair queue ─▶ runner
                              │                                                                                   │
                              └─────────────────────────────────▶ recorder ◀──────────────────────────────────────┘
```

The pull bounds what is held here; the rest waits in the stream. One callback may handle several requests, each by
`_handle`: an unexpected exception in the handling of one of them sends that one to stream DEAD.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

import msgspec

from weir.access.gate import Asked, Shown
from weir.access.policy.actions import Action
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Message
from weir.bus.nats.headers import parse_headers
from weir.bus.nats.jetstream import parse_ack_subject
from weir.bus.streams.pull import BoundedPull
from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import HEADER_LENGTH, codec_of, format_of
from weir.durable.api.acceptance import OWNER_HEADER
from weir.durable.consumer.acknowledger import Acknowledger
from weir.durable.consumer.context import ConsumerContext
from weir.durable.consumer.runner import NO_MODEL, RequestRunner, read_body
from weir.durable.records.object_bodies import FetchedBody
from weir.durable.requests.durable_queue import DurableQueue
from weir.durable.requests.headers import HeaderCache, check_id
from weir.durable.requests.ordering import DeliveryOrder
from weir.durable.requests.request import DurableRequest, Stage
from weir.runtime.containment import contained
from weir.runtime.offload import OFF_LOOP_BYTES
from weir.schemas.config.parameters import QueueBounds, queue_bounds
from weir.schemas.core.errors import ErrorCode, Reason, WeirError, internal, invalid, unavailable
from weir.schemas.core.requests import SEQUENCE_START, Lane
from weir.schemas.wire.terminal import Outcome

PRINCIPAL = "durable"
"""The principal of messages of stream QUEUE in the memory ledger."""

KIND = "durable"
"""The kind of their memory."""

SEQUENCE_LOST = "the process that ran a request of sequence {} was lost: start the sequence again"

UNEXPECTED = "unexpected error while the request was handled: see the server's log"

_BUSY_PAUSE_S = 1.0


class LaneConsumer:
    """Consumes one lane. `lane` is `Lane.EVENT` or `Lane.BATCH`. Everything runs in one event loop."""

    def __init__(self, context: ConsumerContext, model: str, lane: Lane, background: asyncio.TaskGroup) -> None:
        self.model = model
        self.lane = lane
        self.is_unknown = False
        """Whether no worker has the model."""
        self._context = context
        self._plain_subject = subjects.event(model) if lane is Lane.EVENT else subjects.batch(model)
        self._checked_prefix = f"{self._plain_subject}.job."  # of requests that a frontend has checked
        self.inbox = f"{subjects.durable_inbox(context.consumer_id)}.{self._plain_subject}"
        consumer = subjects.durable_consumer("batch" if lane is Lane.BATCH else "event", model)
        self.pull = BoundedPull(context.bus, subjects.QUEUE_STREAM, consumer, self._on_message, context.account.fits)
        self.acks = Acknowledger(context.bus, context.api, self._plain_subject, background)
        self.runner = RequestRunner(context, lane, self._wake, self._register_id, partial(self._handle, self._resume))
        self._on_ended = partial(self._handle, self._end)
        self._queue = DurableQueue(model, context.weights, context.tenant_limits)
        self._headers = HeaderCache(context.limits)
        self._started_sequence = 0
        self._is_owner = False
        self._deliveries = DeliveryOrder()
        self._losses = -1  # of the connection, when messages began to be received
        self._turn_is_due = False
        self._charged_bytes = 0
        self._accepted = 0  # in this turn of the event loop
        self._bounds: QueueBounds | None = None
        self._bounds_of: ServedModel | None = None

    def __len__(self) -> int:
        """Requests that are held here."""
        return len(self._queue)

    @property
    def oldest_ms(self) -> int:
        """When the oldest of them was accepted, in unix milliseconds; 0 for none."""
        return next((request.accepted_ms for request in self._queue), 0)

    # Ownership

    def acquire(self, started_sequence: int, is_continued: bool, inbox: str, group: str) -> None:
        """Receives messages from `inbox` from now on, in order and without gaps.

        `group` is the consumer's priority group. An earlier owner may have started messages up to `started_sequence`.
        With `is_continued` no other process has owned the lane since this one did: the requests that are held go on.
        """
        if not is_continued:
            self.drop()
            self._started_sequence = started_sequence
        self._deliveries.begin()
        self.resume(inbox, group)

    def expect_redelivery(self) -> None:
        """The consumer is about to deliver everything unacknowledged again, to the same inbox.

        Until then messages from before may arrive, with gaps, and are ignored.
        """
        self._deliveries.begin()
        self._losses = self._context.bus.losses

    def resume(self, inbox: str = "", group: str | None = None) -> None:
        """Continues after `expect_redelivery`, once the consumer is known to be this owner's still: as before, without
        arguments.
        """
        self._is_owner = True
        self._losses = self._context.bus.losses
        self.acks.begin()
        self.pull.start(inbox, group)
        self._wake()

    def pause(self) -> None:
        """Another process may own the lane: starts nothing until `acquire`; requests that run go on."""
        self._is_owner, self._losses = False, -1
        self.pull.pause()

    def drop(self) -> None:
        """Another process owns the lane: releases all requests, which the broker delivers to that process."""
        self.pause()
        for request in self._queue:
            if request.stage is not Stage.ENDING:
                self.runner.cancel(request)
                request.stage = Stage.ENDED
            self.runner.release_object(request)
        self._queue.clear()
        self.acks.clear()
        self.pull.clear()
        self._settle_account()

    def receive(self, message: Message) -> None:
        """Handles a message of the inbox.

        After a loss of the connection messages are ignored until `acquire`: one that was lost would be purged together
        with later ones.
        """
        if self._losses == self._context.bus.losses:
            self.pull.receive(message)

    def tick(self, now_s: float) -> None:
        """Handles deadlines, and requests whose model may be available again. Called periodically."""
        self.pull.check()
        if len(self):
            self.runner.tick(now_s, self.model)
            self._wake()
        now_ms = time.time_ns() // 1_000_000
        for request in self._queue.expired(now_ms):
            self._handle(self._expire, request, now_ms)
        if self._is_owner:
            for request in self._queue.retry():
                self._handle(self._resume, request)

    def cancel(self, id: str) -> None:
        """Ends the request with this id, which was cancelled: its record is stored already."""
        request = self._queue.cancel(id)
        if request is not None and request.stage is not Stage.ENDING:
            self._context.recorder.resolve(request, _no_callback, self.runner.cancel)

    # From the message to the runner

    def _on_message(self, message: Message) -> None:
        delivery = parse_ack_subject(message.reply)
        if delivery is None:
            self._context.counters.malformed += 1
            self.pull.done(_size_bytes(message))
            return
        if not self._deliveries.follows(delivery.number):
            # One before it was lost on the way, and would be purged together with it. All are to be delivered again.
            self.pull.done(_size_bytes(message))
            self.pull.consumer_lost = True
            return
        known = self._queue.find(delivery.sequence)
        if known is not None or self.acks.delivered_again(message.subject, delivery.sequence, message.reply):
            self._context.counters.redeliver(self.model)
            self.pull.done(_size_bytes(message))
            if known is not None:
                known.ack_subject = message.reply
            return
        self.acks.opened(message.subject, delivery.sequence)
        version = "" if message.subject == self._plain_subject else subjects.durable_target(message.subject)[2]
        request = DurableRequest.of(message, delivery, self.lane, (self.model, version), self._on_ended)
        self._queue.receive(request)
        self._wake()
        self._handle(self._receive_new, request)

    @contained(on_error="_on_unexpected_error")
    def _handle(self, step: Callable[..., None], request: DurableRequest, *arguments: object) -> None:
        """Calls `step(request, *arguments)`: the way into the steps below, from messages, timers, and other requests."""
        step(request, *arguments)

    def _on_unexpected_error(
        self, _error: Exception, _step: Callable[..., None], request: DurableRequest, *_others: object
    ) -> None:
        """Dead-letters a request whose handling raised an unexpected exception."""
        if request.stage is Stage.ENDED:
            self._finish(request)
        if request.stage >= Stage.ENDING:
            return  # the recorder ends it
        self.runner.cancel(request)
        if not request.headers.id and request.message.header_block:  # the producer looks the record up by this id
            request.headers, _ = self._headers.read(request.message.header_block)
        if request.headers.id:
            request.name("")
        self._context.recorder.dead_letter(request, internal(UNEXPECTED))

    def _receive_new(self, request: DurableRequest) -> None:
        """Handles a message that is delivered to this owner for the first time."""
        message, delivery = request.message, request.delivery
        request.maybe_started = delivery.sequence <= self._started_sequence or delivery.deliveries > 1
        if request.maybe_started:
            self._context.counters.redeliver(self.model)
        else:
            self._accepted += 1
        if message.header_block and not self._read_headers(request):
            return
        if message.subject != self._plain_subject and not subjects.is_durable_target(message.subject):
            self._peek_id(request)
            self.runner.reject(request, invalid(f"subject '{message.subject}' is not a subject of durable requests"))
        elif request.maybe_started or (len(request.body) > OFF_LOOP_BYTES and not request.headers.object_name):
            self._after_reading(request, self._settle)
        else:
            self._settled(request)

    def _settle(self, request: DurableRequest) -> None:
        """Looks up the record of a request that an earlier owner may have started."""
        if request.maybe_started:
            self._peek_id(request)
            self._context.recorder.resolve(request, partial(self._handle, self._settled, request))
        else:
            self._settled(request)

    def _settled(self, request: DurableRequest) -> None:
        """Admits a request that has no record yet once all before it are admitted."""
        if request.stage is Stage.RECEIVED and self._is_let_in(request):
            request.stage = Stage.READ
        self._admit_next()

    def _admit_next(self) -> None:
        while (request := self._queue.admit()) is not None:
            self._handle(self._admit, request)

    def _after_reading(self, request: DurableRequest, then: Callable[[DurableRequest], None]) -> None:
        """Calls `then(request)` once a helper process has parsed the body; at once for a short one."""
        if request.stage >= Stage.RUNNING:
            return  # it has ended meanwhile
        codec = codec_of(format_of(request.headers.content_headers))
        job = codec.read_job(request.document(NO_MODEL), self._context)
        if job is None:
            then(request)
            return
        try:
            reading = self._context.offload.start(*job)
        except WeirError:  # the helpers have too many jobs; the request can wait
            asyncio.get_running_loop().call_later(_BUSY_PAUSE_S, self._handle, self._after_reading, request, then)
            return
        reading.add_done_callback(partial(self._handle, self._on_parsed, request, then))

    def _on_parsed(
        self,
        request: DurableRequest,
        then: Callable[[DurableRequest], None],
        reading: asyncio.Future[list[memoryview]],
    ) -> None:
        if reading.cancelled() or request.stage >= Stage.RUNNING:
            return
        error = reading.exception()
        if error is not None and not isinstance(error, WeirError):
            raise error
        request.parts = error or reading.result()
        then(request)

    def _read_headers(self, request: DurableRequest) -> bool:
        request.headers, error = self._headers.read(request.message.header_block)
        if error is not None:
            self._peek_id(request)
            self.runner.reject(request, error)
            return False
        request.attempt_history.deadline_ms = request.headers.deadline_ms
        return True

    def _is_checked(self, request: DurableRequest) -> bool:
        """Whether a frontend has checked the request before it stored it; only frontends publish on such subjects."""
        return request.message.subject.startswith(self._checked_prefix)

    def _is_let_in(self, request: DurableRequest) -> bool:
        """Asks the gate about a request that a producer has published. A refused one fails; its record says why.

        A token counts that was valid when the request was stored: it may wait for long.
        """
        gate = self._context.gate
        if not gate.is_on:
            return True
        headers = parse_headers(request.message.header_block)
        if self._is_checked(request):
            request.owner = unquote(headers.get(OWNER_HEADER.lower(), ""))
            return True
        shown = Shown(
            headers.get("authorization", "").encode(errors="replace"),
            tenant=request.headers.tenant.encode(errors="replace"),
            at_s=request.accepted_ms / 1000,
        )
        lane = self._plain_subject.partition(".")[0]
        try:
            principal = gate.admit(shown, Asked("durable", lane, Action.INFER, self.model, request.version))
        except WeirError as error:
            self._peek_id(request)
            self._context.recorder.fail(request, Outcome.FAILED, error)
            return False
        request.owner = principal.owner
        request.headers = msgspec.structs.replace(request.headers, tenant=principal.tenant)
        return True

    def _peek_id(self, request: DurableRequest) -> None:
        """Sets the id of a request that is about to end, or may have ended, before its body is parsed."""
        if request.headers.id:
            request.name("")
        elif not request.is_named and not request.headers.object_name:
            request.name(self._find_id(request))

    def _find_id(self, request: DurableRequest) -> str:
        """The KServe id in a request's body, "" if it has none or can't be parsed; sets the format of the body.

        A long body that no helper process has parsed has no id: its headers could not be parsed either.
        """
        is_unread = not request.parts and len(request.body) > OFF_LOOP_BYTES
        if is_unread or request.headers.content_headers.get(HEADER_LENGTH) == "0":
            return ""
        try:
            return check_id(read_body(request, NO_MODEL, self._context).id)
        except WeirError:
            return ""

    def _admit(self, request: DurableRequest) -> None:
        if request.stage is not Stage.READ:
            return
        if request.headers.id and not request.is_named:
            request.name("")
        if request.is_named and not self._register_id(request):
            return
        if request.attempt_history.deadline_ms:
            self._queue.note_expiry(request)
        self._find_model(request)

    def _resume(self, request: DurableRequest) -> None:
        """Continues with a request, unless it has ended meanwhile."""
        if request.stage is Stage.READ:
            self._find_model(request)

    def _find_model(self, request: DurableRequest) -> None:
        """Makes a request ready if its model is available; else parks it."""
        if not self._is_owner or self._queue.is_away(request.version):
            self._queue.park(request)
            return
        try:
            served = self._context.catalog.resolve(self.model, request.version)
        except WeirError as error:
            self._on_unresolved(request, error)
            return
        if not request.is_counted and not self._count(request, served):
            return
        if request.headers.object_name and not request.has_object:
            self._context.objects.fetch(request.headers.object_name, partial(self._handle, self._on_object, request))
        elif self._may_run_now(request, served):
            self._make_ready(request)

    def _count(self, request: DurableRequest, served: ServedModel) -> bool:
        """Whether the queue has room. Requests of an earlier owner, and those that a frontend has checked, always have."""
        bounds = self._bounds
        if bounds is None or served is not self._bounds_of:
            bounds = self._bounds = queue_bounds(served.config, self._context.bounds)
            self._bounds_of = served
        request.attempt_history.max_age_ms = bounds.max_age_ms
        error = self._queue.count(request, None if self._is_checked(request) else bounds)
        if error is not None:
            self._peek_id(request)
            self._context.recorder.fail(request, Outcome.FAILED, error)
        return error is None

    def _on_object(self, request: DurableRequest, body: FetchedBody | WeirError) -> None:
        if isinstance(body, FetchedBody):
            if request.stage is not Stage.READ or request.has_object:
                self._context.objects.release(body.data)
                return
            request.body, request.digest = body
            request.has_object = True
            self._after_reading(request, self._resume)
        elif request.stage is not Stage.READ:
            return
        elif body.retryable:
            self.runner.failed(request, body)
        else:
            self._peek_id(request)
            self.runner.reject(request, body)

    def _may_run_now(self, request: DurableRequest, served: ServedModel) -> bool:
        """Whether no earlier request of its sequence is unfinished."""
        sequences = served.config.sequence_batching
        if sequences is None or sequences.iterative_sequence or request.sequence:
            return True
        if not self.runner.read(request, served) or request.request is None:
            return False
        request.sequence = request.request.correlation_id
        return not request.sequence or self._queue.sequences.join(request.sequence, request)

    def _make_ready(self, request: DurableRequest) -> None:
        self._queue.make_ready(request)
        self._wake()

    def _wake(self) -> None:
        """Schedules `_end_turn` after the messages that have arrived by now."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self._context.bus.defer(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_is_due = False
        may_begin = self._is_owner and not self.runner.is_stopping
        now_ms = time.time_ns() // 1_000_000
        resolved: dict[str, ServedModel] = {}
        while may_begin and self.runner.has_room and (request := self._queue.next()) is not None:
            self._handle(self._begin, request, now_ms, resolved)
        self._settle_account()

    def _begin(self, request: DurableRequest, now_ms: int, resolved: dict[str, ServedModel]) -> None:
        """Starts a request. `resolved` are the versions of the model that were found in this turn of the event loop."""
        if request.attempt_history.is_expired(now_ms):
            self._expire(request, now_ms)
            return
        served = resolved.get(request.version)
        if served is None:
            try:
                served = resolved[request.version] = self._context.catalog.resolve(self.model, request.version)
            except WeirError as error:
                self._on_unresolved(request, error)
                return
        if request.sequence:
            asked = request.request
            starts = asked is not None and bool(asked.sequence_flags & SEQUENCE_START)
            # A request that this process started and that failed temporarily is known to the scheduler, as for any
            # caller.
            if not self._queue.sequences.may_go(request.sequence, starts, request.maybe_started):
                self._context.recorder.fail(
                    request, Outcome.FAILED, unavailable(SEQUENCE_LOST.format(request.sequence), Reason.SEQUENCE_LOST)
                )
                return
        self.runner.begin(request, served, now_ms)

    def _on_unresolved(self, request: DurableRequest, error: WeirError) -> None:
        """Handles a request whose model or version no worker serves."""
        is_known = self._context.catalog.knows(self.model)
        if self.is_unknown and not is_known:
            self._peek_id(request)
            self._context.recorder.dead_letter(request, error)
        elif is_known and request.version and error.code is ErrorCode.NOT_FOUND:
            self.runner.failed(request, error)  # other versions are served: the wait for this one is limited
        elif error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE):
            self._queue.park(request)
        else:
            self._peek_id(request)
            self.runner.failed(request, error)

    def _register_id(self, request: DurableRequest) -> bool:
        """Notes the request's id; False where the id was cancelled, so that the request must not run."""
        if self._queue.register(request):
            return True
        request.stage = Stage.READ
        self._context.recorder.resolve(request, partial(self._handle, self._admit, request))
        return False

    # The end of a request

    def _expire(self, request: DurableRequest, now_ms: int) -> None:
        decision = self._context.policy.before(now_ms, request.attempt_history)
        if decision is None or decision.outcome is None:
            return
        self._peek_id(request)
        self._context.recorder.fail(request, decision.outcome, unavailable(decision.reason))

    def _end(self, request: DurableRequest) -> None:
        """Acknowledges a request whose record is stored, and goes on with those that have waited for it."""
        if not self._finish(request):
            return  # the lane was dropped meanwhile
        following = self._queue.sequences.leave(request.sequence, request) if request.sequence else None
        if following is not None and following.stage is Stage.READ:
            self._make_ready(following)
        self._admit_next()

    def _finish(self, request: DurableRequest) -> bool:
        """Acknowledges a request and releases it; False where it was not held."""
        if not self._queue.remove(request):
            return False
        self.runner.release_object(request)
        self.acks.ended(request.message.subject, request.delivery.sequence, request.ack_subject)
        self.pull.done(request.size_bytes)
        self._wake()
        return True

    def _settle_account(self) -> None:
        """Has the counters and the memory ledger follow the held messages."""
        # Without room messages are held all the same, because the pull had requested them; it requests no more meanwhile.
        if self._accepted:
            self._context.counters.accept(self.model, self.lane, self._accepted)
            self._accepted = 0
        more_bytes = self.pull.held_bytes - self._charged_bytes
        if more_bytes > 0 and self._context.account.charge(KIND, more_bytes):
            self._charged_bytes += more_bytes
        elif more_bytes < 0:
            self._context.account.release(KIND, -more_bytes)
            self._charged_bytes += more_bytes


def _size_bytes(message: Message) -> int:
    return len(message.data) + len(message.header_block)


def _no_callback() -> None:
    """A cancelled request without a record: it goes on."""
