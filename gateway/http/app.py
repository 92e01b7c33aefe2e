"""The ASGI application: every HTTP route but infer, which `gateway.http.protocol` answers ahead of it.

Source: KServe v2 and Triton's URL table. Bodies of errors are `{"error": "<text>"}`.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.metadata_routes import metadata_routes
from gateway.http.routing import MODEL_PATHS, error_answer
from gateway.http.statistics_routes import statistics_routes
from schemas.errors import WeirError


def make_app(doors: Doors) -> Starlette:
    """The application over these doors."""
    app = Starlette(
        routes=[*statistics_routes(doors), *metadata_routes(doors), *_infer_routes()],
        exception_handlers={WeirError: _on_weir_error, HTTPException: _on_http_error},
    )
    app.router.redirect_slashes = False
    return app


def _infer_routes() -> list[Route]:
    async def infer(_request: Request) -> Response:
        # Only a verb other than POST gets here.
        return error_answer(405, "Method Not Allowed")

    return [Route(f"{prefix}/infer", infer, methods=["GET", "PUT", "DELETE", "PATCH"]) for prefix in MODEL_PATHS]


async def _on_weir_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, WeirError)  # noqa: S101 - registered for nothing else
    return error_answer(error.http_status, error.message)


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    texts = {404: "Not Found", 405: "Method Not Allowed"}
    return error_answer(error.status_code, texts.get(error.status_code, error.detail))
