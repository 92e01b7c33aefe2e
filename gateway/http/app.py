"""The ASGI application: every HTTP route except infer, which `weir.gateway.http.protocol` answers before ASGI.

Source: KServe v2 and Triton's URL table. Bodies of errors are `{"error": "<text>"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.access.policy.actions import Action
from weir.gateway.context import GatewayContext
from weir.gateway.http.admin import (
    metadata_routes,
    repository_routes,
    settings_routes,
    shared_memory_routes,
    statistics_routes,
)
from weir.gateway.http.async_requests import job_routes
from weir.gateway.http.batch_jobs import batch_job_routes
from weir.gateway.http.generate import generate_routes
from weir.gateway.http.openapi.routes import openapi_routes
from weir.gateway.http.routing import MODEL_PATHS
from weir.gateway.http.traffic import history_routes
from weir.http_server.door import HttpDoor
from weir.http_server.responses import error_response, weir_error_response
from weir.http_server.routing import Route
from weir.schemas.core.errors import WeirError


def make_app(context: GatewayContext, more_routes: Iterable[Route] = ()) -> Starlette:
    """The application for this gateway. `more_routes` are those of its features."""
    app = Starlette(
        routes=[
            *batch_job_routes(context),
            *statistics_routes(context),
            *metadata_routes(context),
            *generate_routes(context),
            *repository_routes(context),
            *shared_memory_routes(context),
            *settings_routes(context),
            *more_routes,
            *history_routes(context),
            *job_routes(context),
            *openapi_routes(context),
            *_infer_routes(),
        ],
        exception_handlers={
            WeirError: _on_weir_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )
    app.router.redirect_slashes = False
    app.state.door = HttpDoor(context.gate, weir_error_response)
    access, cross_site = context.access, context.cross_site
    app.add_middleware(
        Gatekeeper, rejection=lambda scope: cross_site.rejection(scope["method"], scope["path"], scope["headers"])
    )
    if access.http:
        # Whether or not the resource exists.
        app.add_middleware(Gatekeeper, rejection=lambda scope: access.http_rejection(scope["path"], scope["headers"]))
    return app


class Gatekeeper:
    """Middleware: answers with 403 the requests for which `rejection` returns a reason; it takes their ASGI scope."""

    def __init__(self, app: ASGIApp, rejection: Callable[[Scope], str]) -> None:
        self._app = app
        self._rejection = rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or passes it on."""
        reason = self._rejection(scope)
        await (error_response(403, reason) if reason else self._app)(scope, receive, send)


def _infer_routes() -> list[Route]:
    async def infer(_request: Request) -> Response:
        # POST is answered before ASGI.
        return error_response(405, "Method Not Allowed")

    others = ["GET", "PUT", "DELETE", "PATCH"]
    return [Route(f"{prefix}/infer", infer, Action.INFER, methods=others) for prefix in MODEL_PATHS]


async def _on_weir_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, WeirError)  # noqa: S101 - registered for nothing else
    return weir_error_response(error)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response()  # is not sent: the client has disconnected


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    texts = {404: "Not Found", 405: "Method Not Allowed"}
    return error_response(error.status_code, texts.get(error.status_code, error.detail))
