"""The ASGI application: every HTTP route but infer, which `gateway.http.protocol` answers ahead of it.

Source: KServe v2 and Triton's URL table. Bodies of errors are `{"error": "<text>"}`.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access import Access
from gateway.doors import Doors
from gateway.http.batch_job_routes import batch_job_routes
from gateway.http.cross_site import CrossSiteCheck
from gateway.http.generate_routes import generate_routes
from gateway.http.job_routes import job_routes
from gateway.http.metadata_routes import metadata_routes
from gateway.http.repository_routes import repository_routes
from gateway.http.routing import MODEL_PATHS, error_answer, weir_error_answer
from gateway.http.settings_routes import settings_routes
from gateway.http.shared_memory_routes import shared_memory_routes
from gateway.http.statistics_routes import statistics_routes
from schemas.errors import WeirError


def make_app(doors: Doors) -> Starlette:
    """The application over these doors."""
    app = Starlette(
        routes=[
            *batch_job_routes(doors),
            *statistics_routes(doors),
            *metadata_routes(doors),
            *generate_routes(doors),
            *repository_routes(doors),
            *shared_memory_routes(doors),
            *settings_routes(doors),
            *job_routes(doors),
            *_infer_routes(),
        ],
        exception_handlers={
            WeirError: _on_weir_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
    )
    app.router.redirect_slashes = False
    app.add_middleware(SameSiteRoutes, check=doors.cross_site)
    if doors.access.http:
        app.add_middleware(RestrictedRoutes, access=doors.access)
    return app


class RestrictedRoutes:
    """Middleware: what is restricted is answered with 403, before it is looked at whether there is such a thing."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        refusal = self._access.http_refusal(scope["path"], scope["headers"])
        await (error_answer(403, refusal) if refusal else self._app)(scope, receive, send)


class SameSiteRoutes:
    """Middleware: answers with 403 what a foreign web page has a browser send (`gateway.http.cross_site`)."""

    def __init__(self, app: ASGIApp, check: CrossSiteCheck) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Source: the ASGI specification."""
        refusal = self._check.refusal(scope["method"], scope["path"], scope["headers"])
        await (error_answer(403, refusal) if refusal else self._app)(scope, receive, send)


def _infer_routes() -> list[Route]:
    async def infer(_request: Request) -> Response:
        # Only a verb other than POST gets here.
        return error_answer(405, "Method Not Allowed")

    return [Route(f"{prefix}/infer", infer, methods=["GET", "PUT", "DELETE", "PATCH"]) for prefix in MODEL_PATHS]


async def _on_weir_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, WeirError)  # noqa: S101 - registered for nothing else
    return weir_error_answer(error)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response()  # goes nowhere


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    texts = {404: "Not Found", 405: "Method Not Allowed"}
    return error_answer(error.status_code, texts.get(error.status_code, error.detail))
