"""The model repository over HTTP: index, load, unload.

Source: Triton's model repository extension, and what its server answers to bodies that are not as they should be.
"""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import json_answer, post
from gateway.repository_control import UNLOAD_DEPENDENTS
from schemas.errors import ErrorCode, WeirError, internal, invalid
from schemas.json_text import load_json

_FILE = "file:"
_NOT_TEXT = "attempt to access JSON non-string as string"


def repository_routes(doors: Doors) -> list[Route]:
    """The routes of the repository extension; all bodies are optional."""
    repository = doors.repository
    limit_bytes = doors.limits.input_size

    async def index(request: Request) -> Response:
        body = await _body(request, limit_bytes)
        return json_answer(await repository.index(_ready(load_json(body)) if body else False))

    async def load(request: Request) -> Response:
        body = await _body(request, limit_bytes)
        config, files = _load_parameters(load_json(body)) if body else (None, {})
        del body  # what it was charged for now stands for the files, which are smaller
        await repository.load(request.path_params["model"], config, files)
        return Response(media_type="application/json")

    async def unload(request: Request) -> Response:
        body = await _body(request, limit_bytes)
        await repository.unload(request.path_params["model"], _unload_dependents(body))
        return Response(media_type="application/json")

    async def unsupported(_request: Request) -> Response:
        raise WeirError(ErrorCode.UNSUPPORTED, "'repository_name' specification is not supported")

    routes = [post("/v2/repository/index", index), post("/v2/repository/{repository}/index", index)]
    for verb, handler in (("load", load), ("unload", unload)):
        routes.append(post(f"/v2/repository/models/{{model}}/{verb}", handler))
        routes.append(post(f"/v2/repository/{{repository}}/models/{{model}}/{verb}", unsupported))
    return routes


async def _body(request: Request, limit_bytes: int) -> memoryview:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise invalid(
                f"request JSON size of {len(body)} bytes exceeds the maximum allowed input size of {limit_bytes} bytes. "
                "Use --http-max-input-size to increase the limit."
            )
    return memoryview(body)


def _ready(document: Any) -> bool:
    ready = document.get("ready", False) if isinstance(document, dict) else False
    if type(ready) is not bool:
        raise internal("attempt to access JSON non-boolean as boolean")
    return ready


def _load_parameters(document: Any) -> tuple[str | None, dict[str, bytes]]:
    """(configuration in JSON, files by path). Raises WeirError with the texts of Triton's JSON layer."""
    if not isinstance(document, dict) or "parameters" not in document:
        return None, {}
    parameters = document["parameters"]
    if not isinstance(parameters, dict):
        raise internal("attempt to get members for non-object")
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if not isinstance(value, str):
            raise internal(_NOT_TEXT)
        if key == "config":
            config = value
        elif key.startswith(_FILE):
            files[key.removeprefix(_FILE)] = _decoded(key, value)
        else:
            raise internal("unexpected error on creating Triton parameter")
    return config, files


def _decoded(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # of its characters, or of their number
        raise invalid(f"load parameter '{key}' is not base64: {error}") from error


def _unload_dependents(body: memoryview) -> bool:
    """Whether the body asks for it. As in Triton, one that makes no sense is none."""
    if not body:
        return False
    try:
        document = load_json(body)
    except WeirError:
        return False
    parameters = document.get("parameters") if isinstance(document, dict) else None
    return isinstance(parameters, dict) and parameters.get(UNLOAD_DEPENDENTS) is True
