"""`make_app`: the console's ASGI application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.console.api.acting import acting_routes
from weir.console.api.context import AUTHORIZATION, ConsoleContext
from weir.console.api.dead_letters import dead_letter_routes
from weir.console.api.inference import inference_routes
from weir.console.api.page import page_routes
from weir.console.api.reading import reading_routes
from weir.console.api.requests import request_routes
from weir.console.api.responses import error_response
from weir.http_server.door import HttpDoor, first_header
from weir.http_server.own_hosts import OwnHosts
from weir.http_server.responses import weir_error_response
from weir.http_server.routing import Route

_COMPRESSED_BYTES = 4096
_COMPRESSION_LEVEL = 1


def make_app(context: ConsoleContext, address: str, allowed_hosts: Sequence[str] = ()) -> Starlette:
    """The application of a console that listens on `address`.

    `allowed_hosts` are further names of its host (`OwnHosts`). Raises ValueError for one that is none.
    """
    app = Starlette(
        routes=[
            *page_routes(),
            *reading_routes(context),
            *acting_routes(context),
            *inference_routes(context),
            *request_routes(context),
            *dead_letter_routes(context),
        ],
        middleware=[
            Middleware(OwnPageCheck, hosts=OwnHosts(allowed_hosts, address)),
            Middleware(GZipMiddleware, minimum_size=_COMPRESSED_BYTES, compresslevel=_COMPRESSION_LEVEL),
        ],
    )
    app.state.door = ConsoleDoor(context.gate, weir_error_response, "console")
    return app


class ConsoleDoor(HttpDoor):
    """The door of the console. A request that it lets in is sent on to gateways as that of the same principal."""

    async def rejection(self, scope: Scope, route: Route) -> ASGIApp | None:
        """Implements `Door.rejection`."""
        AUTHORIZATION.set(first_header(scope["headers"], b"authorization").decode("latin-1"))
        return await super().rejection(scope, route)


class OwnPageCheck:
    """Middleware that rejects requests whose `Host` header is not a name of this server, and those for data that another
    site's page makes a browser send: that page can't read the response, but an answer takes work of the whole cluster.

    Source: Fetch Metadata Request Headers; browsers send `Sec-Fetch-Site` to trustworthy addresses, localhost among them.
    """

    def __init__(self, app: ASGIApp, hosts: OwnHosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an own request on, and answers others with 400 or 403."""
        app = self._app if scope["type"] != "http" else self._rejection(scope) or self._app
        await app(scope, receive, send)

    def _rejection(self, scope: Scope) -> ASGIApp | None:
        headers = dict(scope.get("headers", ()))
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if not self._hosts.accepts(host):
            text = f"the host '{host[:200]}' is not a name of this server; --allowed-hosts admits further names"
            return error_response(400, text)
        site = headers.get(b"sec-fetch-site", b"none").decode("latin-1").strip().lower()
        if scope["path"].startswith("/api/") and site not in ("same-origin", "none"):
            return error_response(403, f"a request from another site ('{site[:200]}') is refused")
        return None
