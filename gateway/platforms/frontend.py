"""The HTTP protocols of managed services: a port of its own on which their requests become requests of Weir's own API.

A `Platform` names the target of each request: `POST /invocations` means `POST /v2/models/<model>/infer`. Inference is
answered as on the HTTP port (`InferExchange`); everything else goes to the same ASGI application, so restrictions and
cross-site checks apply to the target and hold on every port.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from weir.access.gate import Asked, Gate
from weir.access.policy.actions import Action
from weir.calls.catalog import Catalog
from weir.gateway.context import GatewayContext
from weir.gateway.http.exchange import InferExchange
from weir.gateway.http.protocol import HttpProtocol, infer_route
from weir.http_server.asgi import EXCHANGE_KEY, HttpExchange
from weir.http_server.connection import HttpConnection
from weir.http_server.door import shown_in
from weir.http_server.responses import error_response, weir_error_response
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.names import routed_path

Headers = Iterable[tuple[bytes, bytes]]

METRICS_PATH = "/metrics"
"""The target that the metrics application answers."""

_HEADER_LENGTH = b"inference-header-content-length"
_CONTENT_TYPE = b"content-type"
_UNSUPPORTED_HEADERS = frozenset([_HEADER_LENGTH, b"accept-encoding"])
"""Headers of Triton's HTTP protocol that these protocols do not have, as in Triton."""


class Target(NamedTuple):
    """A request of Weir's own API: method and path. `status_of` names the status of errors, if it is not Triton's."""

    method: str
    path: str
    status_of: Callable[[WeirError], int] | None = None


class Platform(Protocol):
    """The protocol of one managed service."""

    service: str
    """Its name in the log and in errors."""

    door: str
    """Its name in the access log."""

    media_type: str
    """The content type, up to the number, of a body that begins with a JSON header of that number of bytes."""

    answers_with_media_type: bool
    """Whether binary responses have that content type too, instead of Triton's header."""

    def target(self, method: str, path: str, headers: Headers) -> Target | None:
        """The target of a request; None for one that the protocol does not have. Raises WeirError."""

    def application(self, path: str) -> ASGIApp | None:
        """The application that answers the requests for `path` that have no target, if the platform has its own."""


class PlatformProtocol(HttpProtocol):
    """A connection to the port of a platform."""

    def __init__(
        self, context: GatewayContext, platform: Platform, app: ASGIApp, connections: set[HttpConnection]
    ) -> None:
        super().__init__(context, {}, app, connections)
        self._platform = platform
        self.door = platform.door

    def make_exchange(self, keep_alive: bool) -> HttpExchange:
        """An `InferExchange` for inference; requests for anything else, and rejected ones, go to the application."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        try:
            target = self._platform.target(self.parser.get_method().decode("ascii"), path, self.headers)
        except WeirError:
            target = None  # the application answers with the same error
        route = None if target is None or target.method != "POST" else infer_route(target.path.encode("latin-1"))
        if route is None or self._context.access.rejects_inference(self.headers):
            return HttpConnection.make_exchange(self, keep_alive)
        fields, rejection = dict(self.headers), None
        try:
            length = read_header_length(fields.get(_CONTENT_TYPE, b"").decode("latin-1"), self._platform.media_type)
        except WeirError as error:
            length, rejection = None, error
        for name in _UNSUPPORTED_HEADERS:
            fields.pop(name, None)
        if length is not None:
            fields[_HEADER_LENGTH] = length.encode()
        exchange = InferExchange(self._context, self, *route, keep_alive, fields)
        exchange.rejection = exchange.rejection or rejection
        exchange.status_of = None if target is None else target.status_of
        if self._platform.answers_with_media_type:
            exchange.binary_head = b"Content-Type: %b%%d\r\n" % self._platform.media_type.encode()
        return exchange


def read_header_length(content_type: str, media_type: str) -> str | None:
    """The number behind `media_type` in a content type, None where the body is JSON only. Raises WeirError."""
    if media_type not in content_type:
        return None
    if not content_type.startswith(media_type):
        raise invalid(f"expect MIME type for binary data starts with '{media_type}', got: {content_type}")
    length = content_type.removeprefix(media_type).strip()
    if not re.fullmatch(r"-?[0-9]{1,18}", length):
        raise invalid(f"Unable to parse inference header size, got: {length}")
    return length


class PlatformApp:
    """The ASGI application of a platform's port: passes each request on to its target.

    `app` answers all targets but the metrics, which `metrics` answers. Both ask `gate`, and so does the sender of a request
    that has no target because of what is served, before it is told so.
    """

    def __init__(self, platform: Platform, app: ASGIApp, metrics: ASGIApp, gate: Gate) -> None:
        self._platform = platform
        self._app = app
        self._metrics = metrics
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request."""
        answer: ASGIApp
        try:
            target = self._platform.target(scope["method"], scope["path"], scope["headers"])
        except WeirError as error:
            answer = weir_error_response(self._refusal(scope) or error)
        else:
            own = self._platform.application(scope["path"]) if target is None else None
            if own is not None:
                answer = own
            elif target is None:
                text = f"{self._platform.service} requests for {scope['method']} {scope['path']} are not served"
                answer = error_response(400, text)
            else:
                path = routed_path(target.path)
                scope = {**scope, "method": target.method, "path": path, "raw_path": quote(path, "/%").encode()}
                if EXCHANGE_KEY in scope:
                    scope[EXCHANGE_KEY].scope = scope
                answer = self._metrics if target.path == METRICS_PATH else self._app
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> WeirError | None:
        """Why its sender may ask no model; None where it may ask some."""
        operation = f"{scope['method']} {scope['path']}"
        asked = Asked(self._platform.service, operation, Action.INFER, is_list=True, reads=True)
        try:
            self._gate.admit(shown_in(scope), asked)
        except WeirError as refusal:
            return refusal
        return None


def default_model(catalog: Catalog, name: str, setting: str) -> str:
    """The model of requests that name none: `name`, or the only one there is. Raises WeirError for several or none.

    `setting` is what selects one, for the error.
    """
    if name:
        return name
    served = catalog.served()
    if len(served) != 1:
        raise catalog.warmup_error(name) or invalid(
            "Expect the model repository contains only a single model if default model is not specified: "
            f"{len(served)} are served, and {setting} names none"
        )
    return served[0].name


def header(headers: Headers, name: bytes) -> str | None:
    """The first header of this name, which is in lower case; None without one."""
    return next((value.decode("latin-1") for key, value in headers if key == name), None)
