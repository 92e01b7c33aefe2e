"""`HttpProtocol`: an HTTP connection of a gateway. The infer route is answered here, ahead of ASGI.

ASGI costs about 40 us a request, half of what a gateway may use; the infer route is where that matters. All other
routes go to the ASGI application. Pipelined requests keep their order, whichever way each of them takes.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from weir.durable.api.options import prefers_async
from weir.gateway.context import GatewayContext
from weir.gateway.http.exchange import InferExchange
from weir.http_server.asgi import HttpExchange
from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection

_INFER = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/([0-9]+))?/infer(?:\?.*)?")
MAX_CACHED_ROUTES = 4096
_MAX_CACHED_URL_BYTES = 256

LINGER_S = 5.0
"""How long an idle connection stays open when the server stops, for a client that is about to use it."""


class HttpProtocol(HttpConnection):
    """One connection. All connections share `context`, and `routes`, a cache of parsed infer URLs."""

    def __init__(
        self,
        context: GatewayContext,
        routes: dict[bytes, tuple[str, str] | None],
        app: Any,
        connections: set[HttpConnection],
    ) -> None:
        limits = ConnectionLimits(
            ledger=context.ledger,
            arriving_slots=context.arriving_slots,
            cap=context.connection_cap,
            max_body_bytes=context.limits.input_size,
            linger_s=LINGER_S,
        )
        super().__init__(app, limits, connections)
        self._context = context
        self._routes = routes
        self.access_log = context.access_log
        if context.access.forwards_http:
            self.raw_headers = []

    def make_exchange(self, keep_alive: bool) -> HttpExchange:
        """An `InferExchange` for a request on the infer route that is answered at once; for others as `HttpConnection`."""
        try:
            route = self._routes[self.url]
        except KeyError:
            route = parse_route(self._routes, self.url)
        if (
            route is None
            or self.parser.get_method() != b"POST"
            or (self._context.access.http and self._context.access.rejects_inference(self.headers))
            or (self.has_prefer and prefers_async(self.headers))
        ):
            return super().make_exchange(keep_alive)
        return InferExchange(self._context, self, *route, keep_alive, dict(self.headers))


def parse_route(routes: dict[bytes, tuple[str, str] | None], url: bytes) -> tuple[str, str] | None:
    """(model, version) of an infer URL, None for any other URL. Caches short URLs in `routes`, which stays bounded."""
    route = infer_route(url)
    if len(url) <= _MAX_CACHED_URL_BYTES:
        if len(routes) >= MAX_CACHED_ROUTES:
            routes.clear()  # a client that never repeats a URL must not keep those of others out for good
        routes[url] = route
    return route


def infer_route(url: bytes) -> tuple[str, str] | None:
    """(model, version) of an infer URL, version "" where it names none; None for any other URL."""
    match = _INFER.fullmatch(url)
    if match is None:
        return None
    # Triton reads 01 as 1. A number that is too long for a version is rejected by the catalog.
    version = (match[2] or b"").decode()
    return urllib.parse.unquote(match[1].decode("latin-1")), version.lstrip("0") or version[:1]
