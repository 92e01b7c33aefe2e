"""Helpers that all HTTP routes share: route constructors, bounded request bodies, JSON, error and conditional responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.http_server.door import principal_of
from weir.http_server.routing import Handler, Route
from weir.schemas.core.errors import invalid
from weir.schemas.core.request_limits import too_large


class _Digits(Convertor[str]):
    """A number of any length, without leading zeros. Starlette's own converter raises if it is too long for int()."""

    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value.lstrip("0") or "0"

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("digits", _Digits())

MAX_SHORT_BODY_BYTES = 1 << 20
"""The largest body of a request that changes settings; it is parsed in the event loop."""

MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:digits}")
"""The prefixes of a model's routes: without and with a version."""


def get(path: str, handler: Handler, action: Action, *, lists: bool = False) -> Route:
    """A route for GET alone."""
    return Route(path, handler, action, lists=lists)


def post(path: str, handler: Handler, action: Action, *, lists: bool = False) -> Route:
    """A route for POST alone."""
    return Route(path, handler, action, methods=["POST"], lists=lists)


AUTHOR_HEADER = "weir-by"
"""The header in which a client says who makes a change, where no access policy asks for proof."""

MAX_AUTHOR_LENGTH = 200


def author_of(request: Request) -> str:
    """Who makes a change, and the address of its connection; "nats" for a request on the bus.

    Without an access policy the client says who it is, which nothing proves.
    """
    principal = principal_of(request)
    said = principal.name or request.headers.get(AUTHOR_HEADER, "").strip()[:MAX_AUTHOR_LENGTH]
    address = f"http {request.client.host}" if request.client is not None else "nats"
    return f"{said} ({address})" if said else address


def model_and_version(request: Request) -> tuple[str, str]:
    """(model, version) in the URL; version "" if the URL names none."""
    return request.path_params["model"], request.path_params.get("version", "")


async def read_body(request: Request, limit_bytes: int, too_long: str = "") -> memoryview:
    """The whole body. Raises WeirError (INVALID_ARG), with the text `too_long`, for one of more than `limit_bytes`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise invalid(too_long) if too_long else too_large("request JSON size", len(body), limit_bytes)
    return memoryview(body)


async def read_short_body(request: Request) -> memoryview:
    """The body of a request that changes settings. Raises WeirError (INVALID_ARG) for one of more than 1 MiB."""
    too_long = f"the request body exceeds the {MAX_SHORT_BODY_BYTES} bytes that are allowed here"
    return await read_body(request, MAX_SHORT_BODY_BYTES, too_long)


def json_response(content: Any) -> Response:
    """200 with a JSON body."""
    return Response(orjson.dumps(content), media_type="application/json")


def conditional_response(
    request: Request, content: bytes, etag: str, content_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """200 with `content` and its entity tag, which is quoted; 304 without content if the client has it already.

    Clients keep the content, and ask each time whether it has changed. Source: RFC 9110, 13.1.2: tags are compared weakly.
    """
    all_headers = {"ETag": etag, "Cache-Control": "no-cache", **(headers or {})}
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in tags or "*" in tags:
        return Response(status_code=304, headers=all_headers)
    return Response(content, headers={**all_headers, "Content-Type": content_type})
