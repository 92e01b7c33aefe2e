"""`HttpConnection`: the server's side of one HTTP/1.1 connection, parsed by httptools.

It bounds what a client can send before anything reads it (URL and headers, chunks, bytes in memory), keeps pipelined
requests in their order, and stops reading while responses wait for the client. What answers a request is an
`HttpExchange`: here the ASGI application, in subclasses also faster ones. `ClientConnection` closes the connection.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import httptools

from weir.http_server.asgi import CERTIFICATE_KEY, AsgiExchange, HttpExchange, RecordsRequests
from weir.http_server.body_reader import DIRECT_FROM_BYTES, BodyReader, exchange_protocol
from weir.http_server.client_connection import ClientConnection, ConnectionLimits
from weir.http_server.connection_cap import IDLE_S
from weir.http_server.connection_memory import no_memory
from weir.http_server.stall_detection import StallDetector, StalledRequestError
from weir.runtime.containment import report
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.names import routed_path

MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 * 1024
"""URL and headers of one request together; requests with more are answered with 400, and their connection ends. So many
bytes may also come within a chunked body without a byte of it, in trailers and in extensions of chunks."""

MAX_CHUNKS = 65_536
"""Non-empty chunks of one request's body; Triton's limit. Each costs far more than the byte it may carry."""

_EARLY_REJECTION_BYTES = 64 * 1024  # smaller bodies are rejected only when their bytes arrive


class RequestHeadError(ValueError):
    """The URL or the headers of a request are not acceptable; its connection ends with a 400."""


class _RejectedRequest:
    """Takes the place of a request that can't be parsed until the requests before it are answered."""

    keep_alive = more_body = response_complete = False
    received_bytes = 0

    def __init__(self, connection: HttpConnection, error: WeirError) -> None:
        self._connection = connection
        self._error = error

    def start(self) -> None:
        """Answers with the error and closes the connection."""
        self._connection.write_and_close(self._error)

    def receive(self, *_: object, **_named: object) -> None:
        """Does nothing: the body is dropped, and no work is under way that could be rejected or cancelled."""

    body_space = filled = complete = reject = disconnect = receive


class HttpConnection(ClientConnection):
    """One connection, in `connections` while it is open. `app` is the ASGI application."""

    access_log: RecordsRequests | None = None
    """Gets a line for each request."""
    door = "http"
    """The name of the port in those lines."""

    def __init__(self, app: Any, limits: ConnectionLimits, connections: set[HttpConnection]) -> None:
        super().__init__(limits, connections)
        self.app = app
        self.max_body_bytes = limits.max_body_bytes
        self.parser: Any = self._new_parser()
        self._unanswered: deque[HttpExchange] = deque()  # oldest first; only the first one is started
        self._latest: HttpExchange | None = None  # of the request that was parsed last: body bytes belong to it
        self._is_stopping = False
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """The headers of the request that is being parsed: (lower-case name, value)."""
        self.raw_headers: list[tuple[bytes, bytes]] | None = None
        """The same with the names as the client wrote them, for subclasses that set it."""
        self.has_prefer = False
        self._head_bytes = 0
        self._arrived_head_bytes = 0  # of a head that arrives in several pieces
        self._head_charged_bytes = 0
        self._is_in_head = False
        self._is_in_body = False
        self._has_read_body = False  # in the last piece that was read
        self._chunks = 0
        self._passed_over_bytes = 0
        self._arrival = StallDetector()
        self._arriving: HttpExchange | None = None  # the request whose body `_arrival` watches
        self._is_held = False  # until the client has read what it was sent

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # A client may pipeline requests behind one with `Connection: close`: they are read, and never answered.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # Parser callbacks

    def on_message_begin(self) -> None:
        """Resets what is counted for each request."""
        self.url = b""
        self.headers = []
        self._head_bytes = self._chunks = self._passed_over_bytes = self._arrived_head_bytes = 0
        self._is_in_head = True
        self.has_prefer = False
        if self.raw_headers is not None:
            self.raw_headers = []

    def on_url(self, url: bytes) -> None:
        """Appends a piece of the URL. Raises RequestHeadError."""
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Appends a header; drops a trailer. Raises RequestHeadError."""
        if not self._is_in_head:
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            raise _head_too_large()
        lower_name = name.lower()
        self.headers.append((lower_name, value))
        if lower_name == b"prefer":
            self.has_prefer = True
        if self.raw_headers is not None:
            self.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Makes the exchange of the request and starts it, or queues it behind the requests before it."""
        self._is_in_head = False
        self._is_in_body = True
        if self._arrived_head_bytes or self._head_charged_bytes:
            self._release_head()
        if self._is_rejecting:
            return
        parser = self.parser
        keep_alive = not self._is_stopping and parser.get_http_version() != "1.0" and parser.should_keep_alive()
        exchange = self._latest = self.make_exchange(keep_alive)
        self.has_served = True
        self._unanswered.append(exchange)
        if self._is_held or len(self._unanswered) > 1:
            self.pause_reading()
        elif type(exchange) is not AsgiExchange or not self._rejects_announced_size():
            exchange.start()

    def on_chunk_header(self) -> None:
        """Counts the chunks of the body."""
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        """Passes a piece of the body to its exchange, or drops it if the request is answered already."""
        exchange = self._latest
        self._has_read_body = True
        if self._is_rejecting or exchange is None:
            return
        if self._chunks > MAX_CHUNKS:
            self.reject(invalid(f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks."))
        elif not exchange.response_complete:
            exchange.receive(body)
        else:
            self._passed_over_bytes += len(body)
            self._idle_since_s = self.loop.time()
            if self._passed_over_bytes > self.max_body_bytes:
                self.transport.close()

    def on_message_complete(self) -> None:
        """The body of the request is complete."""
        self._is_in_body = False
        if self._arrived_head_bytes or self._head_charged_bytes:
            self._release_head()
        if self._latest is not None and not self._latest.response_complete:
            self._latest.complete()

    def make_exchange(self, keep_alive: bool) -> HttpExchange:
        """The exchange of the request whose head is complete. Raises RequestHeadError for a URL that can't be parsed."""
        try:
            url = httptools.parse_url(self.url)
            raw_path = url.path or b"/"
            path = raw_path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as error:
            raise RequestHeadError("the URL can't be parsed") from error
        server, client = (self.transport.get_extra_info(name) for name in ("sockname", "peername"))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.parser.get_http_version(),
            "server": server and tuple(server[:2]),
            "client": client and tuple(client[:2]),
            "scheme": "https" if self.is_encrypted else "http",
            "root_path": "",
            "method": self.parser.get_method().decode("ascii"),
            "path": routed_path(path),
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": {},
            CERTIFICATE_KEY: self.certificate,
        }
        return AsgiExchange(self, scope, keep_alive)

    def _rejects_announced_size(self) -> bool:
        """Rejects a request for the application whose announced body finds no room now."""
        length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        if length <= _EARLY_REJECTION_BYTES or self.memory.account.fits(length):
            return False
        self.memory.account.refuse("http")
        self.reject(no_memory(), lingers=True)
        return True

    def reject(self, error: WeirError, lingers: bool = False) -> None:
        """Answers the latest request, whose body is not read to its end, with `error`, and ends the connection.

        With `lingers` the connection ends only after `DISCARD_S`.
        """
        if self._is_rejecting:
            return
        self._is_rejecting = True
        if self._latest is None or self._latest.response_complete:
            self.transport.close()
        else:
            self._latest.reject(error, lingers)

    # Reading and writing

    def data_received(self, data: bytes) -> None:
        """Parses `data`. A request that can't be parsed is answered with 400, and ends this connection alone."""
        if self._is_rejecting:
            return
        self.turns.count(len(data))
        self._has_read_body = False
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._feed(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(cause, RequestHeadError):
                report("weir.http_server.connection: parsing a request", error)
                self._reject_framing(internal("internal server error"))
            else:
                self._reject_framing(_malformed(str(cause or error)))
        else:
            if self._is_in_head:
                self._charge_head(len(data))
            elif self._is_in_body and not self._has_read_body:
                self._charge_framing(len(data))
            else:
                if self._head_charged_bytes:
                    self._release_head()
                if self._latest is not None and self._latest.more_body:
                    self._read_body_directly(self._latest)

    def _feed(self, rest: memoryview) -> None:
        """Passes what follows a request to switch protocols to the parser. Raises HttpParserError.

        Such a request, as clients send that prefer HTTP/2, is served as it is. The parser takes a body of it for what
        follows it, so one with a body is rejected.
        """
        while rest and not self._is_rejecting:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]

    def _read_body_directly(self, exchange: HttpExchange) -> None:
        """Receives the rest of the body in the memory that the exchange has for it, if it has some and much is to come."""
        space = exchange.body_space()
        if space is None or len(space) < DIRECT_FROM_BYTES or self._is_rejecting or self.transport.is_closing():
            return
        reader = BodyReader(self, exchange, len(space), self._end_direct_body)
        exchange_protocol(self.transport, reader, self._is_read_paused)

    def _end_direct_body(self) -> None:
        """The body that a `BodyReader` has received is complete: what follows is the head of the next request."""
        # The parser has not seen the end of the body, so the next request gets another one.
        self.parser = self._new_parser()
        exchange_protocol(self.transport, self, self._is_read_paused)
        self._idle_since_s = self.loop.time()
        self.on_message_complete()

    def _charge_head(self, size: int) -> None:
        """Charges what has arrived of a head that is not complete. `size` is that of the last piece.

        The parser reports a header only once it is complete, so an endless one is bounded here.
        """
        if self._arrived_head_bytes:
            self._arrived_head_bytes += size
        else:
            self._arrived_head_bytes = max(1, self._head_bytes)
            self._arrival.reset()
        if self._arrived_head_bytes > MAX_HEAD_BYTES:
            self._reject_framing(_malformed(str(_head_too_large())))
        elif not self._charge_arrived():
            self._is_rejecting = True
            self.write_and_close(no_memory())

    def _charge_framing(self, size: int) -> None:
        """Charges what has arrived of a trailer, which the parser holds until it is complete, or of a chunk's extension."""
        self._arrived_head_bytes += size
        if self._arrived_head_bytes > MAX_HEAD_BYTES:
            self.reject(_malformed(f"a trailer, or the extension of a chunk, exceeds {MAX_HEAD_BYTES} bytes"))
        elif not self._charge_arrived():
            self.reject(no_memory())

    def _charge_arrived(self) -> bool:
        size = self._arrived_head_bytes - self._head_charged_bytes
        if not self.memory.account.charge("http", size):
            return False
        self._head_charged_bytes += size
        return True

    def _release_head(self) -> None:
        """What the parser has held of a head, or within a body, is complete."""
        self._arrived_head_bytes = 0
        if self._head_charged_bytes:
            self.memory.account.release("http", self._head_charged_bytes)
            self._head_charged_bytes = 0

    def _reject_framing(self, error: WeirError) -> None:
        """Answers what can't be parsed with `error`, once the requests before it are answered, and ends the connection."""
        latest = self._latest
        if latest is None or latest.response_complete:
            self.write_and_close(error)
        elif latest.more_body:
            self.reject(error)  # the rest of its body can't be read
        else:
            self._unanswered.append(_RejectedRequest(self, error))
        self._is_rejecting = True

    def is_next(self, exchange: HttpExchange) -> bool:
        """Whether all requests before that of `exchange` are answered."""
        return bool(self._unanswered) and self._unanswered[0] is exchange

    def on_response_complete(self) -> None:
        """The first of the unanswered requests is answered: starts the next one once the client reads its responses."""
        self._unanswered.popleft()
        if self.transport.is_closing():
            return
        if self.is_write_paused:
            # Responses to a client that goes on sending, and reads none of them, would fill the memory.
            self._is_held = True
            self.pause_reading()
            return
        self._continue()

    def _continue(self) -> None:
        """Starts the next request in a turn of its own: a thousand rejections would start each other otherwise."""
        if self._unanswered:
            self.loop.call_soon(self._start_next)
            return
        self.resume_reading()
        self._idle_since_s = self.loop.time()

    def _start_next(self) -> None:
        """Starts the pipelined request whose turn it is, unless the connection was lost meanwhile."""
        if not self._unanswered or self.transport.is_closing():
            return
        if len(self._unanswered) == 1:
            self.resume_reading()
        self._unanswered[0].start()

    # Connection events

    def idle_s(self) -> float:
        """Implements `CappedConnection.idle_s`. The head of the first request may take `IDLE_S`."""
        idle_s = self.loop.time() - self._idle_since_s
        if self._latest is None:
            return idle_s - IDLE_S if self._is_in_head else idle_s
        is_busy = self._unanswered or self._is_in_head or self.is_write_paused or self._latest.more_body
        return 0.0 if is_busy else idle_s

    def is_within_request(self) -> bool:
        """Whether the head of a request is arriving, or one is not answered yet."""
        return bool(self._unanswered) or self._is_in_head

    def end_requests(self) -> None:
        """Cancels the requests of this connection that have no response yet."""
        for exchange in self._unanswered:
            exchange.disconnect()
        self._unanswered.clear()
        self.parser = None  # it refers to this connection

    def resume_writing(self) -> None:
        """The client has read enough of what it was sent: goes on with its requests."""
        super().resume_writing()
        if self._is_held:
            self._is_held = False
            self._continue()

    def shutdown(self) -> None:
        """The server stops: the next response ends the connection, which is closed if it stays idle for `linger_s`."""
        self._is_stopping = True
        if self._latest is not None and not self._latest.response_complete:
            self._latest.keep_alive = False
        if self._limits.linger_s:
            self.loop.call_later(self._limits.linger_s, self._close_if_idle)
        else:
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._latest is None or self._latest.response_complete:
            self.close_idle()

    def check_arrival(self, now_s: float) -> None:
        """Ends the connection if its client has stopped sending a request."""
        latest = self._latest
        if self._is_read_paused or self._is_rejecting:
            self._arrival.reset()
        elif self._is_in_head:
            if self._arrival.is_stalled(now_s, self._arrived_head_bytes):
                self._is_rejecting = True
                self.write_and_close(StalledRequestError())
        elif latest is not None and not latest.response_complete and latest.more_body:
            if latest is not self._arriving:
                self._arriving = latest
                self._arrival.reset()
            if self._arrival.is_stalled(now_s, latest.received_bytes):
                self.reject(StalledRequestError())
        else:
            self._arrival.reset()


def _head_too_large() -> RequestHeadError:
    return RequestHeadError(f"URL and headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers")


def _malformed(reason: str) -> WeirError:
    return invalid(f"malformed HTTP request: {reason}")
