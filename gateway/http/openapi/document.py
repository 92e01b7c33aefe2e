"""The HTTP API as an OpenAPI 3.1 document, made from the route table of the gateway's application.

Each route needs an entry in `OPERATIONS`; `document` raises KeyError for one without.
Source: OpenAPI 3.1; KServe v2 and Triton's extensions for what is described.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.routing import BaseRoute, Route

from weir.gateway.http.openapi.operations import OPERATIONS, Operation
from weir.gateway.http.openapi.schemas import ANY_OBJECT, INTEGER, SCHEMAS, TEXT

_MODEL_PATH = re.compile(r"^/v2/models/\{model\}(/versions/\{version\})?(?!/trace)")
_CONVERTOR = re.compile(r"\{(\w+):\w+\}")

STATUSES = {
    400: "The request is invalid",
    403: "The API is restricted, or a page of another site has sent the request",
    404: "The model, version or other resource does not exist",
    408: "The request did not arrive completely",
    409: "The resource is in a state that does not allow the operation",
    410: "The result does not exist any more",
    422: "The `Idempotency-Key` was used with another request",
    429: "The durable queue is full",
    500: "A JSON value has the wrong type, the model has failed, or there is an internal error",
    501: "Not supported",
    503: "Not available for now: repeat the request later",
}
"""The descriptions of statuses of errors."""

_EVERY_OPERATION = (400, 403, 500, 503)


def without_version(path: str) -> str:
    """The path as `OPERATIONS` has it: `{model}` for a model's path with or without a version."""
    return _MODEL_PATH.sub("{model}", path)


def operations(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """(method, path in OpenAPI's form) of each route that does not reject the method, without those for pages."""
    found: dict[tuple[str, str], None] = {}
    for route in routes:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        path = _CONVERTOR.sub(r"{\1}", route.path)
        # POST is answered ahead of the application, which answers other methods with 405.
        methods = {"POST"} if path.endswith("/infer") else (route.methods or set()) - {"HEAD"}
        found.update(dict.fromkeys((method, path) for method in sorted(methods)))
    yield from found


def document(routes: Iterable[BaseRoute], server_url: str) -> dict[str, Any]:
    """The OpenAPI document of the routes, without any model's own. Raises KeyError for a route that `OPERATIONS` lacks."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path in operations(routes):
        operation = OPERATIONS[method, without_version(path)]
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Weir HTTP API",
            "version": "2",
            "description": "KServe v2 with Triton's extensions, asynchronous requests and batch jobs.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": server_url}],
        "components": {"schemas": SCHEMAS, "responses": _error_responses()},
        "paths": dict(sorted(paths.items())),
    }


def error_statuses(operation: Operation, path: str) -> list[int]:
    """The statuses of errors of an operation."""
    found = {*_EVERY_OPERATION, *operation.errors}
    if "{" in path:
        found.add(404)
    if operation.request:
        found.add(408)
    return sorted(found - {operation.status} - set(operation.bare))


def error_responses(operation: Operation, path: str) -> dict[str, Any]:
    """The responses of errors of an operation, by status: references to the document's components.

    Where a model fails before its first response, an operation that streams events sends the error as an event.
    """
    kind = "StreamError" if operation.response == EVENTS else "Error"
    statuses = error_statuses(operation, path)
    return {str(status): {"$ref": f"#/components/responses/{kind}{status}"} for status in statuses}


def _error_responses() -> dict[str, Any]:
    body = content({"$ref": "#/components/schemas/Error"})
    return {
        f"{kind}{status}": {"description": text, "content": body | more}
        for kind, more in (("Error", {}), ("StreamError", TEXTS[EVENTS]))
        for status, text in STATUSES.items()
    }


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{method.lower()}{path.removeprefix('/v2')}").strip("_")
    made: dict[str, Any] = {"operationId": name, "summary": operation.summary, "tags": [operation.tag]}
    parameters = [_path_parameter(found) for found in re.findall(r"\{(\w+)\}", path)]
    parameters += [{"name": found, "in": "query", "schema": TEXT} for found in operation.query]
    if path.endswith("/infer"):
        parameters += HEADERS
    if parameters:
        made["parameters"] = parameters
    if operation.request:
        made["requestBody"] = _request_body(path, operation)
    made["responses"] = _responses(path, operation)
    return made


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {**TEXT, "pattern": "^[0-9]+$"} if name == "version" else {**TEXT, "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _request_body(path: str, operation: Operation) -> dict[str, Any]:
    is_infer = path.endswith("/infer")
    made = content({"$ref": f"#/components/schemas/{operation.request}"})
    if is_infer:
        made |= BINARY_TENSORS
    if operation.request == "JobSpec":
        made |= {"application/jsonl": {"schema": {**TEXT, "description": "The items; the query has the other fields"}}}
    return {"content": made, "required": True} if is_infer else {"content": made}


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    response: dict[str, Any] = {"description": operation.summary}
    if operation.response in TEXTS:
        response["content"] = TEXTS[operation.response]
    elif operation.response:
        response["content"] = content({"$ref": f"#/components/schemas/{operation.response}"})
        if operation.response == "InferResponse":
            response["content"] |= BINARY_TENSORS
    made: dict[str, Any] = {str(operation.status): response}
    if path.endswith("/infer"):
        made["202"] = {
            "description": "With `Prefer: respond-async`: stored, to be run later",
            "content": content({"$ref": "#/components/schemas/AsyncRequest"}),
        }
    made |= {str(status): {"description": STATUSES[status]} for status in operation.bare}
    return made | error_responses(operation, path)


def content(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON body of this schema."""
    return {"application/json": {"schema": schema}}


BINARY_TENSORS = {
    "application/octet-stream": {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "JSON of `Inference-Header-Content-Length` bytes, followed by binary tensors",
        }
    }
}
"""A body with tensors behind its JSON."""

EVENTS = "Events"

TEXTS: dict[str, dict[str, Any]] = {
    # Without a type: some readers take the schema for that of one event.
    EVENTS: {"text/event-stream": {"schema": {"description": "Server-sent events, whose data are JSON"}}},
    "Lines": {"application/jsonl": {"schema": TEXT}, **content(ANY_OBJECT)},
}
"""Responses that are not one JSON document: their content, by the names that `OPERATIONS` uses."""


def _header(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": text, "schema": schema}


HEADERS = [
    _header("Inference-Header-Content-Length", "Bytes of JSON before the binary tensors", {**INTEGER, "minimum": 0}),
    _header("Weir-Deadline-Ms", "Unix time in milliseconds after which the request is not run", INTEGER),
    _header("Prefer", "`respond-async`: store the request, answer 202, and run it later", TEXT),
    _header("Idempotency-Key", "With `Prefer: respond-async`: the same key stores the request once", TEXT),
    _header("traceparent", "The caller's trace (W3C)", TEXT),
]
"""Headers of the infer route that clients set."""
