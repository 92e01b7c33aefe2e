"""`Runner`: durable requests from their turn to their answer: read, submitted as any other request, or begun again.

So many are under way that the workers are never idle, and so few that a queue in the scheduler is never filled by them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from calls.catalog import ServedModel
from calls.prepared import PreparedRequest, PreparedRequests
from gateway.durable.bodies import (
    HEADER_LENGTH,
    BodyFormat,
    encode_response,
    format_of,
    long_outputs,
    parse_body,
    parse_outline,
)
from gateway.durable.durable_request import DurableRequest, Stage
from gateway.durable.intake_parts import IntakeParts
from gateway.durable.request_terms import check_id
from gateway.durable.run_window import RunWindow
from runtime.containment import contained
from schemas.errors import Reason, WeirError, internal
from schemas.kserve_response import LongOutputs
from schemas.lanes import Lane
from schemas.offloaded import WRITE_OUTPUTS, OutputWish, write_job, written_outputs
from schemas.requests import InferResponse
from schemas.tensors import Tensor
from schemas.terminal import Outcome

logger = logging.getLogger("weir.gateway")

_NEAR_MS = 60_000  # nothing is expected to wait longer in the scheduler: deadlines cost something there


class Runner:
    """See the module. One of a lane of a model.

    `on_room` is called when one more may be begun, `on_named(request)` when a request's id is known from its body; it
    returns False where the request is not to be run. `on_again` is called with a request that is due again.
    """

    def __init__(
        self,
        parts: IntakeParts,
        lane: Lane,
        on_room: Callable[[], None],
        on_named: Callable[[DurableRequest], bool],
        on_again: Callable[[DurableRequest], None],
    ) -> None:
        self._parts = parts
        self._lane = lane
        self._on_room = on_room
        self._on_named = on_named
        self._on_again = on_again
        self._running: dict[int, DurableRequest] = {}  # by the key of what was submitted
        self._window = RunWindow()
        self._served: ServedModel | None = None
        self._prepared = PreparedRequests()
        self.is_stopping = False

    def __len__(self) -> int:
        """Requests that are submitted and have no answer."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether one more may be begun."""
        return len(self._running) < self._window.size

    def tick(self, now_s: float, model: str) -> None:
        """Reckons anew how many may be begun."""
        self._window.tick(now_s, self._places(model))

    def _places(self, model: str) -> int | None:
        """How many requests the model's instances run at once; None where others run them, or they take any number."""
        catalog = self._parts.catalog
        served = catalog.served_model(model)
        if served is None or served.config.is_decoupled or served.config.is_ensemble:
            return None
        told = catalog.told_of(served.name, int(served.latest))
        return sum(row.instances for _, row in told) * max(1, served.config.max_batch_size)

    def find(self, key: int) -> DurableRequest | None:
        """The request that was submitted under this key."""
        return self._running.get(key)

    def read(self, request: DurableRequest, served: ServedModel) -> bool:
        """Reads the body; False where that ended the request: what can't be read is dead-lettered."""
        if request.request is not None:
            return True
        try:
            content = request.terms.content_headers
            request.format = format_of(content)
            limits, find_region = self._parts.limits, self._parts.find_region
            if request.outline is not None:
                asked, request.format = parse_outline(
                    request.model, request.version, request.outline, limits, find_region
                )
            else:
                asked, request.format = parse_body(
                    request.model, request.version, request.body, content, served.config, limits, find_region
                )
            if not request.is_named:
                check_id(asked.id)
            request.terms.said.apply(asked)
        except WeirError as error:
            self.refuse(request, error)
            return False
        asked.lane = self._lane
        request.request = asked
        request.trials.names_timeout = asked.timeout_us > 0
        if not request.trials.deadline_ms:
            request.trials.deadline_ms = asked.deadline_ms
        return request.is_named or self._name(request, asked.id)

    def refuse(self, request: DurableRequest, error: WeirError) -> None:
        """The message is no request: it is dead-lettered."""
        self._parts.counters.malformed += 1
        self._parts.recorder.bury(request, error)

    def begin(self, request: DurableRequest, served: ServedModel) -> None:
        """Submits a request whose turn it is."""
        request.served = served
        try:
            prepared = self._find_prepared(request, served)
            if prepared is not None:
                if request.is_named or self._name(request, ""):
                    self._submit_prepared(request, served, prepared)
            elif self.read(request, served):
                self._submit(request, served)
        except WeirError as error:
            self.failed(request, error)
            return
        if request.pending is not None:
            request.stage = Stage.RUNNING
            self._running[request.pending.key] = request

    def _submit(self, request: DurableRequest, served: ServedModel) -> None:
        asked = request.request
        assert asked is not None  # noqa: S101 - it was read
        inference = self._parts.inference
        asked.deadline_ms = self._deadline_ms(request)
        request.pending = inference.submit(asked, partial(self._on_answer, request))
        length = self._preparable_length(request)
        if length and not inference.caches(served):
            self._prepared.keep(asked, request.body, length)

    def _find_prepared(self, request: DurableRequest, served: ServedModel) -> PreparedRequest | None:
        """What follows from the JSON header, if one like it came before: then this one need not be looked at."""
        if served is not self._served:
            self._served, self._prepared = served, PreparedRequests()
        length = self._preparable_length(request)
        if not length or request.request is not None or self._parts.inference.tracing.is_on:
            return None
        return self._prepared.find(request.version, request.body, length)

    def _submit_prepared(self, request: DurableRequest, served: ServedModel, prepared: PreparedRequest) -> None:
        asked = prepared.request
        request.format = BodyFormat.BINARY
        request.request = asked
        request.trials.names_timeout = asked.timeout_us > 0
        body = prepared.pack(request.body)
        request.pending = self._parts.inference.submit_prepared(
            served, prepared, body, partial(self._on_answer, request), self._deadline_ms(request)
        )

    def _deadline_ms(self, request: DurableRequest) -> int:
        """After when the scheduler need not begin it: its own deadline, or the end of its age where that is near."""
        ends_ms = request.trials.ends_ms
        is_near = ends_ms < time.time_ns() // 1_000_000 + _NEAR_MS
        return ends_ms if is_near else request.trials.deadline_ms

    def _name(self, request: DurableRequest, kserve_id: str) -> bool:
        request.name(kserve_id)
        return self._on_named(request)

    def _preparable_length(self, request: DurableRequest) -> int:
        terms = request.terms
        text = terms.content_headers.get(HEADER_LENGTH, "")
        said = terms.said
        if not text.isdigit() or not text.isascii() or request.has_object or len(text) > 9:
            return 0
        if said.priority is not None or said.correlation_id is not None or said.traceparent:
            return 0
        if said.sequence_start is not None or said.sequence_end is not None:
            return 0
        return int(text)

    @contained(on_error="_answer_broken")
    def _on_answer(self, request: DurableRequest, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if is_final:
            self._let_go(request)
        if request.stage is not Stage.RUNNING:
            return
        if request.outputs_later is not None:
            request.outputs_later.append((outcome, is_final))
            return
        self._try_to_take(request, outcome, is_final)

    def _try_to_take(self, request: DurableRequest, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if isinstance(outcome, WeirError):
            self.failed(request, outcome)
            return
        try:
            self._take(request, outcome, is_final)
        except LongOutputs:
            assert outcome is not None  # noqa: S101 - only a response has outputs
            self._write(request, outcome, is_final)
        except WeirError as error:
            self.give_up(request)
            self.failed(request, error)

    def _write(self, request: DurableRequest, response: InferResponse, is_final: bool) -> None:
        """Has a helper process write outputs that take long; responses that come meanwhile wait."""
        assert request.request is not None  # noqa: S101 - it was submitted
        assert request.served is not None  # noqa: S101
        wishes = long_outputs(request.request, response, request.served, request.format)
        try:
            writing = self._parts.offload.start(WRITE_OUTPUTS, write_job(wishes))
        except WeirError as error:
            self.give_up(request)
            self.failed(request, error)
            return
        request.outputs_later = deque()
        writing.add_done_callback(partial(self._on_written, request, response, is_final, wishes))

    @contained(on_error="_answer_broken")
    def _on_written(
        self,
        request: DurableRequest,
        response: InferResponse,
        is_final: bool,
        wishes: list[OutputWish],
        writing: asyncio.Future[list[memoryview]],
    ) -> None:
        later, request.outputs_later = request.outputs_later or deque(), None
        if writing.cancelled() or request.stage is not Stage.RUNNING:
            return
        try:
            self._take(request, response, is_final, written_outputs(wishes, writing.result()))
        except WeirError as error:
            self.give_up(request)
            self.failed(request, error)
        while later and request.stage is Stage.RUNNING:
            self._try_to_take(request, *later.popleft())
            if request.outputs_later is not None:
                request.outputs_later.extend(later)
                return

    def _answer_broken(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        """Ends a request whose response could not be handled because of an unexpected exception."""
        self.give_up(request)
        if request.stage not in (Stage.ENDING, Stage.ENDED):
            self._parts.recorder.fail(request, Outcome.FAILED, internal("the response could not be recorded"))

    def _take(
        self,
        request: DurableRequest,
        response: InferResponse | None,
        is_final: bool,
        written: Mapping[str, Tensor] | None = None,
    ) -> None:
        asked, served = request.request, request.served
        assert asked is not None  # noqa: S101 - it was submitted
        assert served is not None  # noqa: S101
        encoded = None
        if response is not None:
            encoded = encode_response(asked, response, served, request.format, written)
            request.answered_by = response.model_version
            self._send_unsent(request)
        if not is_final:
            request.unsent = encoded  # it may be the last: then it is the terminal record's
            return
        if encoded is None:
            encoded = request.unsent
            if encoded is None and not served.config.is_decoupled:
                raise internal("expected a single response, got 0")
        self._parts.policy.after(0, None, request.trials)
        headers, body = encoded or ([], b"")
        self._parts.recorder.succeed(request, headers, body, request.answered_by)

    def _send_unsent(self, request: DurableRequest) -> None:
        """The latest response is not the last: another one, or an error, has come after it."""
        if request.unsent is not None:
            self._parts.recorder.respond(request, request.responses, *request.unsent)
            request.responses += 1
            request.unsent = None

    def failed(self, request: DurableRequest, error: WeirError) -> None:
        """An attempt ended with an error: the request is begun again later, or ends."""
        if self.is_stopping and error.reason is Reason.STOPPING:
            return  # whoever comes after us does it
        now_ms = time.time_ns() // 1_000_000
        decision = self._parts.policy.after(now_ms, error, request.trials)
        if decision.outcome is None:
            request.stage = Stage.BACKING_OFF
            request.pending = None
            request.request = None  # what was prepared has lost its content
            self.let_go_of_object(request)  # it may wait for days; it is read again at the next attempt
            request.responses, request.unsent = 0, None
            self._parts.counters.retry(request.model)
            asyncio.get_running_loop().call_later(max(0, decision.at_ms - now_ms) / 1000, self._again, request)
        else:
            self._send_unsent(request)
            self.end(request, decision.outcome, WeirError(error.code, decision.reason or error.message))

    def end(self, request: DurableRequest, outcome: Outcome, error: WeirError) -> None:
        """The request ends with an error, and is begun no more."""
        if outcome is Outcome.DEAD_LETTERED:
            self._parts.recorder.bury(request, error)
        else:
            self._parts.recorder.fail(request, outcome, error)

    def abandon(self, request: DurableRequest) -> None:
        """Nothing is to come of a request any more, here: it was cancelled, or is another's."""
        self.give_up(request)
        request.stage = Stage.ENDED

    def _again(self, request: DurableRequest) -> None:
        if request.stage is Stage.BACKING_OFF:
            request.stage = Stage.WAITING
            self._on_again(request)

    def let_go_of_object(self, request: DurableRequest) -> None:
        """Releases the memory of a body that came from an object; the digest of it stays."""
        if request.has_object:
            request.body_digest()
            self._parts.objects.release(request.body)
            request.body, request.has_object, request.outline = b"", False, None

    def give_up(self, request: DurableRequest) -> None:
        """Its answer is of no use any more, if one is to come."""
        if request.pending is not None:
            self._parts.inference.abandon(request.pending)
            self._let_go(request)

    def _let_go(self, request: DurableRequest) -> None:
        if request.pending is not None:
            self._window.answered()
            self._running.pop(request.pending.key, None)
            request.pending = None
            self._on_room()
