"""What the rooms of HTTP routes share: how a route is made, what it is asked with, and the form of its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from schemas.errors import WeirError
from schemas.kserve_response import error_body

Handler = Callable[[Request], Awaitable[Response]]


class _Digits(Convertor[str]):
    """A number of any length, without zeros before it: Starlette's own raises where it is too long for int()."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value.lstrip("0") or "0"

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("digits", _Digits())

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
