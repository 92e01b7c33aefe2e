"""The route of the form that tries a model: it sends one request over NATS, as any producer may."""

from __future__ import annotations

import time

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bus.naming import subjects
from bus.nats.headers import pack_headers, parse_headers
from console.api.acting import MAX_BODY_BYTES, guarded, read_body
from console.api.context import ConsoleContext
from console.api.responses import error_response, json_response

TIMEOUT_S = 60.0
"""How long a request waits for its response."""


_PASSED_HEADERS = ("inference-header-content-length",)


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
        sent = {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}
        subject = subjects.infer(request.path_params["name"], version)
        started_s = time.monotonic()
        try:
            reply = await context.replies.request(
                subject, body, timeout_s=TIMEOUT_S, header_block=pack_headers(sent) if sent else b""
            )
        except TimeoutError:
            return error_response(504, f"no response within {TIMEOUT_S:g} s")
        except ConnectionError as error:
            return error_response(503, str(error))
        duration_ms = (time.monotonic() - started_s) * 1000
        if reply.status == "503":
            return error_response(503, "no gateway is connected to the message broker")
        headers = parse_headers(reply.header_block)
        try:
            document = orjson.loads(reply.data)
        except orjson.JSONDecodeError:
            document = {"error": "the response is not JSON"}
        status = int(headers.get("nats-service-error-code") or 200)
        return json_response(
            {
                "status": status,
                "response": document,
                "duration_ms": round(duration_ms, 3),
                "id": document.get("id", "") if isinstance(document, dict) else "",
            }
        )

    return [Route("/api/try/{name:path}", guarded(try_model), methods=["POST"])]
