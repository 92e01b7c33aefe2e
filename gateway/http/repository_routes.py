"""The model repository over HTTP: index, load, unload.

Source: Triton's model repository extension, and what its server answers to bodies that are not as they should be.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.load_parameters import READ_LOAD, load_parameters, read_parameters
from gateway.http.routing import json_answer, post, received_body, short_body
from gateway.repository_control import UNLOAD_DEPENDENTS
from runtime.offload import OFF_LOOP_BYTES
from schemas.errors import ErrorCode, WeirError, internal
from schemas.json_text import load_json


def repository_routes(doors: Doors) -> list[Route]:
    """The routes of the repository extension; all bodies are optional."""
    repository = doors.repository
    limit_bytes = doors.limits.input_size

    async def index(request: Request) -> Response:
        body = await short_body(request)
        return json_answer(await repository.index(_ready(load_json(body)) if body else False))

    async def load(request: Request) -> Response:
        body = await received_body(request, limit_bytes)
        config: str | None = None
        files: dict[str, bytes] = {}
        if len(body) > OFF_LOOP_BYTES:
            config, files = read_parameters(await doors.offload.run(READ_LOAD, [body]))
        elif body:
            config, files = load_parameters(body)
        del body  # what it was charged for now stands for the files, which are smaller
        await repository.load(request.path_params["model"], config, files)
        return Response(media_type="application/json")

    async def unload(request: Request) -> Response:
        body = await short_body(request)
        await repository.unload(request.path_params["model"], _unload_dependents(body))
        return Response(media_type="application/json")

    async def unsupported(_request: Request) -> Response:
        raise WeirError(ErrorCode.UNSUPPORTED, "'repository_name' specification is not supported")

    routes = [post("/v2/repository/index", index), post("/v2/repository/{repository}/index", index)]
    for verb, handler in (("load", load), ("unload", unload)):
        routes.append(post(f"/v2/repository/models/{{model}}/{verb}", handler))
        routes.append(post(f"/v2/repository/{{repository}}/models/{{model}}/{verb}", unsupported))
    return routes


def _ready(document: Any) -> bool:
    ready = document.get("ready", False) if isinstance(document, dict) else False
    if type(ready) is not bool:
        raise internal("attempt to access JSON non-boolean as boolean")
    return ready


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
