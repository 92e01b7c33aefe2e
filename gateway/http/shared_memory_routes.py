"""Clients' shared memory over HTTP: system and CUDA regions, each with status, register and unregister.

Source: Triton's shared-memory extensions; texts compared with a running Triton 2.51.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import get, json_answer, post
from schemas.errors import internal, invalid
from schemas.json_fields import members_of
from schemas.json_text import load_json
from schemas.regions import CUDA, SYSTEM

MAX_BODY_BYTES = 64 * 1024
"""A registration is a few names and numbers."""


def shared_memory_routes(doors: Doors) -> list[Route]:
    """Everything below `/v2/systemsharedmemory` and `/v2/cudasharedmemory`."""
    regions = doors.regions

    async def register_system(request: Request) -> Response:
        regions.check_allowed()
        body = await _document(request)
        for field in ("key", "byte_size"):
            if field not in body:
                raise _missing(field)
        key = _text(body["key"])
        offset = _number(body.get("offset", 0))
        await regions.register_system(request.path_params["region"], key, offset, _number(body["byte_size"]))
        return _done()

    async def register_cuda(request: Request) -> Response:
        regions.check_allowed()
        body = await _document(request)
        if "raw_handle" not in body:
            raise _missing("raw_handle")
        encoded = _text(_member(members_of(body["raw_handle"]), "b64"))
        byte_size = _number(_member(body, "byte_size"))
        device_id = _number(_member(body, "device_id"))
        try:
            handle = b64decode(encoded, validate=True)
        except ValueError as error:
            raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t") from error
        await regions.register_cuda(request.path_params["region"], handle, device_id, byte_size)
        return _done()

    routes: list[Route] = []
    for kind, register in ((SYSTEM, register_system), (CUDA, register_cuda)):
        routes += _rooms(doors, kind)
        routes.append(post(f"/v2/{kind}sharedmemory/region/{{region}}/register", register))
    return routes


def _rooms(doors: Doors, kind: str) -> list[Route]:
    async def status(request: Request) -> Response:
        return json_answer(doors.regions.status(kind, request.path_params.get("region", "")))

    async def unregister(request: Request) -> Response:
        await doors.regions.unregister(kind, request.path_params.get("region", ""))
        return _done()

    root = f"/v2/{kind}sharedmemory"
    return [
        *(get(f"{path}/status", status) for path in (root, f"{root}/region/{{region}}")),
        *(post(f"{path}/unregister", unregister) for path in (root, f"{root}/region/{{region}}")),
    ]


def _done() -> Response:
    return Response(media_type="application/json")


async def _document(request: Request) -> Mapping[str, Any]:
    """The members of the JSON object that is the request's body; none of any other value."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise invalid(f"Shared memory register request is longer than {MAX_BODY_BYTES} bytes")
    return members_of(load_json(bytes(body)))


def _missing(field: str) -> Exception:
    return invalid(f"Shared memory register request has no '{field}' field")


def _member(members: Mapping[str, Any], field: str) -> Any:
    if field in members:
        return members[field]
    raise internal(f"attempt to access non-existing object member '{field}'")


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise internal("attempt to access JSON non-string as string")


def _number(value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
