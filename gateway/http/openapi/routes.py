"""`/openapi.json`: the OpenAPI document over HTTP, and the page `/docs` that shows it.

Triton has no such URLs, and models lie below `/v2/models/`, so no model's name can hide them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weir.gateway.context import GatewayContext
from weir.gateway.http.openapi.description import ApiDescription
from weir.gateway.http.openapi.docs_page import docs_routes
from weir.gateway.http.routing import conditional_response, get

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
        return conditional_response(request, found.body, found.etag, "application/json")

    return [get(DOCUMENT_PATH, openapi), *docs_routes()]
