"""The ASGI application: every HTTP route but infer, which `http_protocol` answers ahead of it.

Source: KServe v2 and Triton's URL table. Bodies of errors are `{"error": "<text>"}`; health and readiness answer with an
empty body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.server_info import model_metadata, server_metadata
from repository.config_text import config_to_json
from schemas.errors import WeirError
from schemas.kserve_response import error_body

_Handler = Callable[[Request], Awaitable[Response]]


def make_app(doors: Doors) -> Starlette:
    """The application over these doors."""
    catalog = doors.catalog

    async def server(_request: Request) -> Response:
        return _json(server_metadata(doors.server_id))

    async def live(_request: Request) -> Response:
        return Response(status_code=200)

    async def ready(_request: Request) -> Response:
        return Response(status_code=200 if catalog.server_ready() else 400)

    async def model(request: Request) -> Response:
        name, version = _named(request)
        return _json(model_metadata(catalog.resolve(name, version), version))

    async def model_config(request: Request) -> Response:
        return _json(config_to_json(catalog.resolve(*_named(request)).config))

    async def model_ready(request: Request) -> Response:
        if catalog.is_ready(*_named(request)):
            return Response(status_code=200)
        return _error(400, "Model version not ready")

    async def infer(_request: Request) -> Response:
        # Only a verb other than POST gets here.
        return _error(405, "Method Not Allowed")

    routes = [
        _get("/v2", server),
        _get("/v2/health/live", live),
        _get("/v2/health/ready", ready),
    ]
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version:int}"):
        routes += [
            _get(prefix, model),
            _get(f"{prefix}/ready", model_ready),
            _get(f"{prefix}/config", model_config),
            Route(f"{prefix}/infer", infer, methods=["GET", "PUT", "DELETE", "PATCH"]),
        ]
    app = Starlette(
        routes=routes,
        exception_handlers={WeirError: _on_weir_error, HTTPException: _on_http_error},
    )
    app.router.redirect_slashes = False
    return app


def _get(path: str, handler: _Handler) -> Route:
    return Route(path, handler, methods=["GET"])


def _named(request: Request) -> tuple[str, str]:
    version = request.path_params.get("version")
    return request.path_params["model"], "" if version is None else str(version)


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _error(status: int, message: str) -> Response:
    return Response(error_body(message), status_code=status, media_type="application/json")


async def _on_weir_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, WeirError)  # noqa: S101 - registered for nothing else
    return _error(error.http_status, error.message)


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    return _error(error.status_code, {404: "Not Found", 405: "Method Not Allowed"}.get(error.status_code, error.detail))
