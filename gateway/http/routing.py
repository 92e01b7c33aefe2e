"""What the rooms of HTTP routes share: how a route is made, what it is asked with, and the form of its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from schemas.errors import WeirError, invalid
from schemas.kserve_response import error_body
from schemas.request_errors import too_large

Handler = Callable[[Request], Awaitable[Response]]


class _Digits(Convertor[str]):
    """A number of any length, without zeros before it: Starlette's own raises where it is too long for int()."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value.lstrip("0") or "0"

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("digits", _Digits())

MAX_SHORT_BODY_BYTES = 1 << 20
"""The largest body of a request that holds settings: it is read in the event loop."""

MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:digits}")
"""Where a model's routes begin: without and with a version."""


def get(path: str, handler: Handler) -> Route:
    """A route for GET alone."""
    return Route(path, handler, methods=["GET"])


def post(path: str, handler: Handler) -> Route:
    """A route for POST alone."""
    return Route(path, handler, methods=["POST"])


def named(request: Request) -> tuple[str, str]:
    """(model, version) of the URL; "" for a version that it does not name."""
    return request.path_params["model"], request.path_params.get("version", "")


async def short_body(request: Request) -> memoryview:
    """The body of a request that holds settings, never tensors. Raises WeirError for one of more than 1 MiB."""
    too_long = invalid(f"the request body exceeds the {MAX_SHORT_BODY_BYTES} bytes that are allowed here")
    return await received_body(request, MAX_SHORT_BODY_BYTES, too_long)


async def received_body(request: Request, limit_bytes: int, too_long: WeirError | None = None) -> memoryview:
    """The whole body. Raises `too_long`, or WeirError (INVALID_ARG), for one of more than `limit_bytes`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise too_long or too_large("request JSON size", len(body), limit_bytes)
    return memoryview(body)


def json_answer(content: Any) -> Response:
    """200 with a JSON body."""
    return Response(orjson.dumps(content), media_type="application/json")


def error_answer(status: int, message: str) -> Response:
    """Triton's form of an error."""
    return Response(error_body(message), status_code=status, media_type="application/json")


def weir_error_answer(error: WeirError) -> Response:
    """The same of an error of ours, which may tell when to come again."""
    answer = error_answer(error.http_status, error.message)
    if error.retry_after_s:
        answer.headers["Retry-After"] = str(error.retry_after_s)
    return answer
