"""The infer route with `Prefer: respond-async`: the request is checked, stored, and answered with 202.

Such requests leave the short way of `gateway.http.protocol` as soon as their header is seen, and come here by ASGI.
Source: RFC 7240, section 4.1.
"""

from __future__ import annotations

import asyncio

import orjson
from starlette.requests import Request
from starlette.responses import Response

from calls.catalog import ServedModel
from gateway.async_requests.async_requests import AsyncRequests
from gateway.async_requests.regions import no_region
from gateway.async_requests.request_headers import AskedLater
from gateway.connection_memory import MEMORY_KEY, RequestMemory, no_memory
from gateway.doors import Doors
from gateway.http.compression import IN_PLACE_BYTES, INFLATION_STEP_BYTES, Inflation, is_compressed
from gateway.http.protocol import CONNECTION_KEY, HttpProtocol
from gateway.http.routing import named
from runtime.offload import OFF_LOOP_BYTES
from schemas.errors import ErrorCode, WeirError
from schemas.kserve_raw import parse_raw_request
from schemas.kserve_request import parse_header_length, parse_infer_request, read_document
from schemas.offloaded import (
    ADD_PARAMETERS,
    READ_JSON,
    add_parameters,
    json_job,
    outline_document,
    parameters_job,
)
from schemas.requests import Parameters

RETRY_AFTER_S = 1
"""When a client may come to see whether its job is done."""


async def accept(doors: Doors, later: AsyncRequests, request: Request) -> Response:
    """Stores the request and answers 202. Raises WeirError for what is refused: then nothing was stored."""
    name, version = named(request)
    served = doors.catalog.resolve(name, version)
    if served.config.is_decoupled:
        raise WeirError(
            ErrorCode.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy"
        )
    asked = AskedLater.of(request.headers.raw, later.rules)
    body = await _body(doors, request)
    header_length = request.headers.get("inference-header-content-length")
    if header_length is None and not body:
        header_length = "0"
    forwarded = _forwarded(doors, request)
    if forwarded:
        header_length, body = await _with_parameters(doors, header_length, body, forwarded)
    await _check(doors, served, name, version, header_length, body, asked)
    accepted = await later.acceptance.accept(served, version, header_length, body, asked)
    document = {"id": accepted.id, "model": accepted.model, "status": accepted.outcome or "queued"}
    return Response(
        orjson.dumps(document),
        202,
        {
            "Location": f"/v2/jobs/{accepted.id}",
            "Retry-After": str(RETRY_AFTER_S),
            "Preference-Applied": "respond-async",
        },
        "application/json",
    )


async def _body(doors: Doors, request: Request) -> bytes:
    # Its size is bounded where it is received.
    body = await request.body()
    memory: RequestMemory | None = request.scope.get(MEMORY_KEY)
    encoding = request.headers.get("content-encoding", "").strip().lower().encode("latin-1")
    if not is_compressed(encoding):
        return body
    inflation = Inflation(body, doors.limits.input_size)
    is_complete = inflation.advance(IN_PLACE_BYTES)
    charged_bytes = 0
    while True:
        size = len(inflation.content)
        if memory is not None and not memory.charge("decompressed", size - charged_bytes):
            raise no_memory()
        if is_complete:
            return bytes(inflation.content)
        charged_bytes = size
        is_complete = await asyncio.to_thread(inflation.advance, size + INFLATION_STEP_BYTES)


async def _check(
    doors: Doors,
    served: ServedModel,
    name: str,
    version: str,
    header_length: str | None,
    body: bytes,
    asked: AskedLater,
) -> None:
    """Raises what the sync route would answer."""
    length = None if header_length is None else parse_header_length(header_length)
    if length == 0:
        parsed = parse_raw_request(name, version, body, served.config, doors.limits)
    elif OFF_LOOP_BYTES < (json_bytes := len(body) if length is None else length) <= len(body):
        view = memoryview(body)
        job = json_job(name, version, view[:json_bytes], len(body) - json_bytes, doors.limits)
        document = outline_document(await doors.offload.run(READ_JSON, job))
        parsed = read_document(name, version, document, view[json_bytes:], doors.limits, no_region)
    else:
        parsed = parse_infer_request(name, version, body, length, doors.limits, no_region)
    asked.read_into(parsed)
    served.normalizer.normalize(parsed)


def _forwarded(doors: Doors, request: Request) -> Parameters:
    connection: HttpProtocol | None = request.scope.get(CONNECTION_KEY)
    if connection is None or connection.raw_headers is None:
        return {}
    return doors.access.http_parameters(connection.raw_headers)


async def _with_parameters(
    doors: Doors, header_length: str | None, body: bytes, forwarded: Parameters
) -> tuple[str | None, bytes]:
    """The body whose JSON says what headers say that are forwarded: they don't travel with the message."""
    length = len(body) if header_length is None else parse_header_length(header_length)
    if not 0 < length <= len(body):
        return header_length, body  # no JSON to say it in; what is wrong is refused later
    job = parameters_job(memoryview(body)[:length], forwarded)
    if length > OFF_LOOP_BYTES:
        (part,) = await doors.offload.run(ADD_PARAMETERS, job)
        text = bytes(part)
    else:
        (text,) = add_parameters([memoryview(part) for part in job])
    if not text:
        return header_length, body
    return (None if header_length is None else str(len(text))), text + body[length:]
