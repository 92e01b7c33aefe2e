"""`InferExchange`: one request on the infer route and its response, without ASGI.

The body is received directly into the memory from which it will be read: a shared-memory slot if it is large, placed so
that the tensors behind the JSON header are aligned. A thread compresses large bodies, and a helper process
(`weir.runtime.offload`) reads and writes large JSON. Meanwhile later requests of the connection wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from weir.bus.payloads.arena import ALIGNMENT_BYTES, Slot
from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.calls.payload_store import SLOT_FROM_BYTES
from weir.calls.request_headers import DEADLINE_HEADER, read_deadline_ms
from weir.calls.request_templates import RequestTemplate
from weir.calls.tracing import NOT_TRACED, Sampling
from weir.gateway.access import add_parameters
from weir.gateway.admin.load_report import REQUEST_HEADER, RESPONSE_HEADER
from weir.gateway.context import GatewayContext
from weir.gateway.http.compression import (
    IN_PLACE_BYTES,
    BodyInflation,
    deflate,
    is_compressed,
    response_encoding,
)
from weir.gateway.inflation import inflate
from weir.http_server.asgi import raw_error_response
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_memory import no_memory
from weir.runtime.containment import contained
from weir.runtime.offload import takes_long
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.request_limits import raw_too_large, too_large
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.offloaded import (
    READ_JSON,
    WRITE_OUTPUTS,
    OutputWish,
    json_job,
    long_wishes,
    outline_document,
    write_job,
    written_outputs,
)
from weir.schemas.kserve.request import (
    is_header_length,
    parse_header_length,
    parse_infer_request,
    parse_raw_request,
    read_document,
)
from weir.schemas.kserve.response import LongOutputs, build_infer_response

_OK = b"HTTP/1.1 200 OK\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JOIN_LIMIT_BYTES = 64 * 1024

SLOT_AFTER_BYTES = 16 * 1024
SLOT_AFTER_SHARE = 8
"""A body gets a payload slot, which reserves memory for all of it, only after this many bytes have arrived, and an eighth
(one of `SLOT_AFTER_SHARE` parts) of its announced size. Until then it is kept in ordinary memory."""

_BODY = "http"
_DECOMPRESSED = "decompressed"
_UNSENT = "unsent"


class InferExchange:
    """One request for `model`, whose head `connection` has just parsed, and its response."""

    __slots__ = (
        "_announced",
        "_context",
        "_expects_continue",
        "_held_bytes",
        "_inflated_bytes",
        "_job",
        "_memory",
        "_model",
        "_on_complete",
        "_padding",
        "_pending",
        "_raw_headers",
        "_received",
        "_received_ns",
        "_request",
        "_slot",
        "_slot_after",
        "_slot_bytes",
        "_sticky",
        "_transport",
        "_version",
        "accept_encoding",
        "body",
        "deadline",
        "disconnected",
        "encoding",
        "header_length",
        "is_active",
        "keep_alive",
        "load_format",
        "more_body",
        "rejection",
        "response_complete",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        context: GatewayContext,
        connection: HttpConnection,
        model: str,
        version: str,
        keep_alive: bool,
    ) -> None:
        self._context = context
        self._announced = 0
        self._expects_continue = False
        self._held_bytes = 0
        self._inflated_bytes = 0
        self._memory = connection.memory
        self._job: asyncio.Future[Any] | None = None  # work in a thread or a helper process
        self._raw_headers = connection.raw_headers
        self._transport = connection.transport
        self._model = model
        self._version = version
        self._on_complete = connection.on_response_complete
        self._pending: PendingRequest | None = None
        self._slot: Slot | None = None
        self._slot_after = 0  # bytes of the body after which it gets a slot; 0: never
        self._slot_bytes = 0  # charged for the slot while the body arrives
        self._sticky: dict[bytes, bytes] = {}  # all headers, while some model's traffic depends on one
        self._padding = 0
        self._received = 0
        self.accept_encoding = b""
        self._received_ns = time.time_ns() if context.inference.tracing.is_on else 0
        self.is_active = False
        self.body: Any = b""
        self.deadline: bytes | None = None
        self.disconnected = False
        self.keep_alive = keep_alive
        self.more_body = True
        self.response_complete = False
        self.header_length: str | None = None
        self.load_format: bytes | None = None
        self.encoding = b""
        self.traceparent = ""
        self.tracestate = ""
        self.rejection: WeirError | None = None
        self._read_headers(connection.headers)

    def _read_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        fields = dict(headers)  # the last of each name counts
        length = int(fields.get(b"content-length", 0))  # the parser accepts digits only
        header_length = fields.get(b"inference-header-content-length")
        if header_length is not None:
            self.header_length = header_length.decode("latin-1")
        self.accept_encoding = fields.get(b"accept-encoding", b"")
        self.encoding = fields.get(b"content-encoding", b"").strip().lower()
        if b"traceparent" in fields:
            self.traceparent = fields[b"traceparent"].decode("latin-1")
        if b"tracestate" in fields:
            self.tracestate = b",".join(value for name, value in headers if name == b"tracestate").decode("latin-1")
        self.deadline = fields.get(DEADLINE_HEADER)
        self.load_format = fields.get(REQUEST_HEADER)
        if self._context.catalog.sticky_headers:
            self._sticky = fields
        self._expects_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        self._admit(length)

    def _admit(self, length: int) -> None:
        """Rejects the request by its head, or plans where its body, of the announced `length`, is received."""
        if length > self._context.limits.input_size:
            self._reject_size(length)
            return
        shut = self._context.inference.backpressure.active
        rejection = early_rejection(self._context, self._model, self._version) if shut else None
        if rejection is None and length > SLOT_FROM_BYTES:
            self._plan_slot(length)
            rejection = self._rejection_for_size(length)
        self._announced = length
        if rejection is not None:
            self._reject_early(rejection)

    def _plan_slot(self, length: int) -> None:
        header = self.header_length
        if self.encoding or header is None or not is_header_length(header) or int(header) > length:
            return  # compressed, or JSON only: its tensors are built from it
        self._padding = -int(header) % ALIGNMENT_BYTES
        self._slot_after = max(SLOT_AFTER_BYTES, length // SLOT_AFTER_SHARE)

    def _rejection_for_size(self, length: int) -> WeirError | None:
        """The error for a body of this announced size if memory has no room for it now. Charges nothing yet."""
        account = self._memory.account
        if account.fits(length) or (self._slot_after and self._memory.slots.fits(_slot_size(length + self._padding))):
            return None
        account.refuse(_BODY)
        return no_memory()

    def _take_slot(self) -> None:
        """Moves the body, of which enough has arrived, into a payload slot. Without a free slot it stays where it is."""
        self._slot_after = 0
        size = max(self._announced, self._received) + self._padding
        slot_bytes = _slot_size(size)
        if not self._memory.slots.charge(_BODY, slot_bytes):
            return
        self._slot = self._context.payloads.slot_for_body(size)
        if self._slot is None:
            self._memory.slots.release(_BODY, slot_bytes)
            return
        self._slot_bytes = slot_bytes
        self._slot.view[self._padding : self._padding + len(self.body)] = self.body
        self.body = b""
        self._memory.account.release(_BODY, self._held_bytes)
        self._held_bytes = 0

    def _charge_body(self) -> None:
        """Charges what has arrived in ordinary memory, or rejects the request."""
        if self._memory.account.charge(_BODY, self._received - self._held_bytes):
            self._held_bytes = self._received
            return
        self._release()
        self.rejection = no_memory()
        if self.is_active and self.keep_alive:  # else at the end of the body: see `start`
            self.respond_error(self.rejection)  # the connection stays open, and drops the rest of the body

    def _reject_early(self, error: WeirError) -> None:
        """Answers with this error before the body has arrived: the connection stays open, and drops the body."""
        if self._expects_continue:
            self.reject(error)  # the client may or may not send the body now: what follows can't be framed
        self.rejection = error

    def _reject_size(self, length: int) -> None:
        limit = self._context.limits.input_size
        if self.header_length == "0" and not self.encoding:
            self.reject(raw_too_large(length, limit))
            return
        kind = "request JSON size" if self.header_length is None and not self.encoding else "request size"
        self.reject(too_large(kind, length, limit))

    def reject(self, error: WeirError, lingers: bool = False) -> None:
        """Answers with this error, or with that of an earlier rejection, when it is the request's turn.

        The connection ends, because the body is not read.
        """
        self._release()
        self.body = b""
        self.keep_alive = self.more_body = False
        self.rejection = self.rejection or error
        if self.is_active:
            self.respond_error(self.rejection)

    def receive(self, data: bytes) -> None:
        """Takes the next piece of the body."""
        self._received += len(data)
        if self.rejection is not None:
            return  # it is answered at the end of the body
        if self._received > self._context.limits.input_size:
            self._reject_size(self._received)
            return
        if self._slot_after and self._received >= self._slot_after:
            self._take_slot()
        if self._slot is not None:
            end = self._padding + self._received
            self._slot.view[end - len(data) : end] = data
            return
        if not self.body:
            self.body = data
        else:
            if type(self.body) is bytes:
                self.body = bytearray(self.body)
            self.body += data
        # A small body that arrives at once is not charged: it is dropped, or counted as in flight, in this turn.
        if self._received != self._announced or self._received > SLOT_FROM_BYTES:
            self._charge_body()

    def body_space(self) -> memoryview | None:
        """The memory of the payload slot for the rest of the body, of which the size was announced; None without one."""
        if self._slot is None or not self.more_body or self._received >= self._announced:
            return None
        return self._slot.view[self._padding + self._received : self._padding + self._announced]

    def filled(self, size: int) -> None:
        """The first `size` bytes of `body_space` have arrived."""
        self._received += size

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""
        return self._received

    @contained(on_error="_fail")
    def start(self) -> None:
        """Starts the request: all earlier ones of its connection are answered. Its body may be complete or not."""
        self.is_active = True
        if self.rejection is not None:
            # Closing the connection while the client sends would destroy the response in transit.
            if self.keep_alive or not self.more_body:
                self.respond_error(self.rejection)
        elif not self.more_body:
            self._submit()
        elif self._expects_continue and not self._received:
            self._transport.write(_CONTINUE)

    def complete(self) -> None:
        """The body is complete."""
        self.more_body = False
        if self._slot_bytes:
            self._memory.slots.release(_BODY, self._slot_bytes)
            self._slot_bytes = 0
        if self.is_active and not self.response_complete:
            if self.rejection is not None:
                self.respond_error(self.rejection)
            else:
                self._submit()

    def disconnect(self) -> None:
        """Cancels the request: the client has disconnected."""
        self.disconnected = True
        if self._job is not None:
            self._job.cancel()
        self._release()
        if self._pending is not None:
            self._context.inference.cancel(self._pending)
            self._pending = None

    @contained(on_error="_fail")
    def _submit(self) -> None:
        try:
            served = self._context.catalog.resolve(self._model, self._version)
            prepared = None
            tracing = self._context.inference.tracing
            sampling = tracing.samples(served.name, self.traceparent) if tracing.is_on else NOT_TRACED
            length = 0 if sampling else self._template_header_length()
            if length:
                prepared = served.templates.find(self._version, self._content(), length)
            if prepared is not None and (self._slot is not None or not prepared.refers):
                self._submit_template(served, prepared)
                return
            if served.config.is_decoupled:
                raise WeirError(
                    ErrorCode.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy"
                )
            if self.encoding and is_compressed(self.encoding):
                self._decompress(served, sampling)
                return
            content, found_room = self._content(), self._slot is not None or self._received <= SLOT_FROM_BYTES
            request = self._parse_and_submit(served, sampling)
            if length and found_room and request is not None and not self._context.inference.caches(served):
                served.templates.keep(request, content, length)
        except WeirError as error:
            self.respond_error(error)

    def _submit_template(self, served: ServedModel, template: RequestTemplate) -> None:
        slot = self._slot if template.refers else None
        body = template.pack(self._content()) if slot is None else template.pack_in_slot(slot, self._padding)
        deadline_ms = 0 if self.deadline is None else read_deadline_ms(self.deadline)
        self._pending = self._context.inference.submit_template(
            served, template, body, self._on_response, deadline_ms, slot, self._traffic_key(served)
        )
        if slot is not None:
            self._slot = None  # the request's own now

    def _traffic_key(self, served: ServedModel) -> str:
        """The value of the header that keeps callers of the model on one version; "" without one."""
        if served.split is None or not self._sticky:
            return ""
        return self._sticky.get(served.split.rule.header.encode(), b"").decode("latin-1")

    def _content(self) -> bytes | bytearray | memoryview:
        """The whole body where it was received."""
        if self._slot is None:
            return self.body  # type: ignore[no-any-return]
        return self._slot.view[self._padding : self._padding + self._received]

    def _decompress(self, served: ServedModel, sampling: Sampling) -> None:
        inflation = BodyInflation(self.body, self._context.limits.input_size)
        self.body = b""
        is_complete = inflation.advance(IN_PLACE_BYTES)
        size = inflation.size_bytes
        if not self._charge_inflated(size):
            raise no_memory()

        def submit(_result: None) -> None:
            self.body = inflation.content
            self._parse_and_submit(served, sampling)

        if is_complete:
            submit(None)
        else:
            steps = inflate(inflation, self._charge_inflated, no_memory, size)
            self._after(asyncio.get_running_loop().create_task(steps), submit)

    def _charge_inflated(self, size: int) -> bool:
        """Charges `size` more decompressed bytes. Returns False if there is no room for them."""
        if not self._memory.account.charge(_DECOMPRESSED, size):
            return False
        self._inflated_bytes += size
        return True

    def _parse_and_submit(self, served: ServedModel, sampling: Sampling) -> InferRequest | None:
        """Parses and submits the request. Returns None if a helper process parses it: then it is submitted later."""
        limits = self._context.limits
        body = self._content()
        header_length = None if self.header_length is None else parse_header_length(self.header_length)
        if header_length == 0 or (header_length is None and not body):
            return self._submit_parsed(
                parse_raw_request(self._model, self._version, body, served.config, limits), sampling
            )
        json_bytes = len(body) if header_length is None else header_length
        view = memoryview(body)
        if json_bytes <= len(body) and takes_long(view[:json_bytes]):
            content = view[json_bytes:]
            job = json_job(self._model, self._version, view[:json_bytes], len(content), limits)
            self._after(self._context.offload.start(READ_JSON, job), partial(self._on_outline, sampling, content))
            return None
        return self._submit_parsed(
            parse_infer_request(self._model, self._version, body, header_length, limits, self._context.regions.find),
            sampling,
        )

    def _on_outline(self, sampling: Sampling, content: memoryview, parts: list[memoryview]) -> None:
        document = outline_document(parts)
        limits, find_region = self._context.limits, self._context.regions.find
        self._submit_parsed(read_document(self._model, self._version, document, content, limits, find_region), sampling)

    def _submit_parsed(self, request: InferRequest, sampling: Sampling) -> InferRequest:
        request.traceparent, request.tracestate = self.traceparent, self.tracestate
        if self.deadline is not None:
            request.deadline_ms = read_deadline_ms(self.deadline)
        if sampling:
            now_ns = time.time_ns()
            request.arrival = ("HTTP_RECV_START", self._received_ns or now_ns), ("HTTP_RECV_END", now_ns)
        if self._raw_headers is not None:
            forwarded = self._context.access.http_parameters(self._raw_headers)
            request.parameters = add_parameters(request.parameters, forwarded)
        key = self._traffic_key(self._context.catalog.resolve(self._model, self._version)) if self._sticky else ""
        self._pending = self._context.inference.submit(request, self._on_response, self._slot, sampling, key)
        self._slot = None
        return request

    def _in_thread(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Runs `work` in a thread and calls `then` with its result, or answers with the error of either."""
        self._after(asyncio.get_running_loop().run_in_executor(None, work), then)

    def _after(self, job: asyncio.Future[Any], then: Callable[[Any], None]) -> None:
        """Calls `then` with the result of `job`, or answers with the error of either."""

        def done(job: asyncio.Future[Any]) -> None:
            self._job = None
            if job.cancelled():
                return
            if self.disconnected:
                job.exception()  # the client has disconnected
                return
            self._on_job_done(job, then)

        self._job = job
        job.add_done_callback(done)

    @contained(on_error="_fail")
    def _on_job_done(self, future: asyncio.Future[Any], then: Callable[[Any], None]) -> None:
        error = future.exception()
        if isinstance(error, WeirError):
            self.respond_error(error)
            return
        try:
            # Not for an error of the job: raised here, it would keep this frame, which has the job, which keeps the error.
            then(future.result())
        except WeirError as rejection:
            self.respond_error(rejection)

    def _template_header_length(self) -> int:
        """The length of the JSON header if the request can use a request template; else 0."""
        header = self.header_length
        if header is None or self.encoding or not is_header_length(header):
            return 0
        if self._raw_headers is not None:
            return 0
        return int(header)

    def _fail(self, _error: Exception, *_arguments: object) -> None:
        """Ends this request after an unexpected exception: the traceback is logged, the client gets a plain 500."""
        if self.disconnected or self.response_complete:
            return
        if self._pending is not None:
            self._context.inference.cancel(self._pending)
            self._pending = None
        self.keep_alive = self.keep_alive and not self.more_body
        self.respond_error(internal("internal server error"))

    @contained(on_error="_fail")
    def _on_response(self, outcome: InferResponse | WeirError | None, _is_final: bool) -> None:
        pending = self._pending
        self._pending = None
        if self.disconnected or pending is None:
            return
        if outcome is None:
            outcome = internal("expected a single response, got 0")
        if isinstance(outcome, WeirError):
            self.respond_error(outcome)
            return
        reports = self._context.load_reports
        if self.load_format is not None and reports is not None and not reports.is_fresh:
            refreshing = asyncio.get_running_loop().create_task(reports.refresh())
            self._after(refreshing, lambda _result: self._respond_with(pending, outcome))
            return
        try:
            self._respond_with(pending, outcome)
        except WeirError as error:
            self.respond_error(error)

    def _respond_with(
        self, pending: PendingRequest, response: InferResponse, written: dict[str, Tensor] | None = None
    ) -> None:
        labels, batching = pending.model.labels.get, pending.model.config.max_batch_size > 0
        try:
            chunks, header_length = build_infer_response(pending.request, response, labels, batching, written)
        except LongOutputs:
            wishes = long_wishes(pending.request, response, labels, batching)
            job = self._context.offload.start(WRITE_OUTPUTS, write_job(wishes))
            self._after(job, partial(self._on_written, pending, response, wishes))
            return
        if header_length is None:
            head = b"%bContent-Type: application/json\r\n" % _OK
        else:
            head = _OK + self._binary_head(header_length)
        if self.load_format is not None and self._context.load_reports is not None:
            report = self._context.load_reports.header(self.load_format, pending.model.name)
            head += b"%b: %b\r\n" % (RESPONSE_HEADER, report) if report else b""
        encoding = response_encoding(self.accept_encoding) if self.accept_encoding else ""
        if encoding:
            self._respond_deflated(head, chunks, encoding)
        else:
            self._respond(head, chunks)

    def _binary_head(self, header_length: int) -> bytes:
        """The header lines of a response whose body is a JSON header of this length and binary tensors."""
        return b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % header_length

    def _on_written(
        self, pending: PendingRequest, response: InferResponse, wishes: list[OutputWish], parts: list[memoryview]
    ) -> None:
        self._respond_with(pending, response, written_outputs(wishes, parts))

    def _respond_deflated(self, head: bytes, chunks: list[Any], encoding: str) -> None:
        head += b"Content-Encoding: %b\r\n" % encoding.encode()
        if sum(map(len, chunks)) <= IN_PLACE_BYTES:
            self._respond(head, [deflate(chunks, encoding)])
        else:
            self._in_thread(partial(deflate, chunks, encoding), lambda body: self._respond(head, [body]))

    def _respond(self, head: bytes, chunks: list[Any]) -> None:
        size = sum(map(len, chunks))
        if size > _JOIN_LIMIT_BYTES and not self._memory.account.fits(size):
            self._memory.account.refuse(_UNSENT)
            self.respond_error(no_memory())
            return
        self._write(b"%bContent-Length: %d\r\n" % (head, size), chunks, size)

    def respond_error(self, error: WeirError) -> None:
        """Answers with Triton's status and error body."""
        head, body = raw_error_response(error)
        self._write(head, [body], len(body))

    def _write(self, head: bytes, chunks: list[Any], size: int) -> None:
        end = b"\r\n" if self.keep_alive else b"Connection: close\r\n\r\n"
        if size <= _JOIN_LIMIT_BYTES:
            self._transport.write(b"".join((head, end, *chunks)))
        else:
            self._transport.writelines([head + end, *chunks])
        self.response_complete = True
        self._release()
        if not self.keep_alive:
            self._transport.close()
        self._on_complete()

    def _release(self) -> None:
        if self._slot is not None:
            self._slot.free()
            self._slot = None
        if self._slot_bytes:
            self._memory.slots.release(_BODY, self._slot_bytes)
            self._slot_bytes = 0
        if self._held_bytes or self._inflated_bytes:
            self._memory.account.release(_BODY, self._held_bytes)
            self._memory.account.release(_DECOMPRESSED, self._inflated_bytes)
            self._held_bytes = self._inflated_bytes = 0
        self.body = b""  # an idle connection keeps a reference to its last exchange


def _slot_size(size: int) -> int:
    """How much memory the slot for a body of `size` bytes reserves."""
    return 1 << (size - 1).bit_length()


def early_rejection(context: GatewayContext, model: str, version: str) -> WeirError | None:
    """The error with which the queue of this model rejects every request now, as far as this gateway knows.

    None if the error may be another one, or depends on the body.
    """
    try:
        served = context.catalog.resolve(model, version)
        if not _may_depend_on_body(context, served):
            context.inference.backpressure.check_live(time.monotonic(), served.queue, version)
    except WeirError as error:
        return error if error.retry_after_s else None
    return None


def _may_depend_on_body(context: GatewayContext, served: ServedModel) -> bool:
    """Whether a body may change the outcome: by a cache hit, another priority, or as a step of a running sequence."""
    batching = served.config.dynamic_batching
    has_priorities = batching is not None and batching.priority_levels > 0
    return has_priorities or served.config.ensemble_scheduling is not None or context.inference.caches(served)
