"""`/openapi.json`: the OpenAPI document over HTTP, the page `/docs` that shows it, and `/`, which names them.

Triton has no such URLs, and models lie below `/v2/models/`, so no model's name can hide them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weir.access.policy.actions import Action
from weir.gateway.context import GatewayContext
from weir.gateway.http.openapi.description import ApiDescription
from weir.gateway.http.openapi.docs_page import DOCS_PATH, docs_routes
from weir.gateway.http.routing import conditional_response, get
from weir.http_server.routing import Route

DOCUMENT_PATH = "/openapi.json"

_ROOT = f"""Weir serves Triton's protocols here.

{DOCS_PATH:<22} the HTTP API, with a form for each request
{DOCUMENT_PATH:<22} its description
/v2                    the server, its extensions and their durability
/v2/models/NAME        a model

`weir status` shows the models, and where the console is.
"""


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

    async def root(_request: Request) -> Response:
        return PlainTextResponse(_ROOT)

    return [
        Route("/", root, Action.METADATA, lists=True, include_in_schema=False),
        get(DOCUMENT_PATH, openapi, Action.METADATA),
        *docs_routes(),
    ]
