"""`Inference`: the one way to the queue and back, from every front door and from inside of models.

A request is resolved, normalised and published (`calls.outbox`). The caller holds it until its answer: when the broker
is back without its memory stream, it sends again what has no answer yet. Whatever happens, `on_answer` is told of an end
at most once, and once for a request that was not abandoned. Answers before the last come from decoupled models only.

A message brings the responses of a whole batch. What fails while one of them is decoded, completed or delivered ends that
request with an internal error (`runtime.containment`), and none of the others. An `on_answer` that raises is called
once more, with that error, and never again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from bus.durable_subjects import lost_attempts
from bus.payload_fetcher import PayloadFetcher
from bus.payloads import Slot
from calls.answer_payloads import AnswerPayloads
from calls.catalog import Catalog, ServedModel
from calls.delivery import UNEXPECTED, Delivery
from calls.frame_counters import FrameCounters
from calls.in_flight import InFlight
from calls.live_stream_watch import LiveStreamWatch
from calls.outbox import Outbox
from calls.partition_choice import AnyQueue, queue_of_sequence
from calls.payload_store import Freeable, PayloadStore, free_all, host_of_payloads, is_large
from calls.pending import OnAnswer, Pending
from calls.prepared import PreparedRequest
from calls.region_holder import RegionHolder
from calls.remote_answers import RemoteAnswers
from calls.response_cache import Question, ResponseCache
from calls.shut_queues import ShutQueues
from calls.stream_order import Place, StreamOrder
from calls.tracing import Tracing
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from schemas.bodies import pack_body
from schemas.errors import Reason, WeirError, internal, invalid, overloaded, unavailable
from schemas.lost_attempts import unpack_lost_attempts
from schemas.messages import Answer, Part, unpack_answers
from schemas.request_errors import is_given_up
from schemas.requests import InferRequest, InferResponse
from schemas.wire import MalformedMessage
from telemetry.trace import Trace

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

BROKER_PATIENCE_S = 30.0
"""How long requests wait for a broker that is away before they are refused."""

_LOST_STREAM = "the rest of the response was lost; the request may be sent again"

_LOST_PAYLOAD = "content was lost between two hosts; the request may be sent again"

_UNDECODABLE = "the response of the worker could not be decoded"

MAX_RERUNS = 3
"""How often a request runs again whose content, or that of its answer, was lost on its way between two hosts."""

_RERUN_WAIT_S = 0.05
_DRAIN_POLL_S = 0.02

_NO_SLOTS: Sequence[Freeable] = ()


class Inference:
    """See the module. Everything runs in one event loop.

    `caller_id` is who asks: a gateway, or a worker for its ensembles and Python models. Without `regions` requests can't
    use memory of clients; without `cache` every request is run. With `keeps_references` large outputs stay references,
    until `release`. `fetcher` brings outputs of other hosts.
    """

    def __init__(
        self,
        bus: Bus,
        caller_id: str,
        catalog: Catalog,
        payloads: PayloadStore,
        regions: RegionHolder | None = None,
        tracing: Tracing | None = None,
        keeps_references: bool = False,
        cache: ResponseCache | None = None,
        fetcher: PayloadFetcher | None = None,
    ) -> None:
        self.tracing = tracing or Tracing()
        self._cache = cache
        self._bus = bus
        self._id = caller_id
        self._catalog = catalog
        self._payloads = payloads
        self._regions = regions
        self._keys = count(1)
        self._in_flight = InFlight()
        self.counters = FrameCounters()
        self._outbox = Outbox(bus, caller_id, payloads, self._in_flight, self.counters, self._fail)
        self.shut = ShutQueues()
        self._streams = LiveStreamWatch(bus, self._in_flight)
        self._answers = AnswerPayloads(self._outbox.give_back, keeps_references)
        self.release = self._answers.release
        self._keeps_references = keeps_references
        self._remote = RemoteAnswers(fetcher, self._complete_fetched, self._lost, self.release, self._answers.discard)
        self._delivery = Delivery(self.tracing, self._in_flight, self._give_up, self._answers.discard)
        self._ticker: asyncio.Task[None] | None = None
        self._away_since: float | None = None
        self.duplicate_answers = 0
        self._malformed_answers = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens for answers, and watches the broker in a task of `background`.

        Raises NatsError, OSError or TimeoutError where the broker goes away meanwhile; then it may be called again.
        """
        await self._streams.start()
        await self._bus.subscribe(subjects.reply(self._id), self._on_answers)
        await self._outbox.start()
        self._bus.on_reconnect(self._resend_all)
        self._ticker = background.create_task(self._watch_broker())

    async def on_lost_attempts(self, listener: Callable[[list[int], str], None]) -> None:
        """Calls `listener` with the keys of durable requests that were lost and are done again, and why.

        A message may come late, of requests that have ended, or not at all: it is for the record.
        """

        def take(message: Message) -> None:
            try:
                keys, reason = unpack_lost_attempts(message.data)
            except MalformedMessage as error:
                self._malformed_answers += 1
                _limited.warning(
                    "malformed lost attempts", "dropped a malformed message about lost attempts: %s", error
                )
                return
            listener(keys, reason)

        await self._bus.subscribe(lost_attempts(self._id), take)

    async def stop(self, timeout_s: float) -> None:
        """Waits for the answers that are still to come, then answers the rest with UNAVAILABLE."""
        deadline = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._ticker is not None:
            self._ticker.cancel()
        for pending in self._in_flight:
            if pending.is_queued:
                self._outbox.cancel(pending.queue, pending.key)
        self._fail(self._in_flight.keys(), overloaded("the server is stopping", reason=Reason.STOPPING))
        self._outbox.flush()

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._in_flight)

    @property
    def refused(self) -> dict[str, int]:
        """Requests refused because there was too much to do already, by who had too much."""
        return {"in_flight": self._in_flight.refused, "stream": self._outbox.refused, "wait": self.shut.turned_away}

    @property
    def malformed_messages(self) -> int:
        """Messages that were not what their subject carries."""
        return self._malformed_answers + (0 if self._cache is None else self._cache.malformed_messages)

    def submit(
        self, request: InferRequest, on_answer: OnAnswer, body_slot: Slot | None = None, is_traced: bool | None = None
    ) -> Pending:
        """Publishes the request; `on_answer` is called later, from the event loop, with its answer or answers.

        `body_slot` is the payload slot over which the request's tensors are views, if there is one; it is owned by the
        request from now on. `is_traced` is what `tracing` said of this request, where its door has asked. Raises
        WeirError for what is refused at the door: then nothing was sent or taken over.
        """
        model = self._catalog.resolve(request.model_name, request.model_version)
        self._in_flight.check_room()
        if self.shut.known and not self.caches(model):
            self.shut.check(time.monotonic(), model.queue, request)
        model.normalizer.normalize(request)
        trace = self.tracing.begin(request, model.name, is_traced)
        question = self._cache.ask(model, request) if model.caches and self._cache is not None else None
        if question is not None and question.answer is not None:
            if body_slot is not None:
                body_slot.free()
            return self._accept(model, request, b"", _NO_SLOTS, on_answer, request.deadline_ms, trace, question)
        payload_host = ""
        slots: list[Freeable] = []
        try:
            if request.regions:
                if self._regions is None:
                    raise invalid("shared memory regions can't be used here")
                slots.append(self._regions.hold(model.name, request.regions))
            if is_large(request):
                slots += self._payloads.place(model.name, request.inputs, body_slot)
                payload_host = host_of_payloads(request.inputs)
            body = pack_body(request)
        except Exception:
            free_all(slot for slot in slots if slot is not body_slot)  # which is still the caller's
            raise
        if len(body) > self._bus.max_payload_bytes - 4096:
            free_all(slots)
            raise invalid(
                f"the request of {len(body)} bytes is larger than the {self._bus.max_payload_bytes} bytes that can be "
                "sent to a worker"
            )
        if body_slot is not None and body_slot not in slots:
            body_slot.free()
        return self._accept(model, request, body, slots, on_answer, request.deadline_ms, trace, question, payload_host)

    def caches(self, model: ServedModel) -> bool:
        """Whether answers of the model may come from a cache, so that its requests can't be prepared."""
        return model.caches and self._cache is not None

    def submit_prepared(
        self, model: ServedModel, prepared: PreparedRequest, body: bytes, on_answer: OnAnswer, deadline_ms: int = 0
    ) -> Pending:
        """As `submit`, for a request that was checked before: `body` is packed, and small enough for a message.

        `deadline_ms` is its own, for what is prepared is shared.
        """
        self._in_flight.check_room()
        if self.shut.known:
            self.shut.check(time.monotonic(), model.queue, prepared.request)
        return self._accept(model, prepared.request, body, _NO_SLOTS, on_answer, deadline_ms)

    def _accept(
        self,
        model: ServedModel,
        request: InferRequest,
        body: bytes,
        slots: Sequence[Freeable],
        on_answer: OnAnswer,
        deadline_ms: int,
        trace: Trace | None = None,
        question: Question | None = None,
        payload_host: str = "",
    ) -> Pending:
        key = next(self._keys)
        part = Part(
            key,
            int(request.model_version) if request.model_version else -1,
            request.batch_size,
            request.shape_key,
            request.priority,
            request.timeout_us,
            deadline_ms,
            request.correlation_id,
            request.sequence_flags,
            request.traceparent,
            body,
            request.lane,
            payload_host,
        )
        pending = Pending(key, model, request, part, on_answer, slots, trace)
        if type(model.queue) is AnyQueue and request.correlation_id:
            pending.queue = queue_of_sequence(model.queue, request.correlation_id)
        if model.preserves_ordering:
            self._delivery.line_up(pending)
        self._in_flight.add(pending)
        if question is None:
            self._outbox.add(pending.queue, part)
        else:
            self._ask_cache(pending, question)
        return pending

    def _ask_cache(self, pending: Pending, question: Question) -> None:
        pending.question = question
        pending.is_queued = False
        if question.answer is not None:
            asyncio.get_running_loop().call_soon(self._on_cache, pending)
        elif self._cache is not None and self._cache.answers_later:
            self._cache.find(question, partial(self._on_cache, pending))
        else:
            self._queue(pending)

    @contained(on_error="_cache_failed")
    def _on_cache(self, pending: Pending) -> None:
        """The cache has said whether it has the answer."""
        if self._in_flight.find(pending.key) is None or self._cache is None or pending.question is None:
            return  # it was given up
        response = self._cache.take(pending.question, pending.request.id)
        if response is None:
            self._queue(pending)
            return
        self._in_flight.take(pending.key)
        pending.free_slots()
        self.counters.changed(len(self._in_flight))
        self._delivery.deliver(pending, response, True)

    def _cache_failed(self, _error: Exception, pending: Pending) -> None:
        self._end(pending, internal(UNEXPECTED))

    def _queue(self, pending: Pending) -> None:
        pending.is_queued = True
        self._outbox.add(pending.queue, pending.part)

    def abandon(self, pending: Pending) -> None:
        """The caller has gone: nothing is answered any more, and the request leaves the queue if it is still there."""
        pending.has_ended = True
        is_open = self._give_up(pending)
        was_in_line = pending.line is not None and self._delivery.leave(pending)
        if pending.trace is not None and (is_open or was_in_line):
            self.tracing.abandon(pending.trace)
            pending.trace = None

    def _give_up(self, pending: Pending) -> bool:
        """Nothing more is wanted of a request; False when it had its last answer before."""
        if self._in_flight.take(pending.key) is None:
            return False
        pending.free_slots()
        if pending.is_queued:
            self._outbox.cancel(pending.queue, pending.key)
        return True

    def _on_answers(self, message: Message) -> None:
        try:
            version, answers = unpack_answers(message.data, self._on_malformed_answer)
        except MalformedMessage as error:
            self._on_malformed_answer(None, error)
            return
        for answer in answers:
            pending = self._in_flight.find(answer.key)
            if pending is None:
                self.duplicate_answers += answer.is_final
                self._answers.discard(answer)
            else:
                self._take_response(pending, version, answer)
        self.counters.changed(len(self._in_flight))

    def _on_malformed_answer(self, key: int | None, error: MalformedMessage) -> None:
        """One response of a message can't be decoded: its request, if that is known, ends with an error."""
        self._malformed_answers += 1
        _limited.warning("malformed response", "dropped a malformed response: %s", error)
        pending = None if key is None else self._in_flight.find(key)
        if pending is not None:
            self._end(pending, internal(_UNDECODABLE), is_running=True)

    @contained(on_error="_response_failed")
    def _take_response(self, pending: Pending, version: int, answer: Answer) -> None:
        if answer.run and not self._is_next(pending, answer):
            return
        passes_on = self._keeps_references and not pending.reads_content
        if not self._remote.holds(pending, version, answer, passes_on):
            self._complete(pending, version, answer)

    @contained(on_error="_response_failed")
    def _complete_fetched(self, pending: Pending, version: int, answer: Answer) -> None:
        """The outputs of a response that lay on another host have been fetched."""
        self._complete(pending, version, answer)

    def _response_failed(self, _error: Exception, pending: Pending, *response: int | Answer) -> None:
        answer = response[-1]
        assert isinstance(answer, Answer)  # noqa: S101 - each of the functions that may fail has it last
        self._end(pending, internal(UNEXPECTED), is_running=not answer.is_final)

    @contained()
    def _end(self, pending: Pending, error: WeirError, is_running: bool = False) -> None:
        """Ends a request with `error`, unless it has ended; if it may be running yet, its worker is told to stop."""
        if self._in_flight.take(pending.key) is None and pending.has_ended:
            return
        pending.free_slots()
        if is_running and pending.is_queued:
            self._outbox.cancel(pending.queue, pending.key)
        self._delivery.deliver(pending, error, True)

    def _complete(self, pending: Pending, version: int, answer: Answer) -> None:
        """An answer is here, with all that belongs to it."""
        if self._in_flight.find(pending.key) is not pending:
            self._answers.discard(answer)  # it was given up while its outputs were brought here
            return
        if answer.error is not None and answer.error.shut_us:
            self.shut.learn(time.monotonic(), pending.queue, pending.request, answer.error)
        if answer.error is not None and is_given_up(answer.error) and not self._keeps_references:
            # The request is still wanted: its worker could not read what lies here.
            self._lost(pending, answer)
            return
        if answer.is_final:
            self._in_flight.take(pending.key)
        outcome = self._answers.outcome(pending, version, answer)
        if pending.question is not None and isinstance(outcome, InferResponse) and self._cache is not None:
            self._cache.keep(pending.question, version, outcome, self._answers.copy_of)
        if pending.slots and answer.is_final:
            pending.free_slots()
        self._delivery.deliver(pending, outcome, answer.is_final, answer.moments)

    @contained(on_error="_response_failed")
    def _lost(self, pending: Pending, answer: Answer) -> None:
        """The answer, or what the request had in it, was lost between two hosts: it runs again where it may."""
        if self._in_flight.find(pending.key) is not pending:
            return
        may_run_again = not (answer.run or pending.part.correlation_id or pending.part.sequence_flags)
        if may_run_again and pending.reruns < MAX_RERUNS:
            pending.reruns += 1
            # Its scheduler is to have heard of the end of its last run before it comes again.
            asyncio.get_running_loop().call_later(_RERUN_WAIT_S, self._outbox.resend, [pending.key])
            return
        self._end(pending, unavailable(_LOST_PAYLOAD), is_running=not answer.is_final)

    def _is_next(self, pending: Pending, answer: Answer) -> bool:
        """Whether a stream goes on with this answer; one that can't any more is ended."""
        if pending.stream is None:
            pending.stream = StreamOrder(answer.run)
        place = pending.stream.place(answer)
        if place is Place.NEXT:
            return True
        self._answers.discard(answer)
        if place is Place.BROKEN:
            self._end(pending, unavailable(_LOST_STREAM), is_running=not answer.is_final)
        return False

    def _fail(self, keys: Iterable[int], error: WeirError) -> None:
        for key in keys:
            pending = self._in_flight.find(key)
            if pending is not None:
                self._end(pending, error)

    async def _resend_all(self) -> None:
        """The broker came back, perhaps without its memory."""
        await self._streams.ensure()
        self._outbox.resend_all()

    async def _watch_broker(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self._look_at_broker(time.monotonic())

    @contained()
    async def _look_at_broker(self, now: float) -> None:
        if self._bus.is_connected:
            self._away_since = None
            self._outbox.check()
            self._outbox.tell_turned_away(self.shut.take_untold())
            await self._streams.look()
        elif self._away_since is None:
            self._away_since = now
        elif now - self._away_since > BROKER_PATIENCE_S:
            self._fail(
                self._in_flight.keys(), overloaded("the message broker is not available", reason=Reason.BROKER_AWAY)
            )
