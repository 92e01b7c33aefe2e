"""`InferExchange`: one request on the infer route and its response, without ASGI.

It stands where uvicorn's protocol keeps its request-response cycle, so it has the attributes that protocol asks of one.
The body is received straight into where it will be read: a shared-memory slot when it is large, placed so that the
tensors behind the JSON header are aligned. What takes long is done elsewhere meanwhile: compression of large bodies in a
thread, reading and writing of large JSON in a helper process (`runtime.offload`). It is still this request's turn on its
connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bus.payloads import ALIGNMENT_BYTES, INLINE_LIMIT_BYTES, Slot
from calls.catalog import ServedModel
from calls.pending import Pending
from gateway.access import add_parameters
from gateway.connection_memory import ConnectionMemory, no_memory
from gateway.deadlines import DEADLINE_HEADER, read_deadline_ms
from gateway.doors import Doors
from gateway.http.compression import (
    IN_PLACE_BYTES,
    INFLATION_STEP_BYTES,
    Inflation,
    deflate,
    is_compressed,
    response_encoding,
)
from gateway.http.early_refusal import refusal_at_head
from gateway.http.error_response import error_response
from runtime.containment import contained
from runtime.offload import OFF_LOOP_BYTES
from schemas.errors import ErrorCode, WeirError, internal
from schemas.kserve_raw import parse_raw_request
from schemas.kserve_request import is_header_length, parse_header_length, parse_infer_request, read_document
from schemas.kserve_response import LongOutputs, build_infer_response
from schemas.offloaded import (
    READ_JSON,
    WRITE_OUTPUTS,
    OutputWish,
    json_job,
    long_wishes,
    outline_document,
    write_job,
    written_outputs,
)
from schemas.request_errors import raw_too_large, too_large
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import Tensor

_OK = b"HTTP/1.1 200 OK\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JOIN_LIMIT_BYTES = 64 * 1024

SLOT_AFTER_BYTES = 64 * 1024
SLOT_AFTER_SHARE = 8
"""A body gets a payload slot, which reserves memory for all of it, only after this many bytes of it have arrived, and an
eighth (one of `SLOT_AFTER_SHARE` parts) of what it announced. Until then it lies in ordinary memory."""

_BODY = "http"
_DECOMPRESSED = "decompressed"
_UNSENT = "unsent"


class _Unwatched:
    """In the place of the event by which an ASGI application waits for its body: nobody waits here."""

    def set(self) -> None:
        """Nothing to wake."""


_UNWATCHED = _Unwatched()


class InferExchange:
    """See the module. `headers` are (lower-case name, value); `on_response` is called when the response is written.

    `raw_headers` have their names as the client wrote them; given only where some may become parameters.
    """

    __slots__ = (
        "_announced",
        "_doors",
        "_held_bytes",
        "_inflated_bytes",
        "_job",
        "_memory",
        "_model",
        "_on_response",
        "_padding",
        "_pending",
        "_raw_headers",
        "_received",
        "_received_ns",
        "_request",
        "_slot",
        "_slot_after",
        "_slot_bytes",
        "_transport",
        "_version",
        "accepts",
        "active",
        "body",
        "deadline",
        "disconnected",
        "encoding",
        "header_length",
        "keep_alive",
        "message_event",
        "more_body",
        "refusal",
        "response_complete",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        doors: Doors,
        transport: Any,
        memory: ConnectionMemory,
        model: str,
        version: str,
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        on_response: Callable[[], None],
        raw_headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self._doors = doors
        self._announced = 0
        self._held_bytes = 0
        self._inflated_bytes = 0
        self._memory = memory
        self._job: asyncio.Future[Any] | None = None  # what is done elsewhere
        self._raw_headers = raw_headers
        self._transport = transport
        self._model = model
        self._version = version
        self._on_response = on_response
        self._pending: Pending | None = None
        self._slot: Slot | None = None
        self._slot_after = 0  # bytes of the body after which it gets a slot; 0: it gets none
        self._slot_bytes = 0  # charged for the slot while the body arrives
        self._padding = 0
        self._received = 0
        self.accepts = b""
        self._received_ns = time.time_ns() if doors.inference.tracing.is_on else 0
        self.active = False
        self.body: Any = b""
        self.deadline: bytes | None = None
        self.disconnected = False
        self.keep_alive = keep_alive
        self.message_event = _UNWATCHED
        self.more_body = True
        self.response_complete = False
        self.header_length: str | None = None
        self.encoding = b""
        self.traceparent = ""
        self.tracestate = ""
        self.refusal: WeirError | None = None
        self._read_headers(headers)

    def _read_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        length = 0
        expects_continue = False
        for name, value in headers:
            if name == b"content-length":
                length = int(value)  # the parser admits nothing but digits
            elif name == b"inference-header-content-length":
                self.header_length = value.decode("latin-1")
            elif name == b"accept-encoding":
                self.accepts = value
            elif name == b"content-encoding":
                self.encoding = value.strip().lower()
            elif name == b"traceparent":
                self.traceparent = value.decode("latin-1")
            elif name == b"tracestate":
                self.tracestate = f"{self.tracestate},{value.decode('latin-1')}".removeprefix(",")
            elif name == DEADLINE_HEADER:
                self.deadline = value
            elif name == b"expect":
                expects_continue = value.lower() == b"100-continue"
        if length > self._doors.limits.input_size:
            self._refuse_size(length)
            return
        shut = self._doors.inference.shut.known
        refusal = refusal_at_head(self._doors, self._model, self._version) if shut else None
        if refusal is None and length > INLINE_LIMIT_BYTES:
            self._plan_slot(length)
            refusal = self._refusal_for_size(length)
        self._announced = length
        if refusal is not None:
            self._turn_away(refusal, expects_continue)
        elif expects_continue:
            self._transport.write(_CONTINUE)

    def _plan_slot(self, length: int) -> None:
        header = self.header_length
        if self.encoding or header is None or not is_header_length(header) or int(header) > length:
            return  # compressed, or all JSON: its tensors are made anew from it
        self._padding = -int(header) % ALIGNMENT_BYTES
        self._slot_after = max(SLOT_AFTER_BYTES, length // SLOT_AFTER_SHARE)

    def _refusal_for_size(self, length: int) -> WeirError | None:
        """The error for a body of this announced size, where there is no room for it now. Nothing is charged yet."""
        account = self._memory.account
        if account.fits(length) or (self._slot_after and self._memory.slots.fits(_slot_size(length + self._padding))):
            return None
        account.refuse(_BODY)
        return no_memory()

    def _take_slot(self) -> None:
        """Enough of the body has arrived: the rest goes into a slot, and what is there moves. Without one it stays."""
        self._slot_after = 0
        size = max(self._announced, self._received) + self._padding
        slot_bytes = _slot_size(size)
        if not self._memory.slots.charge(_BODY, slot_bytes):
            return
        self._slot = self._doors.payloads.slot_for_body(size)
        if self._slot is None:
            self._memory.slots.release(_BODY, slot_bytes)
            return
        self._slot_bytes = slot_bytes
        self._slot.view[self._padding : self._padding + len(self.body)] = self.body
        self.body = b""
        self._memory.account.release(_BODY, self._held_bytes)
        self._held_bytes = 0

    def _charge_body(self) -> None:
        """Charges what has arrived in ordinary memory, or refuses the request."""
        if self._memory.account.charge(_BODY, self._received - self._held_bytes):
            self._held_bytes = self._received
            return
        self._let_go()
        self.refusal = no_memory()
        if self.active:
            self.respond_error(self.refusal)  # the connection goes on, and passes over the rest of the body

    def _turn_away(self, error: WeirError, expects_continue: bool) -> None:
        """Answers with this error, though the body is still to come: its connection goes on, and passes over it."""
        if expects_continue:
            self.refuse(error)  # the body will not be sent, or will: nobody could tell what comes next
        self.refusal = error

    def _refuse_size(self, length: int) -> None:
        limit = self._doors.limits.input_size
        if self.header_length == "0" and not self.encoding:
            self.refuse(raw_too_large(length, limit))
            return
        kind = "request JSON size" if self.header_length is None and not self.encoding else "request size"
        self.refuse(too_large(kind, length, limit))

    def refuse(self, error: WeirError) -> None:
        """Answers with this error when it is the request's turn; its connection ends, for its body is not read."""
        self._let_go()
        self.body = b""
        self.keep_alive = self.more_body = False
        self.refusal = error
        if self.active:
            self.respond_error(error)

    def receive(self, data: bytes) -> None:
        """Takes the next piece of the body."""
        if self.refusal is not None:
            return
        self._received += len(data)
        if self._received > self._doors.limits.input_size:
            self._refuse_size(self._received)
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
        # A small body that arrives at once is not charged: it is gone, or counted as in flight, in this turn.
        if self._received != self._announced or self._received > INLINE_LIMIT_BYTES:
            self._charge_body()

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""
        return self._received

    @contained(on_error="_fail")
    def start(self) -> None:
        """It is this request's turn on its connection; its body may be complete or not."""
        self.active = True
        if self.refusal is not None:
            # To close a connection while its client sends would destroy the answer on its way.
            if self.keep_alive or not self.more_body:
                self.respond_error(self.refusal)
        elif not self.more_body:
            self._submit()

    def complete(self) -> None:
        """The body is complete."""
        self.more_body = False
        if self._slot_bytes:
            self._memory.slots.release(_BODY, self._slot_bytes)
            self._slot_bytes = 0
        if self.active and not self.response_complete:
            if self.refusal is not None:
                self.respond_error(self.refusal)
            else:
                self._submit()

    def disconnect(self) -> None:
        """The client has gone."""
        self.disconnected = True
        if self._job is not None:
            self._job.cancel()
        self._let_go()
        if self._pending is not None:
            self._doors.inference.abandon(self._pending)
            self._pending = None

    @contained(on_error="_fail")
    def _submit(self) -> None:
        try:
            served = self._doors.catalog.resolve(self._model, self._version)
            prepared = None
            tracing = self._doors.inference.tracing
            is_traced = tracing.is_on and tracing.samples(served.name, self.traceparent)
            length = 0 if is_traced else self._prepared_length()
            if length:
                prepared = served.prepared.find(self._version, self.body, length)
            if prepared is not None:
                body = prepared.pack(self.body)
                deadline_ms = 0 if self.deadline is None else read_deadline_ms(self.deadline)
                self._pending = self._doors.inference.submit_prepared(
                    served, prepared, body, self._on_answer, deadline_ms
                )
                return
            if served.config.is_decoupled:
                raise WeirError(
                    ErrorCode.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy"
                )
            if self.encoding and is_compressed(self.encoding):
                self._inflate(served, is_traced)
                return
            request = self._submit_to(served, is_traced)
            if length and request is not None and not self._doors.inference.caches(served):
                served.prepared.keep(request, self.body, length)
        except WeirError as error:
            self.respond_error(error)

    def _inflate(self, served: ServedModel, is_traced: bool) -> None:
        inflation = Inflation(self.body, self._doors.limits.input_size)
        self.body = b""
        self._on_inflated(served, is_traced, inflation, inflation.advance(IN_PLACE_BYTES))

    def _on_inflated(self, served: ServedModel, is_traced: bool, inflation: Inflation, is_complete: bool) -> None:
        """Charges what the last step of decompression made, and begins the next step, or submits the request."""
        size = len(inflation.content)
        if not self._memory.account.charge(_DECOMPRESSED, size - self._inflated_bytes):
            raise no_memory()
        self._inflated_bytes = size
        if is_complete:
            self.body = inflation.content
            self._submit_to(served, is_traced)
            return
        step = partial(inflation.advance, size + INFLATION_STEP_BYTES)
        self._in_thread(step, partial(self._on_inflated, served, is_traced, inflation))

    def _submit_to(self, served: ServedModel, is_traced: bool) -> InferRequest | None:
        """Reads and submits the request. Returns None where it is read elsewhere meanwhile, and submitted then."""
        limits = self._doors.limits
        body = self.body if self._slot is None else self._slot.view[self._padding : self._padding + self._received]
        header_length = None if self.header_length is None else parse_header_length(self.header_length)
        if header_length == 0 or (header_length is None and not body):
            return self._submit_read(
                parse_raw_request(self._model, self._version, body, served.config, limits), is_traced
            )
        json_bytes = len(body) if header_length is None else header_length
        if OFF_LOOP_BYTES < json_bytes <= len(body):
            view = memoryview(body)
            content = view[json_bytes:]
            job = json_job(self._model, self._version, view[:json_bytes], len(content), limits)
            self._after(self._doors.offload.start(READ_JSON, job), partial(self._on_outline, is_traced, content))
            return None
        return self._submit_read(
            parse_infer_request(self._model, self._version, body, header_length, limits, self._doors.regions.find),
            is_traced,
        )

    def _on_outline(self, is_traced: bool, content: memoryview, parts: list[memoryview]) -> None:
        document = outline_document(parts)
        limits, find_region = self._doors.limits, self._doors.regions.find
        self._submit_read(read_document(self._model, self._version, document, content, limits, find_region), is_traced)

    def _submit_read(self, request: InferRequest, is_traced: bool) -> InferRequest:
        request.traceparent, request.tracestate = self.traceparent, self.tracestate
        if self.deadline is not None:
            request.deadline_ms = read_deadline_ms(self.deadline)
        if is_traced:
            now_ns = time.time_ns()
            request.arrival = ("HTTP_RECV_START", self._received_ns or now_ns), ("HTTP_RECV_END", now_ns)
        if self._raw_headers is not None:
            forwarded = self._doors.access.http_parameters(self._raw_headers)
            request.parameters = add_parameters(request.parameters, forwarded)
        self._pending = self._doors.inference.submit(request, self._on_answer, self._slot, is_traced)
        self._slot = None
        return request

    def _in_thread(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Calls `then` with the outcome of `work`, or answers with the error of either."""
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
        try:
            then(future.result())
        except WeirError as error:
            self.respond_error(error)

    def _prepared_length(self) -> int:
        """The length of the JSON header, if the request is of the kind that can be prepared; else 0."""
        header = self.header_length
        if header is None or self._slot is not None or self.encoding or not is_header_length(header):
            return 0
        if self._raw_headers is not None:
            return 0
        return int(header)

    def _fail(self, _error: Exception, *_arguments: object) -> None:
        """Ends this request after an unexpected exception: the log has its traceback, the client gets no internals."""
        if self.disconnected or self.response_complete:
            return
        if self._pending is not None:
            self._doors.inference.abandon(self._pending)
            self._pending = None
        self.keep_alive = self.keep_alive and not self.more_body
        self.respond_error(internal("internal server error"))

    @contained(on_error="_fail")
    def _on_answer(self, outcome: InferResponse | WeirError | None, _is_final: bool) -> None:
        pending = self._pending
        self._pending = None
        if self.disconnected or pending is None:
            return
        if outcome is None:
            outcome = internal("expected a single response, got 0")
        if isinstance(outcome, WeirError):
            self.respond_error(outcome)
            return
        try:
            self._respond_with(pending, outcome)
        except WeirError as error:
            self.respond_error(error)

    def _respond_with(
        self, pending: Pending, response: InferResponse, written: dict[str, Tensor] | None = None
    ) -> None:
        labels, batching = pending.model.labels.get, pending.model.config.max_batch_size > 0
        try:
            chunks, header_length = build_infer_response(pending.request, response, labels, batching, written)
        except LongOutputs:
            wishes = long_wishes(pending.request, response, labels, batching)
            job = self._doors.offload.start(WRITE_OUTPUTS, write_job(wishes))
            self._after(job, partial(self._on_written, pending, response, wishes))
            return
        if header_length is None:
            head = b"%bContent-Type: application/json\r\n" % _OK
        else:
            head = b"%bContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % (
                _OK,
                header_length,
            )
        encoding = response_encoding(self.accepts) if self.accepts else ""
        if encoding:
            self._respond_deflated(head, chunks, encoding)
        else:
            self._respond(head, chunks)

    def _on_written(
        self, pending: Pending, response: InferResponse, wishes: list[OutputWish], parts: list[memoryview]
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
        """Answers with Triton's error body and status."""
        head, body = error_response(error)
        self._write(head, [body], len(body))

    def _write(self, head: bytes, chunks: list[Any], size: int) -> None:
        end = b"\r\n" if self.keep_alive else b"Connection: close\r\n\r\n"
        if size <= _JOIN_LIMIT_BYTES:
            self._transport.write(b"".join((head, end, *chunks)))
        else:
            self._transport.writelines([head + end, *chunks])
        self.response_complete = True
        self._let_go()
        if not self.keep_alive:
            self._transport.close()
        self._on_response()

    def _let_go(self) -> None:
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
        self.body = b""  # an idle connection keeps its last exchange


def _slot_size(size: int) -> int:
    """How much memory the slot for a body of `size` bytes reserves."""
    return 1 << (size - 1).bit_length()
