"""`/openapi.json`: the OpenAPI document over HTTP.

Triton has no such URL, and models lie below `/v2/models/`, so no model's name can hide it.
Source: RFC 9110 for entity tags.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.context import GatewayContext
from gateway.http.openapi.description import ApiDescription
from gateway.http.routing import get

DOCUMENT_PATH = "/openapi.json"


def openapi_routes(context: GatewayContext) -> list[Route]:
    """The routes; none where operators have switched them off."""
    if not context.describes_api:
        return []
    description: ApiDescription | None = None

    async def openapi(request: Request) -> Response:
        nonlocal description
        if description is None:
            shows_config = "model-config" not in context.access.http
            description = ApiDescription(request.app.routes, context.catalog.served, shows_config)
        found = await description.current()
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        if _matches(request.headers.get("if-none-match", ""), found.etag):
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type="application/json")

    return [get(DOCUMENT_PATH, openapi)]


def _matches(condition: str, etag: str) -> bool:
    """Whether `If-None-Match` names the entity tag. Weak and strong tags are compared as equal."""
    tags = [tag.strip().removeprefix("W/") for tag in condition.split(",")]
    return etag in tags or "*" in tags
