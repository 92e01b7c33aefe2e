"""The reference of the HTTP API: `docs/reference/openapi.json`, and the tables of its operations and errors."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from weir.gateway.http import app
from weir.gateway.http.openapi import document as openapi_document
from weir.gateway.http.openapi.document import without_version
from weir.gateway.http.openapi.operations import OPERATIONS
from weir.gateway.http.traffic import traffic_routes
from weir.schemas.core.errors import ErrorCode


def routes() -> list[tuple[str, str]]:
    """(method, path in OpenAPI's form) of each route."""
    return list(openapi_document.operations(_application().routes))


def document() -> dict[str, Any]:
    """The OpenAPI document. Raises KeyError for a route that `OPERATIONS` lacks."""
    return openapi_document.document(_application().routes, "http://localhost:8000")


def _application() -> Any:
    context = MagicMock()
    context.access.http = ()
    return app.make_app(context, traffic_routes(MagicMock()))


def endpoints() -> str:
    """A Markdown table of the operations, by tag."""
    found: dict[str, list[str]] = {}
    every = routes()
    for method, path in every:
        operation = OPERATIONS[method, without_version(path)]
        if "{version}" not in path:
            has_version = (method, path.replace("{model}", "{model}/versions/{version}", 1)) in every
            shown = path.replace("{model}", "{model}[/versions/{version}]", 1) if has_version else path
            found.setdefault(operation.tag, []).append(f"| {method} | `{shown}` | {operation.summary} |")
    parts = [
        f"## {tag.capitalize()}\n\n| method | path | what |\n| --- | --- | --- |\n" + "\n".join(rows)
        for tag, rows in found.items()
    ]
    return "\n\n".join(parts)


def errors() -> str:
    """A Markdown table of the error codes with their statuses."""
    rows = [
        f"| `{code.name}` | {code.http_status} | {code.grpc_status} | {'yes' if code.retryable else 'no'} |"
        for code in ErrorCode
    ]
    return "| code | HTTP | gRPC | may succeed when repeated |\n| --- | --- | --- | --- |\n" + "\n".join(rows)
