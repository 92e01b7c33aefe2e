"""`LaneIntake`: one lane of one model in stream QUEUE, in the hands of its owner: from the pull to the acknowledgement.

```text
 pull ─▶ headers ─▶ recorded already? ─▶ model there? ─▶ body there? ─▶ line of its sequence ─▶ fair queue ─▶ Runner
                              │                                                                                 │
                              └────────────────────────────────▶ Recorder ◀─────────────────────────────────────┘
```

What is held here is bounded by the pull; all else waits in the stream. Several requests come, begin, expire or end in one
callback: an unexpected exception in the part of one of them sends that one to DEAD.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from functools import partial

from bus import durable_subjects as subjects
from bus.connection import Message
from bus.delivered_message import delivery_of
from bus.message_pull import MessagePull
from calls.catalog import ServedModel
from gateway.durable.acknowledger import Acknowledger
from gateway.durable.arrival_line import ArrivalLine
from gateway.durable.bodies import Outline, outline_of
from gateway.durable.durable_request import DurableRequest, Stage
from gateway.durable.early_names import kserve_id
from gateway.durable.fair_queue import FairQueue
from gateway.durable.intake_parts import IntakeParts
from gateway.durable.known_headers import KnownHeaders
from gateway.durable.objects import FetchedBody
from gateway.durable.runner import Runner
from gateway.durable.sequence_lines import SequenceLines
from gateway.durable.stalled_requests import StalledRequests
from gateway.durable.waiting_limits import WaitingLimits
from runtime.containment import contained
from runtime.offload import OFF_LOOP_BYTES
from schemas.errors import ErrorCode, Reason, WeirError, internal, invalid, unavailable
from schemas.lanes import Lane
from schemas.queue_bounds import queue_bounds
from schemas.requests import SEQUENCE_START
from schemas.terminal import Outcome

PRINCIPAL = "durable"
"""Who holds messages of stream QUEUE, in the memory ledger."""

KIND = "durable"
"""What they are, in the memory ledger."""

MAX_CANCELLED = 10_000
"""Ids that were cancelled before their requests came here, and are remembered for a while."""

ROW_BYTES = 64 << 10  # of a body count as much as a request does, when tenants share a model

SEQUENCE_LOST = "the gateway was lost while it ran a request of sequence {}: start the sequence again"

UNEXPECTED = "unexpected error while the request was handled: see the gateway's log"

_AGE_SCAN_S = 2.0
_SPARE_DEADLINES = 1024
_BUSY_PAUSE_S = 1.0


class LaneIntake:
    """See the module. `lane` is `Lane.EVENT` or `Lane.BATCH`. Everything runs in one event loop."""

    def __init__(self, parts: IntakeParts, model: str, lane: Lane, background: asyncio.TaskGroup) -> None:
        self.model = model
        self.lane = lane
        self.name = "batch" if lane is Lane.BATCH else "event"
        self.is_unknown = False
        """Nobody has the model."""
        self._parts = parts
        self._plain_subject = subjects.event(model) if lane is Lane.EVENT else subjects.batch(model)
        self.inbox = f"{subjects.durable_inbox(parts.gateway_id)}.{self._plain_subject}"
        consumer = subjects.durable_consumer(self.name, model)
        self.pull = MessagePull(parts.bus, subjects.QUEUE_STREAM, consumer, self._arrived, parts.account.fits)
        self.acks = Acknowledger(parts.bus, parts.api, self._plain_subject, background)
        self.runner = Runner(parts, lane, self._wake, self._on_named, self._enter_again)
        self._queue: FairQueue[DurableRequest] = FairQueue(parts.weights)
        self._arrivals = ArrivalLine(self._admit)
        self._limits = WaitingLimits(model, parts.tenant_limits)
        self._headers = KnownHeaders(parts.limits)
        self._lines: SequenceLines[DurableRequest] = SequenceLines()
        self._held: dict[int, DurableRequest] = {}  # by sequence in the stream
        self._named: dict[str, DurableRequest] = {}
        self._cancelled: dict[str, None] = {}
        self._stalled = StalledRequests()
        self._deadlines: list[tuple[int, int]] = []
        """A heap of deadlines and sequences; also of requests that have ended, of which nothing else is kept."""
        self._begun_sequence = 0
        self._is_owner = False
        self._losses = 0  # of the connection, when it began
        self._wake_due = False
        self._scanned_s = 0.0
        self.pending = 0
        """Messages that were not delivered yet, as of the latest that was."""

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    @property
    def oldest_ms(self) -> int:
        """When the oldest of them was accepted, 0 where there is none."""
        return next(iter(self._held.values())).accepted_ms if self._held else 0

    # What its owner does

    def begin(self, begun_sequence: int, is_ours_still: bool, inbox: str, group: str) -> None:
        """Takes messages from `inbox` from now on, which come in order and without gaps.

        `group` is what the consumer asks for. What lies up to `begun_sequence` may have been begun by an owner before. With
        `is_ours_still` nobody else had it since it was ours: what is held goes on.
        """
        if not is_ours_still:
            self.drop()
            self._begun_sequence = begun_sequence
        self._is_owner = True
        self._losses = self._parts.bus.losses
        self.acks.begin()
        self.pull.start(time.monotonic(), inbox, group)
        self._wake()

    def pause(self) -> None:
        """It may be another's now: nothing more is begun until `begin`, and what is under way goes on."""
        self._is_owner = False
        self.pull.stop()

    def drop(self) -> None:
        """It is another's: everything is let go, which is delivered to him again."""
        self.pause()
        for request in self._held.values():
            if request.stage is not Stage.ENDING:
                self.runner.abandon(request)
            self._let_go(request)
        self._held.clear()
        self._named.clear()
        self.acks.clear()
        self._stalled.clear()
        self._deadlines.clear()
        self._lines.clear()
        self._limits.clear()
        self._arrivals.clear()
        self._queue = FairQueue(self._parts.weights)
        self.pull.forget()

    def receive(self, message: Message) -> None:
        """Takes a message of the inbox.

        After a gap nothing is taken before the next `begin`: what is missing would be purged with what comes after it.
        """
        if self._is_owner and self._losses == self._parts.bus.losses:
            self.pull.receive(message, time.monotonic())

    def tick(self, now_s: float) -> None:
        """Looks after what time alone brings: deadlines, models that are back."""
        self.pull.check(now_s)
        if self._held:
            self.runner.tick(now_s, self.model)
            self._wake()
        now_ms = time.time_ns() // 1_000_000
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            request = self._held.get(heapq.heappop(self._deadlines)[1])
            if request is not None and request.stage in (Stage.WAITING, Stage.BACKING_OFF):
                self._expire(request, now_ms)
        if self._is_owner:
            self._stalled.try_again(self._enter)
        if now_s - self._scanned_s > _AGE_SCAN_S:
            self._scanned_s = now_s
            for request in [r for r in self._stalled if r.trials.is_late(now_ms)]:
                self._expire(request, now_ms)

    def cancel(self, id: str) -> None:
        """The request of this id was cancelled: its record says so already."""
        request = self._named.get(id)
        if request is None:
            self._cancelled[id] = None
            if len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]
        elif request.stage is not Stage.ENDING:
            self._parts.recorder.settle(request, _nothing, self._leave)

    # The way of a message

    def _arrived(self, message: Message) -> None:
        delivery = delivery_of(message.reply)
        if delivery is None:
            self._parts.counters.malformed += 1
            self.pull.done(_size_bytes(message))
            return
        self.pending = delivery.pending
        known = self._held.get(delivery.sequence)
        if known is not None or self.acks.delivered_again(message.subject, delivery.sequence, message.reply):
            self._parts.counters.redeliver(self.model)
            self.pull.done(_size_bytes(message))
            if known is not None:
                known.ack_subject = message.reply
            return
        self.acks.opened(message.subject, delivery.sequence)
        version = "" if message.subject == self._plain_subject else subjects.durable_target(message.subject)[2]
        request = DurableRequest(message, delivery, self.lane, self.model, version, self._on_ended)
        self._held[delivery.sequence] = request
        # What has no room was asked for before others took it: it is held all the same, and no more is asked for.
        request.is_charged = self._parts.account.charge(KIND, request.size_bytes)
        self._take_in(request)

    @contained(on_error="_end_broken")
    def _take_in(self, request: DurableRequest) -> None:
        """A message that was delivered to this owner for the first time."""
        message, delivery = request.message, request.delivery
        request.maybe_begun = delivery.sequence <= self._begun_sequence or delivery.deliveries > 1
        if request.maybe_begun:
            self._parts.counters.redeliver(self.model)
        else:
            self._parts.counters.accept(self.model, self.lane)
        if message.header_block and not self._read_headers(request):
            return
        if message.subject != self._plain_subject and not subjects.is_durable_target(message.subject):
            self._name_early(request)
            self.runner.refuse(request, invalid(f"no requests are taken on subject '{message.subject}'"))
        elif request.maybe_begun or self._has_long_body(request):
            self._arrivals.add(request, is_asked=True)
            self._after_reading(request, self._settle)
        elif len(self._arrivals):
            self._arrivals.add(request, is_asked=False)
        else:
            self._admit(request)

    def _settle(self, request: DurableRequest) -> None:
        """Finds out whether a request that may have been begun has its record."""
        if not request.maybe_begun:
            self._arrivals.settled(request)
            return
        self._name_early(request)
        self._parts.recorder.settle(request, partial(self._arrivals.settled, request))

    def _has_long_body(self, request: DurableRequest) -> bool:
        return len(request.body) > OFF_LOOP_BYTES and not request.terms.object_name

    def _after_reading(self, request: DurableRequest, then: Callable[[DurableRequest], None]) -> None:
        """Calls `then(request)` once a helper process has read the body, at once where it need not."""
        headers, limits = request.terms.content_headers, self._parts.limits
        outline = outline_of(request.model, request.version, request.body, headers, limits)
        if outline is None:
            then(request)
            return
        try:
            reading = self._parts.offload.start(outline.operation, outline.parts)
        except WeirError:  # too many wait; the stream can wait longer
            asyncio.get_running_loop().call_later(_BUSY_PAUSE_S, self._read_later, request, then)
            return
        reading.add_done_callback(partial(self._on_outline, request, outline, then))

    @contained(on_error="_end_broken")
    def _read_later(self, request: DurableRequest, then: Callable[[DurableRequest], None]) -> None:
        if request.stage is Stage.WAITING and request.delivery.sequence in self._held:
            self._after_reading(request, then)

    @contained(on_error="_end_broken")
    def _on_outline(
        self,
        request: DurableRequest,
        outline: Outline,
        then: Callable[[DurableRequest], None],
        reading: asyncio.Future[list[memoryview]],
    ) -> None:
        if reading.cancelled() or request.delivery.sequence not in self._held:
            return
        error = reading.exception()
        if error is not None and not isinstance(error, WeirError):
            raise error
        request.outline = outline._replace(result=error or reading.result())
        then(request)

    def _read_headers(self, request: DurableRequest) -> bool:
        request.terms, error = self._headers.read(request.message.header_block)
        if error is not None:
            self._name_early(request)
            self.runner.refuse(request, error)
            return False
        request.trials.deadline_ms = request.terms.deadline_ms
        return True

    def _name_early(self, request: DurableRequest) -> None:
        """Finds the id of a request that is to end, or may have ended, before its body is read."""
        if request.terms.id:
            request.name("")
        elif not request.is_named and not request.terms.object_name:
            request.name(kserve_id(request, self._parts))

    @contained(on_error="_end_broken")
    def _admit(self, request: DurableRequest) -> None:
        """A request that has no record yet."""
        if request.stage is not Stage.WAITING or request.delivery.sequence not in self._held:
            return
        if request.terms.id and not request.is_named:
            request.name("")
        if request.is_named and not self._on_named(request):
            return
        if request.trials.deadline_ms:
            self._note_deadline(request)
        if self._stalled.has(request.version) or not self._is_owner:
            self._stalled.add(request)
        else:
            self._enter(request)

    def _note_deadline(self, request: DurableRequest) -> None:
        if len(self._deadlines) > 2 * len(self._held) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._held]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (request.trials.deadline_ms, request.delivery.sequence))

    @contained(on_error="_end_broken")
    def _enter(self, request: DurableRequest) -> None:
        """A request whose model is to be found."""
        if request.stage is not Stage.WAITING:
            return
        try:
            served = self._parts.catalog.resolve(self.model, request.version)
        except WeirError as error:
            self._on_unresolved(request, error)
            return
        if not request.is_counted and not self._count(request, served):
            return
        if request.terms.object_name and not request.has_object:
            self._parts.objects.fetch(request.terms.object_name, partial(self._on_object, request))
        elif self._stand_in_line(request, served):
            self._queue_up(request)

    def _count(self, request: DurableRequest, served: ServedModel) -> bool:
        """Whether the request may wait; those that were let in before, and what was checked at a door, always may."""
        bounds = queue_bounds(served.config, self._parts.bounds)
        request.trials.max_age_ms = bounds.max_age_ms
        terms = request.terms
        if not request.maybe_begun:
            is_checked = request.message.subject.startswith(f"{self._plain_subject}.job.")
            error = self._limits.refusal(terms.tenant, request.size_bytes, None if is_checked else bounds)
            if error is not None:
                self._name_early(request)
                self._parts.recorder.fail(request, Outcome.FAILED, error)
                return False
        request.is_counted = True
        self._limits.added(terms.tenant, request.size_bytes)
        return True

    @contained(on_error="_end_broken")
    def _on_object(self, request: DurableRequest, body: FetchedBody | WeirError) -> None:
        if isinstance(body, FetchedBody):
            if request.stage is not Stage.WAITING or request.has_object:
                self._parts.objects.release(body.data)
                return
            request.body, request.digest = body
            request.has_object = True
            self._after_reading(request, self._enter)
        elif request.stage is not Stage.WAITING:
            return
        elif body.retryable:
            self.runner.failed(request, body)
        else:
            self._name_early(request)
            self.runner.refuse(request, body)

    def _stand_in_line(self, request: DurableRequest, served: ServedModel) -> bool:
        """Whether the request needs to wait for none of its sequence."""
        sequences = served.config.sequence_batching
        if sequences is None or sequences.iterative_sequence or request.sequence:
            return True
        if not self.runner.read(request, served) or request.request is None:
            return False
        request.sequence = request.request.correlation_id
        return not request.sequence or self._lines.join(request.sequence, request)

    @contained(on_error="_end_broken")
    def _queue_up(self, request: DurableRequest) -> None:
        self._queue.add(request.terms.tenant, request, 1 + len(request.body) // ROW_BYTES)
        self._wake()

    @contained(on_error="_end_broken")
    def _enter_again(self, request: DurableRequest) -> None:
        if self._is_owner:
            self._enter(request)
        else:
            self._stalled.add(request)

    def _wake(self) -> None:
        """Something may be begun: once all that has arrived by now is taken in."""
        if not self._wake_due:
            self._wake_due = True
            self._parts.bus.defer(self._begin_next)

    def _begin_next(self) -> None:
        self._wake_due = False
        if not self._is_owner or self.runner.is_stopping:
            return
        while self.runner.has_room and (request := self._queue.pop()) is not None:
            self._begin(request)

    @contained(on_error="_end_broken")
    def _begin(self, request: DurableRequest) -> None:
        now_ms = time.time_ns() // 1_000_000
        if request.trials.is_late(now_ms):
            self._expire(request, now_ms)
            return
        try:
            served = self._parts.catalog.resolve(self.model, request.version)
        except WeirError as error:
            self._on_unresolved(request, error)
            return
        if request.sequence:
            asked = request.request
            starts = asked is not None and bool(asked.sequence_flags & SEQUENCE_START)
            # Of one that was begun by us and failed in passing the scheduler knows; that is as with any caller.
            if not self._lines.may_go(request.sequence, starts, request.maybe_begun):
                self._parts.recorder.fail(
                    request, Outcome.FAILED, unavailable(SEQUENCE_LOST.format(request.sequence), Reason.SEQUENCE_LOST)
                )
                return
        self.runner.begin(request, served)

    def _on_unresolved(self, request: DurableRequest, error: WeirError) -> None:
        """No worker has what is asked for."""
        is_known = self._parts.catalog.knows(self.model)
        if self.is_unknown and not is_known:
            self._name_early(request)
            self._parts.recorder.bury(request, error)
        elif is_known and request.version and error.code is ErrorCode.NOT_FOUND:
            self.runner.failed(request, error)  # other versions are there: this one is not awaited for ever
        elif error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE):
            self._stalled.add(request)
        else:
            self._name_early(request)
            self.runner.failed(request, error)

    def _on_named(self, request: DurableRequest) -> bool:
        """The id is known; False where the request is not to be run by that."""
        if request.id in self._cancelled:
            del self._cancelled[request.id]
            self._parts.recorder.settle(request, partial(self._admit, request))
            return False
        self._named[request.id] = request
        return True

    # Its end

    @contained(on_error="_end_broken")
    def _expire(self, request: DurableRequest, now_ms: int) -> None:
        decision = self._parts.policy.before(now_ms, request.trials)
        if decision is None or decision.outcome is None:
            return
        self._leave(request)
        self._name_early(request)
        self._parts.recorder.fail(request, decision.outcome, unavailable(decision.reason))

    def _leave(self, request: DurableRequest) -> None:
        """A request is not to be begun, or not to be answered, any more."""
        self._queue.remove(request)
        self._stalled.remove(request)
        self.runner.give_up(request)

    def _end_broken(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        """Sends a request to DEAD whose handling raised an unexpected exception."""
        if request.stage in (Stage.ENDING, Stage.ENDED):
            return  # the recorder sees to its end
        self._leave(request)
        if not request.terms.id:  # it was not read yet, and the producer looks for the record under it
            self._read_id(request)
        if request.terms.id:
            request.name("")
        self._parts.recorder.bury(request, internal(UNEXPECTED))

    @contained()
    def _read_id(self, request: DurableRequest) -> None:
        if request.message.header_block:
            request.terms, _ = self._headers.read(request.message.header_block)

    @contained(on_error="_end_held")
    def _on_ended(self, request: DurableRequest) -> None:
        if not self._end_held(None, request):
            return  # the lane was let go meanwhile
        if request.is_counted:
            self._limits.ended(request.terms.tenant, request.size_bytes)
        if self._named.get(request.id) is request:
            del self._named[request.id]
        if request.sequence:
            following = self._lines.leave(request.sequence, request)
            if following is not None:
                self._queue_up(following)
        self._arrivals.advance()

    def _end_held(self, _error: Exception | None, request: DurableRequest) -> bool:
        """Acknowledges a request and holds it no longer; False where it was not held."""
        sequence = request.delivery.sequence
        if self._held.get(sequence) is not request:
            return False
        del self._held[sequence]
        self._let_go(request)
        self.acks.ended(request.message.subject, sequence, request.ack_subject)
        self.pull.done(request.size_bytes)
        return True

    def _let_go(self, request: DurableRequest) -> None:
        """Releases the memory of a request that is not held any more."""
        if request.is_charged:
            request.is_charged = False
            self._parts.account.release(KIND, request.size_bytes)
        self.runner.let_go_of_object(request)


def _size_bytes(message: Message) -> int:
    return len(message.data) + len(message.header_block)


def _nothing() -> None:
    """What was told to be cancelled has no such record: it goes on."""
