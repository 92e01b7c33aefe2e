"""`AsgiExchange`: one HTTP request that the ASGI application answers. `HttpExchange` is the interface of all exchanges."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from weir.access.principal import NOBODY, Principal
from weir.http_server.connection_memory import MEMORY_KEY, ConnectionMemory, RequestMemory, no_memory
from weir.runtime.containment import report
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.request_limits import too_large
from weir.schemas.kserve.response import error_body

CONNECTION_KEY = "weir.connection"
"""Where the ASGI scope holds the `HttpConnection` that a request came by."""

CERTIFICATE_KEY = "weir.certificate"
"""Where the ASGI scope holds the `CertificateNames` of the client, None without a certificate."""

CHALLENGES = ('Bearer realm="weir"', 'Basic realm="weir"')
"""How a client may show who it is: the values of the headers `WWW-Authenticate`. Browsers ask for a password on the second.

Each stands in a header of its own, for Chromium reads a header as one challenge. Source: RFC 9110, 11.6.1.
"""

EXCHANGE_KEY = "weir.exchange"
"""Where the ASGI scope holds the `AsgiExchange` of the request."""

DISCARD_S = 5.0
"""How long the rest of a rejected body is read and dropped, so that its client can read the response before the connection
ends."""

_PAUSE_BYTES = 64 * 1024
"""How much of a body waits for the application before no more is read from the client."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CONTROL_CHARACTERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS = (204, 304)
_CANCELLED = 499  # in the access log: the client has disconnected before the response was complete

_tasks: set[asyncio.Task[None]] = set()
"""The tasks in which the application runs: an event loop itself keeps no strong references."""


class HttpExchange(Protocol):
    """One request and its response. A connection starts its exchanges one after the other, in the order of requests."""

    keep_alive: bool
    """Whether the connection goes on after the response."""
    more_body: bool
    """Whether more of the request body is to come."""
    response_complete: bool

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""

    def start(self) -> None:
        """Called when all requests before this one are answered; the body may be complete or not."""

    def receive(self, data: bytes) -> None:
        """Takes the next piece of the body."""

    def body_space(self) -> memoryview | None:
        """Memory in which the rest of the body, of known size, may be received; None where pieces go to `receive`."""

    def filled(self, size: int) -> None:
        """The first `size` bytes of `body_space` have arrived."""

    def complete(self) -> None:
        """The body is complete."""

    def reject(self, error: WeirError, lingers: bool = False) -> None:
        """Answers with `error` when it is this request's turn, and ends the connection; `lingers`: after a while."""

    def disconnect(self) -> None:
        """The client has disconnected."""


class RecordsRequests(Protocol):
    """The access log (`weir.telemetry.access_log.AccessLog`)."""

    def record(  # noqa: PLR0913 - the fields of a line
        self,
        door: str,
        method: str,
        route: str,
        model: str,
        version: str,
        status: int,
        bytes_in: int,
        bytes_out: int,
        began_ns: int,
        principal: Principal,
    ) -> None:
        """Has a line written soon."""


class AsgiConnection(Protocol):
    """What an `AsgiExchange` needs of its connection: `HttpConnection`."""

    access_log: RecordsRequests | None
    app: Any
    door: str
    is_write_paused: bool
    loop: asyncio.AbstractEventLoop
    max_body_bytes: int
    memory: ConnectionMemory
    transport: Any
    writable: asyncio.Event

    def is_next(self, exchange: HttpExchange) -> bool:
        """Whether all requests before that of `exchange` are answered."""

    def pause_reading(self) -> None:
        """Reads nothing more from the client until `resume_reading`."""

    def resume_reading(self) -> None:
        """Reads from the client again."""

    def reject(self, error: WeirError, lingers: bool = False) -> None:
        """Answers the latest request with `error`, and ends the connection."""

    def write_error(self, error: WeirError) -> None:
        """Writes an error response that announces the end of the connection."""

    def write_and_close(self, error: WeirError) -> None:
        """Writes an error response and closes the connection."""

    def on_response_complete(self) -> None:
        """The request whose turn it was is answered."""


class AsgiExchange:
    """A request for the ASGI application of `connection`, which runs in a task of its own.

    Its body is charged to the connection's account until the response is complete.
    """

    __slots__ = (
        "_began_ns",
        "_body",
        "_connection",
        "_expects_continue",
        "_is_chunked",
        "_is_disconnected",
        "_is_head",
        "_left_bytes",
        "_memory",
        "_received",
        "_rejection",
        "_response_started",
        "_sent_bytes",
        "_status",
        "_wakeup",
        "keep_alive",
        "more_body",
        "on_body",
        "principal",
        "response_complete",
        "scope",
    )

    def __init__(self, connection: AsgiConnection, scope: dict[str, Any], keep_alive: bool) -> None:
        self._connection = connection
        self._began_ns = 0 if connection.access_log is None else time.monotonic_ns()
        self._sent_bytes = self._status = 0
        self.scope = scope
        """The ASGI scope of what answers, from which the access log has the route."""
        self._memory = RequestMemory(connection.memory.account)
        scope[MEMORY_KEY] = self._memory
        scope[CONNECTION_KEY] = connection
        scope[EXCHANGE_KEY] = self
        self._body = bytearray()  # what the application has not taken yet
        self._received = 0
        self._wakeup = asyncio.Event()
        self._expects_continue = (b"expect", b"100-continue") in (
            (name, value.lower()) for name, value in scope["headers"]
        )
        self._is_disconnected = False
        self._rejection: WeirError | None = None
        self._is_head = scope["method"] == "HEAD"
        self._response_started = False
        self._is_chunked = False
        self._left_bytes = 0  # of the announced length of the response
        self.keep_alive = keep_alive
        self.more_body = True
        self.on_body: Callable[[int, bool], None] | None = None
        """Called with how much of the body has arrived, and whether that is all. Raises WeirError if it is too much."""
        self.principal = NOBODY
        """Who sends the request."""
        self.response_complete = False

    @property
    def received_bytes(self) -> int:
        """How much of the body has arrived."""
        return self._received

    def start(self) -> None:
        """Runs the application, unless the request was rejected while it waited for its turn."""
        if self._rejection is not None:
            self._log(self._rejection.http_status)
            self._connection.write_and_close(self._rejection)
        if self._is_disconnected:
            return
        task = self._connection.loop.create_task(self._run())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    def body_space(self) -> memoryview | None:
        """None: the application reads the body in pieces."""
        return None

    def filled(self, size: int) -> None:
        """Never called."""

    def receive(self, data: bytes) -> None:
        """Keeps `data` for the application, or rejects the request: for its size, or where memory has no room."""
        connection = self._connection
        self._received += len(data)
        if self._received > connection.max_body_bytes:
            connection.reject(too_large("request JSON size", self._received, connection.max_body_bytes))
        elif not self._memory.charge("http", len(data)):
            connection.reject(no_memory(), lingers=True)
        elif self._is_accepted(False):
            self._body += data
            if len(self._body) > _PAUSE_BYTES:
                connection.pause_reading()
            self._wakeup.set()

    def complete(self) -> None:
        """The body is complete."""
        self.more_body = False
        if self._is_accepted(True):
            self._wakeup.set()

    def _is_accepted(self, is_complete: bool) -> bool:
        """Whether what has arrived of the body is not too much for `on_body`; otherwise rejects the request."""
        if self.on_body is None:
            return True
        try:
            self.on_body(self._received, is_complete)
        except WeirError as error:
            self._connection.reject(error, lingers=not is_complete)
            return False
        return True

    def reject(self, error: WeirError, lingers: bool = False) -> None:
        """Answers with `error` if no response has begun, and ends the connection; `lingers`: after a while.

        To the application it looks as if the client had disconnected.
        """
        self._end_application()
        if not self._connection.is_next(self):
            self._rejection = error
            return
        self._log(self._status or error.http_status)
        if not self._response_started:
            self._connection.write_error(error)
        if lingers:
            self._connection.loop.call_later(DISCARD_S, self._connection.transport.close)
        else:
            self._connection.transport.close()

    def disconnect(self) -> None:
        """Tells the application that the client has disconnected. What it still sends is dropped."""
        self._log(_CANCELLED)
        self._end_application()

    def _end_application(self) -> None:
        self._is_disconnected = True
        self._wakeup.set()

    async def _run(self) -> None:
        connection = self._connection
        try:
            await connection.app(self.scope, self._receive, self._send)
        except asyncio.CancelledError:
            connection.transport.close()
            raise
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("weir.http_server.asgi: serving a request", error)
        if self._is_disconnected or self.response_complete:
            return
        self._log(500)
        if not self._response_started:
            connection.write_error(internal("internal server error"))
        connection.transport.close()

    def _log(self, status: int) -> None:
        """Writes the line of the request in the access log, once."""
        log, began_ns, self._began_ns = self._connection.access_log, self._began_ns, 0
        if log is None or not began_ns:
            return
        scope = self.scope
        route, values = scope.get("route"), scope.get("path_params", {})
        log.record(
            self._connection.door,
            scope["method"],
            "" if route is None else route.path_format,
            str(values.get("model", "")),
            str(values.get("version", "")),
            status,
            self._received,
            self._sent_bytes,
            began_ns,
            self.principal,
        )

    # The interface of ASGI

    async def _receive(self) -> dict[str, Any]:
        connection = self._connection
        if self._expects_continue and not connection.transport.is_closing():
            connection.transport.write(_CONTINUE)
        self._expects_continue = False
        if not (self._is_disconnected or self.response_complete):
            connection.resume_reading()
            await self._wakeup.wait()
            self._wakeup.clear()
        if self._is_disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _send(self, message: Any) -> None:
        if self._connection.is_write_paused and not self._is_disconnected:
            await self._connection.writable.wait()
        if self._is_disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self._response_started:
            self._start_response(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self._response_started and not self.response_complete:
            self._send_body(message.get("body", b""), not message.get("more_body", False))
        else:
            raise RuntimeError(f"the application sent {kind} out of turn")

    def _start_response(self, status: int, headers: Any) -> None:
        self._response_started = True
        self._status = status
        self._expects_continue = False
        lines = [_STATUS_LINES[status]]
        has_length = False
        for name, value in headers:
            if _CONTROL_CHARACTERS.search(name) or _CONTROL_CHARACTERS.search(value):
                raise RuntimeError(f"response header {name!r} has control characters")
            if name == b"content-length":
                has_length, self._left_bytes = True, int(value)
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
                continue
            lines.append(b"%b: %b\r\n" % (name, value))
        if self._is_head:
            self._left_bytes = 0
        elif not has_length and status not in _BODILESS:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._connection.transport.write(b"".join(lines))

    def _send_body(self, body: bytes, is_last: bool) -> None:
        transport = self._connection.transport
        self._sent_bytes += len(body)
        if self._is_chunked:
            end = b"0\r\n\r\n" if is_last else b""
            transport.write((b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + end)
        elif not self._is_head:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (is_last and self._left_bytes):
                raise RuntimeError("the response is not as long as its Content-Length")
            transport.write(body)
        if is_last:
            self.response_complete = True
            self._log(self._status)
            self._wakeup.set()
            self._memory.release()
            if not self.keep_alive:
                transport.close()
            self._connection.on_response_complete()


def raw_error_response(error: WeirError, status: int = 0) -> tuple[bytes, bytes]:
    """(head without its last lines, body) of an error response: Triton's status (or `status`) and text, `Retry-After`.

    Missing are `Content-Length`, what becomes of the connection, and the empty line.
    """
    body = error_body(error.message)
    extra = b"Accept-Encoding: gzip, deflate\r\n" if error.message == "Unsupported compression type" else b""
    if error.retry_after_s:
        extra = b"Retry-After: %d\r\n" % error.retry_after_s
        for name, value in error.headers:
            extra += f"{name}: {value}\r\n".encode("latin-1")
    elif error.code is ErrorCode.UNAUTHENTICATED:
        extra = b"".join(b"WWW-Authenticate: %b\r\n" % challenge.encode() for challenge in CHALLENGES)
    return b"%sContent-Type: application/json\r\n%s" % (_STATUS_LINES[status or error.http_status], extra), body
