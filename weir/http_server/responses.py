"""Error responses of ASGI applications, with Triton's body."""

from __future__ import annotations

from starlette.responses import Response

from weir.http_server.asgi import CHALLENGES
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.kserve.response import error_body


def error_response(status: int, message: str) -> Response:
    """A response with Triton's error body."""
    return Response(error_body(message), status_code=status, media_type="application/json")


def weir_error_response(error: WeirError) -> Response:
    """The response to `error`, with `Retry-After` if the error suggests a delay."""
    response = error_response(error.http_status, error.message)
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    for name, value in error.headers:
        response.headers[name] = value
    if error.code is ErrorCode.UNAUTHENTICATED:
        for challenge in CHALLENGES:
            response.headers.append("WWW-Authenticate", challenge)
    return response
