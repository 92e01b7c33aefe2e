"""`RequestRunner`: runs durable requests whose turn it is: parses them, submits them like any request, retries them.

`ConcurrencyLimiter`: how many durable requests of one lane of a model may run.

Submitted requests run in the order of submission: a later one waits for all of them, and they are not taken back. So
there are only as many as keep the workers busy: what their instances hold, a running and a staged batch, and the
responses of a tenth of a second, which may be in transit. Sans-IO.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from weir.bus.nats.headers import parse_headers
from weir.calls.catalog import ServedModel
from weir.calls.message_bodies import (
    BodyFormat,
    encode_response,
    format_of,
    long_output_specs,
    parse_body,
    parse_offloaded_body,
)
from weir.calls.request_templates import MAX_HEADERS, RequestTemplate, RequestTemplates
from weir.calls.responses.templates import ResponseTemplates
from weir.durable.consumer.context import ConsumerContext
from weir.durable.requests.headers import check_id
from weir.durable.requests.request import DurableRequest, Stage
from weir.runtime.containment import contained
from weir.runtime.offload import ReadingFailed
from weir.schemas.core.errors import ErrorCode, Reason, WeirError, internal
from weir.schemas.core.request_limits import error_with_id
from weir.schemas.core.requests import InferResponse, Lane
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.offloaded import WRITE_OUTPUTS, OutputWish, write_job, written_outputs
from weir.schemas.kserve.response import LongOutputs
from weir.schemas.wire.terminal import Outcome

logger = logging.getLogger("weir.gateway")


_NEAR_MS = 60_000  # no request is expected to wait longer in the scheduler, where a deadline costs time


class RequestRunner:
    """Runs the requests of one lane of a model.

    It calls `on_room` when one more may start, `register_id(request)` when a request's body has given its id, and
    `on_retry` with a request that is due again. `register_id` returns False where the request must not run.
    """

    def __init__(
        self,
        context: ConsumerContext,
        lane: Lane,
        on_room: Callable[[], None],
        register_id: Callable[[DurableRequest], bool],
        on_retry: Callable[[DurableRequest], None],
    ) -> None:
        self._context = context
        self._lane = lane
        self._on_room = on_room
        self._register_id = register_id
        self._on_retry = on_retry
        self._running: dict[int, DurableRequest] = {}  # by the key under which they were submitted
        self._window = ConcurrencyLimiter()
        self._served: ServedModel | None = None
        self._templates = RequestTemplates()
        self._response_templates: dict[RequestTemplate, ResponseTemplates] = {}
        self.is_stopping = False

    def __len__(self) -> int:
        """Requests that are submitted and have no response yet."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether one more request may start."""
        return len(self._running) < self._window.size

    def tick(self, now_s: float, model: str) -> None:
        """Updates how many requests may run. Called periodically."""
        self._window.tick(now_s, self._places(model))

    def _places(self, model: str) -> int | None:
        """How many requests the model's instances run at once; None for ensembles and decoupled models."""
        catalog = self._context.catalog
        served = catalog.served_model(model)
        if served is None or served.config.is_decoupled or served.config.is_ensemble:
            return None
        replicas = catalog.ready_replicas(served.name, int(served.latest))
        return sum(row.instances for _, row in replicas) * max(1, served.config.max_batch_size)

    def find(self, key: int) -> DurableRequest | None:
        """The request that was submitted under this key."""
        return self._running.get(key)

    def read(self, request: DurableRequest, served: ServedModel) -> bool:
        """Parses the body; False where that ended the request: one that can't be parsed is dead-lettered."""
        if request.request is not None:
            return True
        try:
            content = request.headers.content_headers
            request.format = format_of(content)
            limits, find_region = self._context.limits, self._context.find_region
            if request.outline is not None:
                asked, request.format = parse_offloaded_body(
                    request.model, request.version, request.outline, limits, find_region
                )
            else:
                asked, request.format = parse_body(
                    request.model, request.version, request.body, content, served.config, limits, find_region
                )
            if not request.is_named:
                check_id(asked.id)
            request.headers.common.apply(asked)
        except WeirError as error:
            if error.code is ErrorCode.INTERNAL and not isinstance(error, ReadingFailed):
                # Triton's code for a body that it can't parse. The producer made it, so here it is the producer's error.
                error = WeirError(ErrorCode.INVALID_ARG, error.message)
            self.reject(request, error)
            return False
        asked.lane = self._lane
        request.request = asked
        request.attempt_history.has_timeout = asked.timeout_us > 0
        if not request.attempt_history.deadline_ms:
            request.attempt_history.deadline_ms = asked.deadline_ms
        return request.is_named or self._name(request, asked.id)

    def reject(self, request: DurableRequest, error: WeirError) -> None:
        """Dead-letters a message that is not a valid request."""
        self._context.counters.malformed += 1
        self._context.recorder.dead_letter(request, error_with_id(error, request.id))

    def begin(self, request: DurableRequest, served: ServedModel, now_ms: int) -> None:
        """Submits a request whose turn has come."""
        request.served = served
        try:
            template = self._find_template(request, served)
            if template is not None:
                if request.is_named or self._name(request, ""):
                    self._submit_template(request, served, template, now_ms)
            elif self.read(request, served):
                self._submit(request, served, now_ms)
        except WeirError as error:
            self.failed(request, error)
            return
        if request.pending is not None:
            request.stage = Stage.RUNNING
            self._running[request.pending.key] = request

    def _submit(self, request: DurableRequest, served: ServedModel, now_ms: int) -> None:
        asked = request.request
        assert asked is not None  # noqa: S101 - it was read
        inference = self._context.inference
        asked.deadline_ms = _deadline_ms(request, now_ms)
        on_response = partial(self._on_response, request)
        request.pending = inference.submit(asked, on_response, traffic_key=_traffic_key(request, served))
        length = request.headers.template_length
        if length and not inference.caches(served):
            self._templates.keep(asked, request.body, length)

    def _find_template(self, request: DurableRequest, served: ServedModel) -> RequestTemplate | None:
        """The template of an earlier request with the same JSON header, if there was one."""
        if served is not self._served:
            self._served, self._templates = served, RequestTemplates()
            self._response_templates.clear()
        length = request.headers.template_length
        if not length or request.request is not None or self._context.inference.tracing.is_on:
            return None
        return self._templates.find(request.version, request.body, length)

    def _submit_template(
        self, request: DurableRequest, served: ServedModel, template: RequestTemplate, now_ms: int
    ) -> None:
        asked = template.request
        request.format = BodyFormat.BINARY
        request.request = asked
        request.response_templates = self._response_templates_of(template)
        request.attempt_history.has_timeout = asked.timeout_us > 0
        body = template.pack(request.body)
        request.pending = self._context.inference.submit_template(
            served,
            template,
            body,
            partial(self._on_response, request),
            _deadline_ms(request, now_ms),
            traffic_key=_traffic_key(request, served),
        )

    def _response_templates_of(self, template: RequestTemplate) -> ResponseTemplates:
        found = self._response_templates.get(template)
        if found is None:
            if len(self._response_templates) >= MAX_HEADERS:
                self._response_templates.clear()  # some of them belong to templates that were replaced
            found = self._response_templates[template] = ResponseTemplates(template.request)
        return found

    def _name(self, request: DurableRequest, kserve_id: str) -> bool:
        request.name(kserve_id)
        return self._register_id(request)

    @contained(on_error="_fail_unexpected")
    def _on_response(self, request: DurableRequest, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if is_final:
            self._release(request)
        if request.stage is not Stage.RUNNING:
            return
        if request.queued_responses is not None:
            request.queued_responses.append((outcome, is_final))
            return
        self._handle_response(request, outcome, is_final)

    def _handle_response(
        self, request: DurableRequest, outcome: InferResponse | WeirError | None, is_final: bool
    ) -> None:
        if isinstance(outcome, WeirError):
            self.failed(request, outcome)
            return
        try:
            self._record_response(request, outcome, is_final)
        except LongOutputs:
            assert outcome is not None  # noqa: S101 - only a response has outputs
            self._offload_outputs(request, outcome, is_final)
        except WeirError as error:
            self.cancel(request)
            self.failed(request, error)

    def _offload_outputs(self, request: DurableRequest, response: InferResponse, is_final: bool) -> None:
        """Lets a helper process encode large outputs; later responses of the request wait meanwhile."""
        assert request.request is not None  # noqa: S101 - it was submitted
        assert request.served is not None  # noqa: S101
        wishes = long_output_specs(request.request, response, request.served, request.format)
        try:
            writing = self._context.offload.start(WRITE_OUTPUTS, write_job(wishes))
        except WeirError as error:
            self.cancel(request)
            self.failed(request, error)
            return
        request.queued_responses = deque()
        writing.add_done_callback(partial(self._on_outputs_encoded, request, response, is_final, wishes))

    @contained(on_error="_fail_unexpected")
    def _on_outputs_encoded(
        self,
        request: DurableRequest,
        response: InferResponse,
        is_final: bool,
        wishes: list[OutputWish],
        writing: asyncio.Future[list[memoryview]],
    ) -> None:
        later, request.queued_responses = request.queued_responses or deque(), None
        if writing.cancelled() or request.stage is not Stage.RUNNING:
            return
        try:
            self._record_response(request, response, is_final, written_outputs(wishes, writing.result()))
        except WeirError as error:
            self.cancel(request)
            self.failed(request, error)
        while later and request.stage is Stage.RUNNING:
            self._handle_response(request, *later.popleft())
            if request.queued_responses is not None:
                request.queued_responses.extend(later)
                return

    def _fail_unexpected(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        """Fails a request whose response raised an unexpected exception."""
        self.cancel(request)
        if request.stage not in (Stage.ENDING, Stage.ENDED):
            self._context.recorder.fail(request, Outcome.FAILED, internal("the response could not be recorded"))

    def _record_response(
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
            if request.response_templates is not None:
                encoded = request.response_templates.encode(response, served)
            else:
                encoded = encode_response(asked, response, served, request.format, written)
            request.response_version = response.model_version
            self._send_held(request)
        if not is_final:
            request.held_response = encoded  # it may be the last one, which the terminal record holds
            return
        if encoded is None:
            encoded = request.held_response
            if encoded is None and not served.config.is_decoupled:
                raise internal("expected a single response, got 0")
        self._context.policy.after(0, None, request.attempt_history)
        headers, body = encoded or ([], b"")
        self._context.recorder.succeed(request, headers, body, request.response_version)

    def _send_held(self, request: DurableRequest) -> None:
        """Sends the held response, which is not the last: another one, or an error, has come after it."""
        if request.held_response is not None:
            self._context.recorder.respond(request, request.responses, *request.held_response)
            request.responses += 1
            request.held_response = None

    def failed(self, request: DurableRequest, error: WeirError) -> None:
        """Handles an attempt that ended with an error: the request is retried later, or ends."""
        if self.is_stopping and error.reason is Reason.STOPPING:
            return  # the next owner runs it
        now_ms = time.time_ns() // 1_000_000
        decision = self._context.policy.after(now_ms, error, request.attempt_history)
        if decision.outcome is None:
            request.stage = Stage.BACKING_OFF
            request.pending = None
            request.request = request.response_templates = None  # its tensors have been released
            self.release_object(request)  # it may wait for days; the next attempt fetches it again
            request.responses, request.held_response = 0, None
            self._context.counters.retry(request.model)
            asyncio.get_running_loop().call_later(max(0, decision.at_ms - now_ms) / 1000, self._retry, request)
        else:
            self._send_held(request)
            self.end(request, decision.outcome, WeirError(error.code, decision.reason or error.message))

    def end(self, request: DurableRequest, outcome: Outcome, error: WeirError) -> None:
        """Ends a request with an error."""
        error = error_with_id(error, request.id)
        if outcome is Outcome.DEAD_LETTERED:
            self._context.recorder.dead_letter(request, error)
        else:
            self._context.recorder.fail(request, outcome, error)

    def discard(self, request: DurableRequest) -> None:
        """Drops a request without a record: another process owns it."""
        self.cancel(request)
        request.stage = Stage.ENDED

    def _retry(self, request: DurableRequest) -> None:
        if request.stage is Stage.BACKING_OFF:
            request.stage = Stage.WAITING
            self._on_retry(request)

    def release_object(self, request: DurableRequest) -> None:
        """Releases the memory of a body that came from an object, but keeps its digest."""
        if request.has_object:
            request.body_digest()
            self._context.objects.release(request.body)
            request.body, request.has_object, request.outline = b"", False, None

    def cancel(self, request: DurableRequest) -> None:
        """Cancels the running attempt of a request, if there is one."""
        if request.pending is not None:
            self._context.inference.cancel(request.pending)
            self._release(request)

    def _release(self, request: DurableRequest) -> None:
        if request.pending is not None:
            self._window.add_response()
            self._running.pop(request.pending.key, None)
            request.pending = None
            self._on_room()


def _deadline_ms(request: DurableRequest, now_ms: int) -> int:
    """The deadline for the scheduler: the request's own one, or the end of its age where that is near."""
    ends_ms = request.attempt_history.expires_ms
    return ends_ms if ends_ms < now_ms + _NEAR_MS else request.attempt_history.deadline_ms


def _traffic_key(request: DurableRequest, served: ServedModel) -> str:
    """The value of the header that keeps producers of the model on one version; "" without one."""
    if served.split is None or not served.split.rule.header:
        return ""
    return parse_headers(request.message.header_block).get(served.split.rule.header, "")


MAX_RUNNING_REQUESTS = 1024
"""The largest number of running durable requests of one lane of a model."""

_SPARE = 64
_IN_TRANSIT_S = 0.15
_DECAY = 0.5


class ConcurrencyLimiter:
    """Derives `size`, the number of requests that may run, from the model's instances and the rate of responses."""

    def __init__(self) -> None:
        self.size = _SPARE
        self._responses = 0
        self._rate = 0.0
        self._since_s: float | None = None

    def add_response(self) -> None:
        """Notes a response."""
        self._responses += 1

    def tick(self, now_s: float, places: int | None) -> None:
        """Updates `size`; called about ten times a second.

        `places` is how many requests the model's instances run at once, None if that is unknown.
        """
        if self._since_s is not None and now_s > self._since_s:
            self._rate = max(self._responses / (now_s - self._since_s), self._rate * _DECAY)
        self._since_s, self._responses = now_s, 0
        if places is None:
            self.size = MAX_RUNNING_REQUESTS
        else:
            self.size = min(MAX_RUNNING_REQUESTS, 2 * places + _SPARE + int(self._rate * _IN_TRANSIT_S))
