"""`HttpProtocol`: uvicorn's HTTP protocol, with the infer route answered in it, ahead of ASGI.

ASGI costs about 40 us a request, half of what a gateway may use; the infer route is where that matters. All other
routes go to the ASGI application as always. Pipelined requests keep their order, whichever way each of them goes.
"""

from __future__ import annotations

import logging
import re
import urllib.parse
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.async_requests.preferences import wants_answer_later
from gateway.connection_memory import MEMORY_KEY, ConnectionMemory, RequestMemory, no_memory
from gateway.doors import Doors
from gateway.http.error_response import error_response
from gateway.http.exchange import InferExchange
from gateway.progress import PERIOD_S, UNREAD_PERIOD_S, Progress, StalledRequest
from runtime.containment import report
from schemas.errors import WeirError, internal, invalid
from schemas.request_errors import too_large

logger = logging.getLogger("weir.gateway")

_INFER = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?")
MAX_CACHED_ROUTES = 4096
_MAX_CACHED_URL_BYTES = 256

MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 * 1024
"""URL and headers of one request together; requests with more are answered with 400, and their connection ends."""

MAX_CHUNKS = 65_536
"""Non-empty chunks of one request's body; Triton's limit. Each costs far more than the byte it may carry."""

LINGER_S = 5.0
"""How long an idle connection stays open when the server stops, for a client that is about to use it."""

DISCARD_S = 5.0
"""How long the rest of a refused body is read and dropped, so that its client can read the response before the connection
ends."""

_EARLY_REFUSAL_BYTES = 64 * 1024  # smaller bodies are refused only when their bytes arrive
_UNSENT = "unsent"

CONNECTION_KEY = "weir.connection"
"""Where the ASGI scope holds the `HttpProtocol` that a request came by."""


class HeadTooLarge(ValueError):
    """The URL and headers of a request exceed `MAX_HEAD_BYTES` or `MAX_HEADERS`."""

    def __init__(self) -> None:
        super().__init__(f"URL and headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers")


class _FramingError:
    """Takes the place of a request that can't be parsed, until the requests before it are answered."""

    active = False
    response_complete = False
    disconnected = False

    def __init__(self, protocol: HttpProtocol, error: WeirError) -> None:
        self._protocol = protocol
        self._error = error

    def start(self) -> None:
        """Answers with the error and closes the connection."""
        self._protocol.write_and_close(self._error)


class HttpProtocol(HttpToolsProtocol):
    """One connection. `doors` are shared by all of them, and so is `routes`, a cache of parsed infer URLs."""

    def __init__(self, doors: Doors, routes: dict[bytes, tuple[str, str] | None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._doors = doors
        self._routes = routes
        self._idle_since_s = 0.0
        self._head_bytes = 0
        self._chunks = 0
        self._body_bytes = 0
        self._is_refused = False
        self._is_stopping = False
        self._is_held = False  # until the client has read what it was sent
        self._is_in_head = False
        self._arrived_head_bytes = 0  # of a head that comes in several pieces, as far as is known
        self._head_charged_bytes = 0
        self._arrival = Progress()
        self._reading = Progress()  # of the client's, of what it was sent
        self._unsent_bytes = 0
        self._prefers = False
        self._forwards = doors.access.forwards_http
        self.raw_headers: list[tuple[bytes, bytes]] | None = None
        """The headers of the request, named as its client wrote them, where they may become parameters."""

    # Parser callbacks

    def on_message_begin(self) -> None:
        """The ASGI scope is made only for requests that go to ASGI."""
        self.url = b""
        self.headers = []
        self._head_bytes = self._chunks = self._body_bytes = self._arrived_head_bytes = 0
        self._is_in_head = True
        self._prefers = False
        if self._forwards:
            self.raw_headers = []

    def on_url(self, url: bytes) -> None:
        """See uvicorn's protocol; bounded."""
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See uvicorn's protocol; bounded."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            raise HeadTooLarge
        lower_name = name.lower()
        self.headers.append((lower_name, value))
        if lower_name == b"prefer":
            self._prefers = True
        if self.raw_headers is not None:
            self.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Decides which way the request goes."""
        self._is_in_head = False
        if self._head_charged_bytes:
            self.memory.account.release("http", self._head_charged_bytes)
            self._head_charged_bytes = 0
        if self._is_refused:
            return
        url = self.url
        try:
            route = self._routes[url]
        except KeyError:
            route = parse_route(self._routes, url)
        if (
            route is None
            or self.parser.get_method() != b"POST"
            or self._doors.access.refuses_inference(self.headers)
            or (self._prefers and wants_answer_later(self.headers))
        ):
            headers = self.headers
            super().on_message_begin()
            self.url = url
            self.headers.extend(headers)
            scope: Any = self.scope
            scope[CONNECTION_KEY] = self
            self.expect_100_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in headers)
            super().on_headers_complete()
            self.cycle.keep_alive &= not self._is_stopping
            self._begin_asgi(headers)
            return
        keep_alive = (
            not self._is_stopping and self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        )
        previous: Any = self.cycle
        exchange = InferExchange(
            self._doors,
            self.transport,
            self.memory,
            *route,
            self.headers,
            keep_alive,
            self.on_response_complete,
            self.raw_headers,
        )
        self.cycle = exchange  # type: ignore[assignment]
        if previous is None or previous.response_complete:
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def on_chunk_header(self) -> None:
        """A chunk of the body begins, or its end."""
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        """See uvicorn's protocol; bounded."""
        if self._chunks > MAX_CHUNKS:
            self._refuse(invalid(f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks."))
            return
        cycle: Any = self.cycle
        if type(cycle) is InferExchange:
            if not cycle.response_complete:
                cycle.receive(body)
            else:
                self._pass_over(len(body))
            return
        self._body_bytes += len(body)
        limit = self._doors.limits.input_size
        if self._body_bytes > limit:
            self._refuse(too_large("request JSON size", self._body_bytes, limit))
        elif not (self._is_refused or cycle.response_complete):
            if not cycle.memory.charge("http", len(body)):
                self._refuse(no_memory(), lingers=True)
                return
            super().on_body(body)

    def _begin_asgi(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Has the body of the request that goes to ASGI counted, or refuses it by its announced size."""
        cycle: Any = self.cycle
        scope: Any = self.scope
        scope[MEMORY_KEY] = cycle.memory = RequestMemory(self.memory.account)
        cycle.on_response = partial(self._on_asgi_response, cycle)
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)
        if length > _EARLY_REFUSAL_BYTES and not self.pipeline and not self.memory.account.fits(length):
            self.memory.account.refuse("http")
            self._refuse(no_memory(), lingers=True)

    def _on_asgi_response(self, cycle: Any) -> None:
        cycle.memory.release()
        self.on_response_complete()

    def on_message_complete(self) -> None:
        """See uvicorn's protocol."""
        cycle: Any = self.cycle
        if type(cycle) is InferExchange:
            if not cycle.response_complete:
                cycle.complete()
        else:
            super().on_message_complete()

    def _pass_over(self, size: int) -> None:
        """More comes of the body of a request that is answered already."""
        self._body_bytes += size
        self._idle_since_s = self.loop.time()
        if self._body_bytes > self._doors.limits.input_size:
            self.transport.close()

    def _refuse(self, error: WeirError, lingers: bool = False) -> None:
        """Answers a request whose body is not read to its end, and ends the connection; `lingers`: after `DISCARD_S`."""
        if self._is_refused:
            return
        self._is_refused = True
        cycle: Any = self.cycle
        if type(cycle) is InferExchange:
            if not cycle.response_complete:
                cycle.refuse(error)
            else:
                self.transport.close()
            return
        if not (self.pipeline or cycle.response_started or cycle.response_complete):
            head, body = error_response(error)
            self.transport.write(b"%bConnection: close\r\n\r\n%b" % (head, body))
        cycle.disconnected = True
        cycle.message_event.set()
        if lingers:
            self.loop.call_later(DISCARD_S, self.transport.close)
        else:
            self.transport.close()

    def abort(self) -> None:
        """Ends the connection at once, for its client doesn't read what it is sent."""
        self.transport.abort()

    # Connection events

    def shutdown(self) -> None:
        """The server stops: the next response ends the connection, which is closed if it stays idle for `LINGER_S`."""
        self._is_stopping = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        self.loop.call_later(LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def connection_made(self, transport: Any) -> None:
        """Opens the accounts of the connection in the memory ledger."""
        super().connection_made(transport)
        address = self.client[0] if self.client else None
        self.memory = ConnectionMemory(self._doors.ledger, self._doors.arriving_slots, address)

    def check_progress(self, now_s: float) -> None:
        """Ends the connection if its client has stopped sending a request, or reading a response (`gateway.progress`)."""
        if self.transport.is_closing() or self.flow.write_paused:
            unsent_bytes = self.transport.get_write_buffer_size()
            period_s = PERIOD_S if self._doors.ledger.is_short else UNREAD_PERIOD_S
            if unsent_bytes and self._reading.is_stalled(now_s, self, -unsent_bytes, period_s):
                self.transport.abort()
            return
        self._reading.reset()
        cycle: Any = self.cycle
        if self.flow.read_paused or self._is_refused:
            self._arrival.reset()
        elif self._is_in_head:
            if self._arrival.is_stalled(now_s, self, self._arrived_head_bytes):
                self._is_refused = True
                self.write_and_close(StalledRequest())
        elif cycle is not None and not cycle.response_complete and cycle.more_body:
            is_infer = type(cycle) is InferExchange
            received_bytes = cycle.received_bytes if is_infer else self._body_bytes
            if self._arrival.is_stalled(now_s, cycle, received_bytes):
                self._refuse(StalledRequest())
        else:
            self._arrival.reset()

    def write_and_close(self, error: WeirError) -> None:
        """Writes the response to what could not be read, and closes the connection."""
        if self.transport.is_closing():
            return
        head, body = error_response(error)
        self.transport.write(b"%bConnection: close\r\n\r\n%b" % (head, body))
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent responses: what waits for it is counted."""
        super().pause_writing()
        unsent_bytes = self.transport.get_write_buffer_size()
        if self.memory.account.charge(_UNSENT, unsent_bytes):
            self._unsent_bytes += unsent_bytes
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses what arrived. What can't be parsed is answered with 400, and ends this connection alone."""
        if self._is_refused:
            return  # the connection is closing, and what follows can't be framed
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, HeadTooLarge):
                report("gateway.http.protocol: parsing a request", error)
                self._refuse_framing("", internal("internal server error"))
            else:
                self._refuse_framing(str(error.__context__ or error))
        else:
            if self._is_in_head:
                self._charge_head(len(data))

    def _feed(self, data: bytes) -> None:
        """Has the parser read all of `data`. Raises HttpParserError.

        A request to switch protocols, as of clients that would rather have HTTP/2, is served as it is. The parser takes a
        body of it for what follows it, so one with a body is refused.
        """
        rest: bytes | memoryview = data
        while rest and not self._is_refused:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]

    def _charge_head(self, size: int) -> None:
        """Charges what has arrived of a head that is not complete. `size` is that of the last piece.

        The parser reports a header only once it is complete, so an endless one is bounded here.
        """
        self._arrived_head_bytes += size if self._arrived_head_bytes else max(1, self._head_bytes)
        if self._arrived_head_bytes > MAX_HEAD_BYTES:
            self._refuse_framing(str(HeadTooLarge()))
            return
        size = self._arrived_head_bytes - self._head_charged_bytes
        if self.memory.account.charge("http", size):
            self._head_charged_bytes += size
        else:
            self._is_refused = True
            self.write_and_close(no_memory())

    def _refuse_framing(self, reason: str, error: WeirError | None = None) -> None:
        """Answers what can't be parsed, once the requests before are answered, and ends the connection.

        The error is INVALID_ARG with `reason`, unless `error` is given.
        """
        error = error or invalid(f"malformed HTTP request: {reason}")
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.more_body and not self.pipeline:
                self._refuse(error)  # its body can't be read to the end
                return
            self.pipeline.appendleft((_FramingError(self, error), self.app))  # type: ignore[arg-type]
        else:
            self.write_and_close(error)
        self._is_refused = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the requests of this connection that have no response yet."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self.cycle, *waiting):
            if isinstance(cycle, InferExchange) and not cycle.response_complete:
                cycle.disconnect()
        super().connection_lost(exc)
        self.memory.close()

    def on_response_complete(self) -> None:
        """As uvicorn's, but the timer of an idle connection is looked at when it is due, not set for each response."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.write_paused:
            # Answers of requests that a client goes on sending, and doesn't read, would fill the memory.
            self._is_held = True
            self.flow.pause_reading()
            return
        self._go_on()

    def resume_writing(self) -> None:
        """The client has read enough of what it was sent."""
        super().resume_writing()
        self.memory.account.release(_UNSENT, self._unsent_bytes)
        self._unsent_bytes = 0
        if self._is_held:
            self._is_held = False
            self._go_on()

    def _go_on(self) -> None:
        """The next request is due. It starts in a turn of its own: a thousand refusals would start each other otherwise."""
        if self.pipeline:
            self.loop.call_soon(self._start_next)
            return
        self.flow.resume_reading()
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _start_next(self) -> None:
        """Starts the pipelined request whose turn it is, unless the connection was lost meanwhile."""
        if not self.pipeline or self.transport.is_closing():
            return
        cycle, app = self.pipeline.pop()
        if not self.pipeline:
            self.flow.resume_reading()
        self._start_asgi_task(cycle, app)

    def timeout_keep_alive_handler(self) -> None:
        """Closes the connection if it has been idle for as long as the timeout, or looks again when it would have been."""
        self.timeout_keep_alive_task = None
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle
        idle_s = self.loop.time() - self._idle_since_s if cycle.response_complete else 0.0
        if idle_s >= self.timeout_keep_alive:
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive - idle_s, self.timeout_keep_alive_handler
            )

    def _unset_keepalive_if_required(self) -> None:
        # uvicorn cancels the timer whenever data arrives; here it goes on, and only the end of the connection ends it.
        if self.transport is None or self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # Where uvicorn's protocol starts the next pipelined request, whichever kind it is.
        if type(cycle) in (InferExchange, _FramingError):
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)


def parse_route(routes: dict[bytes, tuple[str, str] | None], url: bytes) -> tuple[str, str] | None:
    """(model, version) of an infer URL, None for any other URL. Remembers short URLs in `routes`, which stays bounded."""
    match = _INFER.fullmatch(url)
    route = None
    if match is not None:
        model = urllib.parse.unquote(match[1].decode("latin-1"))
        # Triton reads 01 as 1. A number that is too long for a version is refused by the catalog.
        version = (match[2] or b"").decode()
        route = (model, version.lstrip("0") or version[:1])
    if len(url) <= _MAX_CACHED_URL_BYTES:
        if len(routes) >= MAX_CACHED_ROUTES:
            routes.clear()  # a client with ever new URLs must not keep those of others out for good
        routes[url] = route
    return route
