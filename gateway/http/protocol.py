"""`HttpProtocol`: uvicorn's HTTP protocol, with the infer route answered in it, ahead of ASGI.

ASGI costs about 40 us a request, half of what a gateway may use; the infer route is where that matters. All other
routes go to the ASGI application as always. Pipelined requests keep their order, whichever way each of them goes.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.doors import Doors
from gateway.http.exchange import InferExchange

_INFER = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?")
_MAX_CACHED_ROUTES = 4096

MAX_HEADERS = 128
MAX_HEAD_BYTES = 64 * 1024
"""URL and headers of one request together; requests with more are answered with 400, and their connection ends."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. `doors` are shared by all of them, and so is `routes`, a cache of parsed infer URLs."""

    def __init__(self, doors: Doors, routes: dict[bytes, tuple[str, str] | None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._doors = doors
        self._routes = routes
        self._idle_since_s = 0.0
        self._head_bytes = 0

    # Parser callbacks

    def on_message_begin(self) -> None:
        """The ASGI scope is made only for requests that go to ASGI."""
        self.url = b""
        self.headers = []
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """See uvicorn's protocol; bounded."""
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too long")  # the parser makes it a 400, and the connection ends
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See uvicorn's protocol; bounded."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            raise ValueError("the request's head is too long")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Decides which way the request goes."""
        url = self.url
        try:
            route = self._routes[url]
        except KeyError:
            route = self._parse_route(url)
        if route is None or self.parser.get_method() != b"POST":
            headers = self.headers
            super().on_message_begin()
            self.url = url
            self.headers.extend(headers)
            self.expect_100_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in headers)
            super().on_headers_complete()
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        previous: Any = self.cycle
        exchange = InferExchange(
            self._doors, self.transport, *route, self.headers, keep_alive, self.on_response_complete
        )
        self.cycle = exchange  # type: ignore[assignment]
        if previous is None or previous.response_complete:
            exchange.start()
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        """See uvicorn's protocol."""
        cycle: Any = self.cycle
        if type(cycle) is InferExchange:
            if not cycle.response_complete:
                cycle.receive(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See uvicorn's protocol."""
        cycle: Any = self.cycle
        if type(cycle) is InferExchange:
            if not cycle.response_complete:
                cycle.complete()
        else:
            super().on_message_complete()

    # Connection events

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandons what was asked on this connection."""
        for cycle, _ in [(self.cycle, None), *self.pipeline]:
            if isinstance(cycle, InferExchange) and not cycle.response_complete:
                cycle.disconnect()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """As uvicorn's, but the timer of an idle connection is looked at when it is due, not set for each response."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
            return
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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
        if type(cycle) is InferExchange:
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    def _parse_route(self, url: bytes) -> tuple[str, str] | None:
        match = _INFER.fullmatch(url)
        route = None
        if match is not None:
            model = urllib.parse.unquote(match[1].decode("latin-1"))
            route = (model, (match[2] or b"").decode())
        if len(self._routes) < _MAX_CACHED_ROUTES:
            self._routes[url] = route
        return route
