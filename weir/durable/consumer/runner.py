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
from collections.abc import Callable

from weir.bus.nats.headers import parse_headers
from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import Call, Ready
from weir.calls.inference.documents import BodyFormat, Encoded, JsonCodec, codec_of, format_of, message_of
from weir.calls.request_templates import RequestTemplate, RequestTemplates
from weir.durable.consumer.context import ConsumerContext
from weir.durable.requests.headers import check_id
from weir.durable.requests.request import DurableRequest, Stage
from weir.runtime.offload import ReadingFailed
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, Reason, WeirError, internal
from weir.schemas.core.request_limits import error_with_id
from weir.schemas.core.requests import InferRequest, Lane
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
        self.context = context
        self._lane = lane
        self._on_room = on_room
        self._register_id = register_id
        self._on_retry = on_retry
        self._running: dict[int, DurableRequest] = {}  # by the key under which they were submitted
        self._window = ConcurrencyLimiter()
        self._served: ServedModel | None = None
        self._templates = RequestTemplates()
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
        catalog = self.context.catalog
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
            asked = read_body(request, served, self.context)
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
        self.context.counters.malformed += 1
        self.context.recorder.dead_letter(request, error_with_id(error, request.id))

    def begin(self, request: DurableRequest, served: ServedModel, now_ms: int) -> None:
        """Submits a request whose turn has come."""
        request.served = served
        template, packed = self._find_template(request, served), None
        if template is not None:
            if not request.is_named and not self._name(request, ""):
                return
            request.format = BodyFormat.BINARY
            request.request = template.request
            request.attempt_history.has_timeout = template.request.timeout_us > 0
            packed = template.pack(request.body)
        elif not self.read(request, served):
            return
        assert request.request is not None  # noqa: S101 - it was read
        if request.owner and request.request.correlation_id:
            request.request.owner = request.owner
        submitted, codec = (served, request.request, packed), codec_of(request.format)
        attempt = request.attempt = _Attempt(self, request, submitted, codec, now_ms)
        attempt.open()
        if attempt.pending is not None:
            request.stage = Stage.RUNNING
            self._running[attempt.pending.key] = request

    def keep_template(self, request: DurableRequest, asked: InferRequest, served: ServedModel) -> None:
        """Makes a template of a request that was submitted, if it can have one."""
        length = request.headers.template_length
        if length and not self.context.inference.caches(served):
            self._templates.keep(asked, request.body, length)

    def _find_template(self, request: DurableRequest, served: ServedModel) -> RequestTemplate | None:
        """The template of an earlier request with the same JSON header, if there was one."""
        if served is not self._served:
            self._served, self._templates = served, RequestTemplates()
        length = request.headers.template_length
        if not length or request.request is not None or self.context.inference.tracing.is_on:
            return None
        return self._templates.find(request.version, request.body, length)

    def _name(self, request: DurableRequest, kserve_id: str) -> bool:
        request.name(kserve_id)
        return self._register_id(request)

    def fail_unexpected(self, request: DurableRequest) -> None:
        """Ends a request after an unexpected exception."""
        is_running = request.stage is Stage.RUNNING
        self.cancel(request)
        if is_running:
            self.context.recorder.fail(request, Outcome.FAILED, internal("the response could not be recorded"))
        elif request.stage < Stage.BACKING_OFF:
            self.context.recorder.dead_letter(request, internal("the request could not be submitted"))

    def respond(self, request: DurableRequest, encoded: Encoded | None, is_final: bool) -> None:
        """Records a response, or holds it while it is unknown whether it is the last one."""
        message = None
        if encoded is not None:
            message = message_of(encoded, request.format)
            request.response_version = encoded[2]
            self._send_held(request)
        if not is_final:
            request.held_response = message  # it may be the last one, which the terminal record holds
            return
        self.context.policy.after(0, None, request.attempt_history)
        headers, body = message or request.held_response or ([], b"")
        self.context.recorder.succeed(request, headers, body, request.response_version)

    def _send_held(self, request: DurableRequest) -> None:
        """Sends the held response, which is not the last: another one, or an error, has come after it."""
        if request.held_response is not None:
            self.context.recorder.respond(request, request.responses, *request.held_response)
            request.responses += 1
            request.held_response = None

    def failed(self, request: DurableRequest, error: WeirError) -> None:
        """Handles an attempt that ended with an error: the request is retried later, or ends."""
        if self.is_stopping and error.reason is Reason.STOPPING:
            return  # the next owner runs it
        now_ms = time.time_ns() // 1_000_000
        decision = self.context.policy.after(now_ms, error, request.attempt_history)
        if decision.outcome is None:
            request.stage = Stage.BACKING_OFF
            request.attempt = request.request = None  # its tensors have been released
            self.release_object(request)  # it may wait for days; the next attempt fetches it again
            request.responses, request.held_response = 0, None
            self.context.counters.retry(request.model)
            asyncio.get_running_loop().call_later(max(0, decision.at_ms - now_ms) / 1000, self._retry, request)
        else:
            self._send_held(request)
            error = error_with_id(WeirError(error.code, decision.reason or error.message), request.id)
            if decision.outcome is Outcome.DEAD_LETTERED:
                self.context.recorder.dead_letter(request, error)
            else:
                self.context.recorder.fail(request, decision.outcome, error)

    def _retry(self, request: DurableRequest) -> None:
        if request.stage is Stage.BACKING_OFF:
            request.stage = Stage.READ
            self._on_retry(request)

    def release_object(self, request: DurableRequest) -> None:
        """Releases the memory of a body that came from an object, but keeps its digest."""
        if request.has_object:
            request.body_digest()
            self.context.objects.release(request.body)
            request.body, request.has_object, request.parts = b"", False, ()

    def cancel(self, request: DurableRequest) -> None:
        """Cancels the running attempt of a request, if there is one."""
        attempt, request.attempt = request.attempt, None
        if attempt is not None:
            attempt.cancel()

    def release(self, key: int) -> None:
        """A request that ran has its last response, or was cancelled: another one may run."""
        if self._running.pop(key, None) is not None:
            self._window.add_response()
            self._on_room()


class _Attempt(Call):
    """One attempt to run a durable request, which has been read (`ready`)."""

    __slots__ = ("_key", "_now_ms", "_ready", "_request", "_runner")

    def __init__(
        self, runner: RequestRunner, request: DurableRequest, ready: Ready, codec: JsonCodec, now_ms: int
    ) -> None:
        super().__init__(runner.context, codec)
        self._key = 0
        self._now_ms = now_ms
        self._ready = ready
        self._request = request
        self._runner = runner

    def begin(self) -> Ready:
        """Implements `Call.begin`."""
        return self._ready

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Implements `Call.submit`."""
        inference, durable, served = self.services.inference, self._request, self.served
        deadline_ms, key = _deadline_ms(durable, self._now_ms), _traffic_key(durable, served)
        if packed is not None:
            pending = inference.submit_packed(served, request, packed, self.on_response, deadline_ms, traffic_key=key)
        else:
            request.deadline_ms = deadline_ms
            pending = inference.submit(request, self.on_response, traffic_key=key, served=served)
            self._runner.keep_template(durable, request, served)
        self._key = pending.key
        return pending

    def send(self, encoded: Encoded | None, is_final: bool) -> None:
        """Implements `Call.send`."""
        if self._request.stage is Stage.RUNNING:
            self._runner.respond(self._request, encoded, is_final)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Implements `Call.fail`: an error ends the attempt."""
        if not is_final:
            self.cancel()
        if self._request.stage is Stage.RUNNING or not self.is_submitted:
            self._runner.failed(self._request, error)

    def release(self) -> None:
        """Implements `Call.release`."""
        self._runner.release(self._key)

    def _failed(self, _error: Exception, *_arguments: object) -> None:
        self._runner.fail_unexpected(self._request)


NO_MODEL = ServedModel("", ModelConfig(name=""), [1], {})
"""Stands for the model of a body of which only the id is wanted."""


def read_body(request: DurableRequest, served: ServedModel, context: ConsumerContext) -> InferRequest:
    """The request in the body, whose format is set. Raises WeirError."""
    request.format = format_of(request.headers.content_headers)
    if isinstance(request.parts, WeirError):
        raise request.parts
    return codec_of(request.format).read(request.document(served), request.parts, context)[1]


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
