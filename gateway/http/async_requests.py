"""Asynchronous requests over HTTP: `Prefer: respond-async` on the infer route, and `/v2/jobs/<id>`.

The infer route checks the request, stores it, and answers with 202; `weir.gateway.http.protocol` passes requests with this
header on to ASGI. Ids that begin with `batch-` are those of batch jobs, whose routes precede these.
Source: RFC 7240 (Prefer), RFC 9110 (202, 409, 410, Retry-After).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from weir.access.policy.actions import Action
from weir.bus.streams.stored_objects import CorruptObject
from weir.calls.inference.call import read_request
from weir.calls.inference.documents import JSON, Document, ReadRules
from weir.durable.api.async_requests import AsyncRequests
from weir.durable.api.errors import StatusError, reject_region
from weir.durable.api.lookup import AsyncRequestState
from weir.durable.api.options import AsyncRequestOptions, Preferences, prefers_async, read_preferences
from weir.gateway.context import GatewayContext
from weir.gateway.http.compression import (
    IN_PLACE_BYTES,
    BodyInflation,
    deflate,
    is_compressed,
    response_encoding,
)
from weir.gateway.http.routing import MODEL_PATHS, get, json_response, model_and_version, post
from weir.gateway.inflation import inflate
from weir.http_server.asgi import CONNECTION_KEY
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_memory import MEMORY_KEY, RequestMemory, no_memory
from weir.http_server.door import gate_of, principal_of, proved_principal
from weir.http_server.responses import error_response, weir_error_response
from weir.http_server.routing import Handler, Route
from weir.runtime.offload import takes_long
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import Parameters
from weir.schemas.kserve.offloaded import add_parameters, parameters_job
from weir.schemas.kserve.request import parse_header_length
from weir.schemas.kserve.response import error_body
from weir.schemas.wire.terminal import Outcome

logger = logging.getLogger("weir.gateway")


JOB_PATH = "/v2/jobs/{id}"


def job_routes(context: GatewayContext) -> list[Route]:
    """The routes of asynchronous requests; none if the gateway stores no requests."""
    async_requests = context.async_requests
    if async_requests is None:
        return []

    async def infer(request: Request) -> Response:
        if not prefers_async(request.headers.raw):
            return error_response(405, "Method Not Allowed")  # the protocol answers the route before ASGI
        return await accept(context, async_requests, request)

    async def status(request: Request) -> Response:
        wait = _preferences(request)
        return _state_response(await async_requests.jobs.state(*_asked(request), wait.wait_s or 0.0), wait)

    async def result(request: Request) -> Response:
        return await _result_response(async_requests, await async_requests.jobs.result(*_asked(request)), request)

    async def cancel(request: Request) -> Response:
        return _state_response(await async_requests.jobs.cancel(*_asked(request)))

    async def delete(request: Request) -> Response:
        await async_requests.jobs.delete(*_asked(request))
        return Response(status_code=204)

    return [
        *(post(f"{prefix}/infer", _guarded(infer), Action.INFER) for prefix in MODEL_PATHS),
        get(JOB_PATH, _guarded(status), Action.JOBS, lists=True),
        get(f"{JOB_PATH}/result", _guarded(result), Action.JOBS, lists=True),
        post(f"{JOB_PATH}/cancel", _guarded(cancel), Action.JOBS, lists=True),
        Route(JOB_PATH, _guarded(delete), Action.JOBS, methods=["DELETE"], lists=True),
    ]


def _asked(request: Request) -> tuple[str, str]:
    """The id of the request that a path names, and whose requests its sender may see."""
    return request.path_params["id"], principal_of(request).owner


def _guarded(handler: Handler) -> Handler:
    """`handler`, with its errors turned into responses that have `Retry-After`."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except WeirError as error:
            response = weir_error_response(error)
            if error.retryable and not isinstance(error, StatusError):
                response.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
            return response

    return handle


def _preferences(request: Request) -> Preferences:
    return read_preferences(value for name, value in request.headers.raw if name == b"prefer")


def _state_response(state: AsyncRequestState, options: Preferences | None = None) -> Response:
    response = json_response(state.document())
    if options is not None and options.wait_s is not None:
        response.headers["Preference-Applied"] = f"wait={options.wait_s:.0f}"
    if not state.is_done:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


async def _result_response(async_requests: AsyncRequests, state: AsyncRequestState, request: Request) -> Response:
    """The response that the synchronous route would have sent, as it was recorded."""
    assert state.record is not None  # noqa: S101 - it has a result
    assert state.message is not None  # noqa: S101
    stored = state.message.headers
    headers = {
        "Weir-Id": state.id,
        "Weir-Outcome": state.status,
        "Weir-Attempts": str(state.record.attempts),
        "Content-Type": stored.get("content-type", "application/json"),
    }
    if "inference-header-content-length" in stored:
        headers["Inference-Header-Content-Length"] = stored["inference-header-content-length"]
    has_succeeded = state.record.outcome is Outcome.SUCCEEDED
    status = 200 if has_succeeded else max(400, min(state.record.status, 599))
    found = await async_requests.jobs.result_object(state)
    if found is not None:
        headers["Content-Length"] = str(found.size_bytes)
        return StreamingResponse(_chunks(found.chunks()), status, headers)
    body = state.message.data or (b"" if has_succeeded else error_body(state.error))
    encoding = response_encoding(request.headers.get("accept-encoding", "").encode("latin-1")) if has_succeeded else ""
    if encoding:
        headers["Content-Encoding"] = encoding
        if len(body) <= IN_PLACE_BYTES:
            body = deflate([body], encoding)
        else:
            body = await asyncio.to_thread(deflate, [body], encoding)
    return Response(body, status, headers)


async def _chunks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except (EOFError, CorruptObject, ConnectionError, TimeoutError) as error:
        # The head is sent already: the connection ends before the announced length.
        logger.warning(
            "the result of an asynchronous request was sent incompletely: %s; its client has to fetch it again", error
        )
        raise


RETRY_AFTER_S = 1
"""Seconds after which a client may query the state of its request again."""


async def accept(context: GatewayContext, async_requests: AsyncRequests, request: Request) -> Response:
    """Stores the request and answers with 202. Raises WeirError if the request is rejected: then nothing was stored."""
    name, version = model_and_version(request)
    served = context.catalog.resolve(name, version)
    if served.config.is_decoupled:
        raise WeirError(
            ErrorCode.UNSUPPORTED, "HTTP end point doesn't support models with decoupled transaction policy"
        )
    principal = proved_principal(request)
    options = AsyncRequestOptions.of(request.headers.raw, async_requests.rules, served.sticky_header, principal)
    if principal is not None:
        options.limit_results(gate_of(request), principal)
    body = await _body(context, request)
    header_length = request.headers.get("inference-header-content-length")
    if header_length is None and not body:
        header_length = "0"
    forwarded = _forwarded(context, request)
    if forwarded:
        header_length, body = await _with_parameters(context, header_length, body, forwarded)
    document, rules = Document(served, name, version, body, header_length), ReadRules(context.limits, reject_region)
    _, parsed = await read_request(JSON, document, rules, context.offload)
    options.read_into(parsed)
    served.normalizer.normalize(parsed)  # raises as the synchronous route would
    accepted = await async_requests.acceptance.accept(served, version, header_length, body, options)
    answer = {"id": accepted.id, "model": accepted.model, "status": accepted.outcome or "queued"}
    return Response(
        orjson.dumps(answer),
        202,
        {
            "Location": f"/v2/jobs/{accepted.id}",
            "Retry-After": str(RETRY_AFTER_S),
            "Preference-Applied": "respond-async",
        },
        "application/json",
    )


async def _body(context: GatewayContext, request: Request) -> bytes:
    # The connection bounds its size.
    body = await request.body()
    memory: RequestMemory | None = request.scope.get(MEMORY_KEY)
    encoding = request.headers.get("content-encoding", "").strip().lower().encode("latin-1")
    if not is_compressed(encoding):
        return body
    inflation = BodyInflation(body, context.limits.input_size)
    await inflate(inflation, lambda size: memory is None or memory.charge("decompressed", size), no_memory)
    return bytes(inflation.content)


def _forwarded(context: GatewayContext, request: Request) -> Parameters:
    connection: HttpConnection | None = request.scope.get(CONNECTION_KEY)
    if connection is None or connection.raw_headers is None:
        return {}
    return context.access.http_parameters(connection.raw_headers)


async def _with_parameters(
    context: GatewayContext, header_length: str | None, body: bytes, forwarded: Parameters
) -> tuple[str | None, bytes]:
    """The body with forwarded headers added to its JSON as parameters: headers are not stored with the message."""
    length = len(body) if header_length is None else parse_header_length(header_length)
    if not 0 < length <= len(body):
        return header_length, body  # there is no JSON to add to; an error in it is reported later
    job = parameters_job(memoryview(body)[:length], forwarded)
    if takes_long(memoryview(body)[:length]):
        (part,) = await context.offload.run(*job)
        text = bytes(part)
    else:
        (text,) = add_parameters([memoryview(part) for part in job.parts])
    if not text:
        return header_length, body
    return (None if header_length is None else str(len(text))), text + body[length:]
