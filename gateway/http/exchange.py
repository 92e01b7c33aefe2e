"""`InferExchange`: one request on the infer route and its response, without ASGI: the `Call` of HTTP.

The head may reject a request before its body has arrived. A small body that arrives at once is used where it is; any other
has a `RequestBody`. A thread compresses large responses. Later requests of the connection wait until this one is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from weir.access.gate import TENANT_HEADER, Asked, Gate, Shown
from weir.access.limits.refusals import TokensPending
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY
from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import Call, Ready
from weir.calls.inference.documents import JSON, Body, Document, Encoded
from weir.calls.payload_store import SLOT_FROM_BYTES
from weir.calls.request_headers import DEADLINE_HEADER, read_deadline_ms
from weir.calls.tracing import NOT_TRACED, Sampling
from weir.gateway.access import add_parameters
from weir.gateway.admin.load_report import REQUEST_HEADER, RESPONSE_HEADER
from weir.gateway.context import GatewayContext
from weir.gateway.http.body import RequestBody
from weir.gateway.http.compression import IN_PLACE_BYTES, deflate, is_compressed, response_encoding
from weir.http_server.asgi import raw_error_response
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_memory import no_memory
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import raw_too_large, too_large
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.calls import ANYBODY
from weir.telemetry.access_log import CANCELLED

_DOOR, _OPERATION = "http", "POST /v2/models/{model}/infer"
_OK = b"HTTP/1.1 200 OK\r\n"
_OK_JSON = _OK + b"Content-Type: application/json\r\n"
_STATUS = slice(9, 12)  # in the first line of a response
_ROUTE, _ROUTE_OF_VERSION = "/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JOIN_LIMIT_BYTES = 64 * 1024

_HEADER_LENGTH = b"inference-header-content-length"
_LONGEST_LENGTH = 19  # digits of a number that `parse_header_length` takes

_BINARY_HEAD = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


class InferExchange(Call):
    """One request for `model`, whose head `connection` has just parsed, and its response."""

    __slots__ = (
        "_accept_encoding",
        "_announced",
        "_began_ns",
        "_caller",
        "_connection",
        "_encoding",
        "_expects_continue",
        "_fields",
        "_header_length",
        "_headers",
        "_is_active",
        "_json_bytes",
        "_model",
        "_raw_headers",
        "_received_ns",
        "_sampling",
        "_tokens",
        "_version",
        "binary_head",
        "body",
        "content",
        "keep_alive",
        "more_body",
        "principal",
        "rejection",
        "response_complete",
        "status_of",
    )

    services: GatewayContext

    def __init__(  # noqa: PLR0913 - runs for every request: an object for its arguments would cost as much
        self,
        context: GatewayContext,
        connection: HttpConnection,
        model: str,
        version: str,
        keep_alive: bool,
        fields: dict[bytes, bytes],
    ) -> None:
        """`fields` are the headers, the last one of each name."""
        super().__init__(context, JSON, connection.memory.account)
        self._connection = connection
        self._headers = connection.headers
        self._raw_headers = connection.raw_headers
        self._model = model
        self._version = version
        self._began_ns = 0 if context.access_log is None else time.monotonic_ns()
        self._received_ns = time.time_ns() if context.inference.tracing.is_on else 0
        self._sampling: Sampling = NOT_TRACED
        self._is_active = False
        self._tokens: asyncio.Future[WeirError | None] | None = None
        """What the request waits for before it is read, by the limits of its owner."""
        self.binary_head = _BINARY_HEAD
        """The header lines of a response with binary tensors, for the length of its JSON header."""
        self.body: RequestBody | None = None
        self.content: Body = b""
        """The complete body."""
        self.keep_alive = keep_alive
        self.more_body = True
        self.principal = NOBODY
        """Who sends the request."""
        self._caller = ANYBODY
        self.rejection: WeirError | None = None
        self.response_complete = False
        self.status_of: Callable[[WeirError], int] | None = None
        """The status of errors, if it is not Triton's."""
        self._fields = fields
        self._accept_encoding = fields.get(b"accept-encoding", b"")
        self._encoding = fields.get(b"content-encoding", b"").strip().lower()
        self._expects_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        header = self._header_length = fields.get(_HEADER_LENGTH)
        self._json_bytes = -1  # of a plain body with binary tensors; otherwise these are built from all of it
        if header is not None and not self._encoding and len(header) <= _LONGEST_LENGTH and header.isdigit():
            self._json_bytes = int(header)
        length = self._announced = int(fields.get(b"content-length", 0))  # the parser accepts digits only
        if context.gate.is_on:
            self._enter(context.gate)
        shut = context.inference.backpressure.active
        if (shut or length > SLOT_FROM_BYTES or length > context.limits.input_size) and self.rejection is None:
            self._admit(length)

    def _enter(self, gate: Gate) -> None:
        """Asks the gate about the request, by its head."""
        fields, connection, model, version = self._fields, self._connection, self._model, self._version
        authorization, tenant, kept = fields.get(b"authorization", b""), fields.get(TENANT_HEADER, b""), connection.kept
        is_kept = kept is not None and gate.holds(kept, authorization, tenant, model, version)
        if kept is not None and is_kept and not gate.limits_requests:
            self.principal, self._caller = kept.principal, kept.caller
            return
        shown = Shown(authorization, connection.certificate, tenant)
        asked = Asked(_DOOR, _OPERATION, Action.INFER, model, version, size=self._announced)
        try:
            if kept is not None and is_kept:
                self.principal = kept.principal
                gate.count(kept.principal, asked)
            else:
                self.principal = gate.admit(shown, asked)
        except TokensPending as pending:
            self.principal, self._tokens = pending.principal, pending.wait()
        except WeirError as error:
            self._reject_early(error)
            return
        if kept is None or not is_kept:
            kept = connection.kept = gate.keep(shown, model, version, self.principal)
        self._caller = kept.caller

    def _admit(self, length: int) -> None:
        """Rejects the request by its head, or plans where its body, of the announced `length`, is received."""
        context = self.services
        if length > context.limits.input_size:
            self._reject_size(length)
            return
        shut = context.inference.backpressure.active
        rejection = early_rejection(context, self._model, self._version, self._caller.owner) if shut else None
        if rejection is None and length > SLOT_FROM_BYTES:
            body = self.body = RequestBody(self._connection.memory, context.payloads, length)
            if 0 <= self._json_bytes <= length:
                body.plan_slot(self._json_bytes)
            rejection = body.rejection()
        if rejection is not None:
            self._reject_early(rejection)

    def _reject_early(self, error: WeirError) -> None:
        """Answers with this error before the body has arrived: the connection stays open, and drops the body."""
        if self._expects_continue:
            self.reject(error)  # the client may or may not send the body now: what follows can't be framed
        self.rejection = error

    def _reject_size(self, length: int) -> None:
        limit = self.services.limits.input_size
        if self._header_length == b"0" and not self._encoding:
            self.reject(raw_too_large(length, limit))
            return
        kind = "request JSON size" if self._header_length is None and not self._encoding else "request size"
        self.reject(too_large(kind, length, limit))

    # HttpExchange

    def reject(self, error: WeirError, lingers: bool = False) -> None:
        """Answers with this error, or with that of an earlier rejection, when it is the request's turn.

        The connection ends, because the body is not read.
        """
        self.release()
        self.keep_alive = self.more_body = False
        self.rejection = self.rejection or error
        if self._is_active:
            self.fail(self.rejection)

    def start(self) -> None:
        """Starts the request: all earlier ones of its connection are answered. Its body may be complete or not."""
        self._is_active = True
        if self.rejection is not None:
            # Closing the connection while the client sends would destroy the response in transit.
            if self.keep_alive or not self.more_body:
                self.fail(self.rejection)
        elif not self.more_body:
            self.open()
        elif self._expects_continue and not self.received_bytes:
            self._connection.transport.write(_CONTINUE)

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""
        return len(self.content) if self.body is None else self.body.received

    def receive(self, data: bytes) -> None:
        """Takes the next piece of the body."""
        body = self.body
        if body is None:
            if len(data) == self._announced and self.rejection is None:
                # It is not charged: it is dropped, or counted as in flight, in this turn.
                self.content = data
                return
            body = self.body = RequestBody(self._connection.memory, self.services.payloads, self._announced)
        body.received += len(data)
        if self.rejection is not None:
            return  # it is answered at the end of the body
        if body.received > self.services.limits.input_size:
            self._reject_size(body.received)
        elif not body.receive(data):
            body.release()
            self.rejection = no_memory()
            if self._is_active and self.keep_alive:  # else at the end of the body: see `start`
                self.fail(self.rejection)  # the connection stays open, and drops the rest of the body

    def body_space(self) -> memoryview | None:
        """The memory of the payload slot for the rest of the body, of which the size was announced; None without one."""
        return self.body.space() if self.body is not None and self.more_body else None

    def filled(self, size: int) -> None:
        """The first `size` bytes of `body_space` have arrived."""
        assert self.body is not None  # noqa: S101 - it has given the space
        self.body.received += size

    def complete(self) -> None:
        """The body is complete."""
        self.more_body = False
        if self.body is not None:
            self.body.complete()
            self.content = self.body.content
        gate = self.services.gate
        if gate.limits_requests and not self._announced and self.rejection is None:
            try:
                gate.count_body(self.principal, self.received_bytes, is_complete=True)
            except WeirError as error:
                self.rejection = error
        if self._is_active and not self.response_complete:
            if self.rejection is not None:
                self.fail(self.rejection)
            else:
                self.open()

    def disconnect(self) -> None:
        """Cancels the request: the client has disconnected."""
        if self._began_ns and not self.response_complete:
            self._log(CANCELLED, 0)
        self.cancel()

    # Call

    def begin(self) -> Document | Ready | None:
        """Implements `Call.begin`."""
        context, content, body = self.services, self.content, self.body
        if self._tokens is not None:
            tokens, self._tokens = self._tokens, None
            self.wait_for_tokens(tokens)
            return None
        served = context.catalog.resolve(self._model, self._version)
        if context.inference.tracing.is_on:
            self._sampling = context.inference.tracing.samples(served.name, self._header(b"traceparent"))
        json_bytes = self._json_bytes
        if json_bytes > 0 and not self._sampling and self._raw_headers is None:
            template = served.templates.find(self._version, content, json_bytes)
            if template is not None and not template.refers:
                packed = template.pack(content)
                if body is not None:
                    body.release()
                return served, template.request, packed
            if template is not None and body is not None and body.slot is not None:
                return served, template.request, template.pack_in_slot(body.slot, body.padding)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy"
            )
        if self._encoding and is_compressed(self._encoding):
            return self._inflated(served)
        return self._document(served, content)

    @property
    def owner(self) -> str:
        """Implements `Call.owner`."""
        return self.principal.owner

    def _document(self, served: ServedModel, content: Body) -> Document:
        header_length = b"0" if self._header_length is None and not content else self._header_length
        text = None if header_length is None else header_length.decode("latin-1")
        return Document(served, self._model, self._version, content, text)

    def _inflated(self, served: ServedModel) -> Document | None:
        """The decompressed body; None if that takes threads: the body is read once they are done."""
        compressed, self.content = self.content, b""
        body = self.body = self.body or RequestBody(self._connection.memory, self.services.payloads, 0)
        task = body.inflate(compressed, self.services.limits.input_size)
        if task is None:
            return self._document(served, body.content)
        self.after(task, lambda _: self.read(self._document(served, body.content)))
        return None

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Implements `Call.submit`."""
        inference, served, body = self.services.inference, self.served, self.body
        slot = None if body is None else body.slot
        key = "" if served.split is None else self._header(served.split.rule.header.encode())
        deadline = self._fields.get(DEADLINE_HEADER)
        deadline_ms = 0 if deadline is None else read_deadline_ms(deadline)
        caller = self._caller
        if packed is not None:
            pending = inference.submit_packed(served, request, packed, self.on_response, deadline_ms, slot, key, caller)
        else:
            self._add_headers(request, deadline_ms)
            pending = inference.submit(request, self.on_response, slot, self._sampling, key, served, caller)
            json_bytes, found_room = self._json_bytes, slot is not None or self.received_bytes <= SLOT_FROM_BYTES
            has_template = json_bytes > 0 and found_room and not self._sampling and self._raw_headers is None
            if has_template and not inference.caches(served):
                served.templates.keep(request, self.content, json_bytes)
        if body is not None:
            body.slot = None  # the request's own now
        return pending

    def _header(self, name: bytes) -> str:
        return self._fields.get(name, b"").decode("latin-1")

    def _add_headers(self, request: InferRequest, deadline_ms: int) -> None:
        request.traceparent, request.deadline_ms = self._header(b"traceparent"), deadline_ms
        if b"tracestate" in self._fields:
            states = (value for name, value in self._headers if name == b"tracestate")
            request.tracestate = b",".join(states).decode("latin-1")
        if self._sampling:
            now_ns = time.time_ns()
            request.arrival = ("HTTP_RECV_START", self._received_ns or now_ns), ("HTTP_RECV_END", now_ns)
        if self._raw_headers is not None:
            forwarded = self.services.access.http_parameters(self._raw_headers)
            request.parameters = add_parameters(request.parameters, forwarded)

    def send(self, encoded: Encoded, is_final: bool) -> None:
        """Implements `Call.send`."""
        if self.response_complete:
            return  # an HTTP request has one response
        chunks, header_length, _ = encoded
        head = _OK_JSON if header_length is None else _OK + self.binary_head % header_length
        reports, load_format = self.services.load_reports, self._fields.get(REQUEST_HEADER)
        if load_format is not None and reports is not None:
            if not reports.is_fresh:
                task = asyncio.get_running_loop().create_task(reports.refresh())
                self.after(task, lambda _: self.send(encoded, is_final))
                return
            report = reports.header(load_format, self.served.name)
            head += b"%b: %b\r\n" % (RESPONSE_HEADER, report) if report else b""
        encoding = response_encoding(self._accept_encoding) if self._accept_encoding else ""
        if encoding:
            head += b"Content-Encoding: %b\r\n" % encoding.encode()
            if sum(map(len, chunks)) > IN_PLACE_BYTES:
                deflating = asyncio.get_running_loop().run_in_executor(None, deflate, chunks, encoding)
                self.after(deflating, lambda deflated: self._finish(head, [deflated]))
                return
            chunks = [deflate(chunks, encoding)]
        self._finish(head, chunks)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Implements `Call.fail`: answers with the status of the error, and Triton's error body."""
        if self.response_complete:
            return
        head, body = raw_error_response(error, 0 if self.status_of is None else self.status_of(error))
        self._finish(head, [body])

    def _finish(self, head: bytes, chunks: list[bytes | memoryview]) -> None:
        size, transport = sum(map(len, chunks)), self._connection.transport
        if size > _JOIN_LIMIT_BYTES and not self._connection.memory.account.fits(size):
            self._connection.memory.account.refuse(self.kind)
            self.fail(no_memory())
            return
        length = b"Content-Length: %d\r\n%b" % (size, b"\r\n" if self.keep_alive else b"Connection: close\r\n\r\n")
        if size <= _JOIN_LIMIT_BYTES:
            transport.write(b"".join((head, length, *chunks)))
        else:
            transport.writelines([head + length, *chunks])
        self.response_complete = True
        if self._began_ns:
            self._log(int(head[_STATUS]), size)
        if self.body is not None:
            self.body.release()
        if not self.keep_alive:
            transport.close()
        self._connection.on_response_complete()

    def _log(self, status: int, sent_bytes: int) -> None:
        """Writes the line of the request in the access log, once."""
        log, began_ns, self._began_ns = self.services.access_log, self._began_ns, 0
        if log is not None:
            received = self.received_bytes if self.more_body else self._announced or self.received_bytes
            route, door = _ROUTE_OF_VERSION if self._version else _ROUTE, self._connection.door
            log.record(
                door, "POST", route, self._model, self._version, status, received, sent_bytes, began_ns, self.principal
            )

    def release(self) -> None:
        """Implements `Call.release`."""
        self.content = b""  # an idle connection keeps a reference to its last exchange
        if self._tokens is not None:
            self._tokens.cancel()
        if self.body is not None:
            self.body.release()


def early_rejection(context: GatewayContext, model: str, version: str, owner: str) -> WeirError | None:
    """The error with which the queue of this model rejects every request now, as far as this gateway knows.

    None if the error may be another one, or depends on the body.
    """
    try:
        served = context.catalog.resolve(model, version)
        if not _may_depend_on_body(context, served):
            context.inference.backpressure.check_live(time.monotonic(), served.queue, version, owner=owner)
    except WeirError as error:
        return error if error.retry_after_s else None
    return None


def _may_depend_on_body(context: GatewayContext, served: ServedModel) -> bool:
    """Whether a body may change the outcome: by a cache hit, another priority, or as a step of a running sequence."""
    batching = served.config.dynamic_batching
    has_priorities = batching is not None and batching.priority_levels > 0
    return has_priorities or served.config.ensemble_scheduling is not None or context.inference.caches(served)
