"""The route of the form that tries a model: it sends one request over NATS, as any producer may, and shows its way."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.bus.message import Message
from weir.bus.naming import subjects
from weir.bus.nats.headers import pack_headers, parse_headers
from weir.console.api.acting import MAX_BODY_BYTES, guarded, read_body
from weir.console.api.context import NO_GATEWAY, ConsoleContext, own_authorization
from weir.console.api.observed import spans_of
from weir.console.api.responses import error_response, json_response, read_integer
from weir.http_server.routing import Route

TIMEOUT_S = 60.0
"""How long a request waits for its last response."""

MAX_RESPONSES = 100
"""The responses of a decoupled model that are shown; further ones are dropped."""

_TRACE_WAIT_S = 0.5
_TRACE_POLL_S = 0.02
_HEADER_LENGTH = "inference-header-content-length"


class _Sent(NamedTuple):
    """A request as it is sent: its id, its body, and the bytes of JSON before binary tensors (None: all is JSON)."""

    id: str
    body: bytes
    header_length: int | None


def inference_routes(context: ConsoleContext) -> list[Route]:
    """`POST /api/try/{name}`. It changes nothing, so a console that is read-only serves it too."""

    async def try_model(request: Request) -> Response:
        body = await read_body(request)
        if body is None or len(body) > context.max_request_bytes:
            limit = min(MAX_BODY_BYTES, context.max_request_bytes)
            return error_response(413, f"the request is larger than {limit} bytes: send it to a gateway instead")
        version = request.query_params.get("version", "")
        if version and not (version.isascii() and version.isdecimal()):
            return error_response(400, f"version must be a number, not {version!r}")
        length = request.headers.get(_HEADER_LENGTH)
        header_length = None if length is None else read_integer(length)
        # A large document takes longer to read than a loop may be held.
        sent = await asyncio.to_thread(_with_id, body, header_length)
        if sent is None:
            return error_response(400, "the request is not a JSON object, or its header length is wrong")
        if not context.view.has_gateway:
            return error_response(503, NO_GATEWAY)
        context.observation.watch_id(sent.id)
        started_s = time.monotonic()
        responses = await _responses(context, subjects.infer(request.path_params["name"], version), sent)
        if isinstance(responses, Response):
            return responses
        duration_ms = (time.monotonic() - started_s) * 1000
        status, documents = _read(responses)
        return json_response(
            {
                "status": status,
                "response": documents[-1] if len(documents) == 1 else {"responses": documents},
                "duration_ms": round(duration_ms, 3),
                "id": sent.id,
                "hops": await _hops(context, sent.id),
            }
        )

    return [Route("/api/try/{name:path}", guarded(try_model), Action.INFER, methods=["POST"], model_parameter="name")]


def _with_id(body: bytes, header_length: int | None) -> _Sent | None:
    """The request with an id, its own or a new one; None if its JSON part is no object."""
    end = len(body) if header_length is None else header_length
    if not 0 < end <= len(body):
        return None
    try:
        document = orjson.loads(body[:end])
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    id = document.get("id")
    if isinstance(id, str) and id:
        return _Sent(id, body, header_length)
    document["id"] = f"console-{secrets.token_hex(4)}"
    header = orjson.dumps(document)
    return _Sent(document["id"], header + body[end:], None if header_length is None else len(header))


async def _responses(context: ConsoleContext, subject: str, sent: _Sent) -> list[Message] | Response:
    """All responses to a request, or why there is none."""
    received: list[Message] = []

    def is_complete(message: Message) -> bool:
        if len(received) < MAX_RESPONSES:
            received.append(message)
        return message.status == "503" or parse_headers(message.header_block).get("weir-final", "true") == "true"

    headers = own_authorization()
    if sent.header_length is not None:
        headers[_HEADER_LENGTH] = str(sent.header_length)
    gathering = asyncio.ensure_future(
        context.replies.gather(
            [subject], sent.body, is_complete, timeout_s=TIMEOUT_S, header_block=pack_headers(headers)
        )
    )
    # A gateway that is suspended keeps its subscription, so the broker does not report that it will not respond.
    watching = asyncio.ensure_future(context.view.wait_without_gateway())
    try:
        await asyncio.wait((gathering, watching), return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return error_response(503, f"{NO_GATEWAY}; this one may still be answered, which is not shown")
        in_time = gathering.result()
    except ConnectionError as error:
        return error_response(503, str(error))
    finally:
        gathering.cancel()
        watching.cancel()
    if not in_time and not received:
        return error_response(504, f"no response within {TIMEOUT_S:g} s")
    if received[-1].status == "503":
        return error_response(503, NO_GATEWAY)
    return received


def _read(responses: list[Message]) -> tuple[int, list[Any]]:
    """The status of the last response, and all of them as documents."""
    documents = []
    for response in responses:
        try:
            documents.append(orjson.loads(response.data))
        except orjson.JSONDecodeError:
            documents.append({"error": "the response is not JSON"})
    status = parse_headers(responses[-1].header_block).get("nats-service-error-code", "200")
    return int(status) if status.isdecimal() else 500, documents


async def _hops(context: ConsoleContext, id: str) -> list[dict[str, Any]]:
    """The spans of the request with this id; empty if its gateway does not report them soon."""
    deadline_s = time.monotonic() + _TRACE_WAIT_S
    while (observed := context.observation.trace(id)) is None and time.monotonic() < deadline_s:
        await asyncio.sleep(_TRACE_POLL_S)
    return [] if observed is None else spans_of(observed.trace)
