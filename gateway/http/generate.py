"""The generate extension over HTTP: one JSON object, or a stream of server-sent events.

The HTTP status is that of the first response; a later error is an event of its own. A reader may be slower than the model:
its call is held while an event waits for it, and a reader that falls too far behind has its connection ended.
Source: Triton's generate extension, and the HTML standard for `text/event-stream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import Call
from weir.calls.inference.documents import Document, ReadContext
from weir.calls.request_headers import DEADLINE_HEADER, read_deadline_ms
from weir.gateway.access import add_parameters
from weir.gateway.admin.load_report import REQUEST_HEADER, RESPONSE_HEADER
from weir.gateway.context import GatewayContext
from weir.gateway.http.routing import MODEL_PATHS, model_and_version, post
from weir.http_server.asgi import CONNECTION_KEY
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_memory import MEMORY_KEY, RequestMemory
from weir.http_server.routing import Route
from weir.runtime.offload import takes_long
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.generate import build_generate_response, parse_generate_request
from weir.schemas.kserve.offloaded import Job, generate_job, generate_response_job, outlined_request
from weir.schemas.kserve.response import error_body


def generate_routes(context: GatewayContext) -> list[Route]:
    """The routes `generate` and `generate_stream`, of a model and of a version."""

    async def generate(request: Request) -> Response:
        return _SingleResponse(await _submitted(context, request), _LoadHeader(context, request))

    async def generate_stream(request: Request) -> Response:
        return _EventStream(await _submitted(context, request), _LoadHeader(context, request))

    return [
        post(f"{prefix}/{name}", handler)
        for prefix in MODEL_PATHS
        for name, handler in (("generate", generate), ("generate_stream", generate_stream))
    ]


async def _submitted(context: GatewayContext, request: Request) -> GenerateCall:
    """Submits the generate request. Raises WeirError if it is rejected."""
    name, version = model_and_version(request)
    served = context.catalog.resolve(name, version)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise invalid("Unsupported content-encoding, only 'identity' is supported.")
    call = GenerateCall(context, request, Document(served, name, version, await request.body()))
    await call.opened()
    return call


class GenerateCodec:
    """Reads a `Document` for the generate extension; writes the JSON object of a response."""

    def read_job(self, source: Document, context: ReadContext) -> Job | None:
        """Implements `Codec.read_job`."""
        if not takes_long(source.data):
            return None
        return generate_job(source.model, source.version, source.data, source.served.config, context.limits)

    def read(
        self, source: Document, parts: Sequence[memoryview], context: ReadContext
    ) -> tuple[ServedModel, InferRequest]:
        """Implements `Codec.read`."""
        served, model, version, body, _ = source
        if parts:
            return served, outlined_request(model, version, parts)
        return served, parse_generate_request(model, version, bytes(body), served.config, context.limits)

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        """Implements `Codec.write_job`."""
        return generate_response_job(response)

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> bytes:
        """Implements `Codec.write`."""
        return bytes(parts[0]) if parts else build_generate_response(response)


_CODEC = GenerateCodec()

WRONG_COUNT = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class GenerateEvent(NamedTuple):
    """One response as an event: HTTP status, JSON body, and for an error the seconds for `Retry-After` (0: none)."""

    status: int
    body: bytes
    retry_after_s: int = 0


class GenerateCall(Call):
    """One generate request, which came as `request` with `body`. `next` returns its responses in order."""

    __slots__ = ("_body", "_event", "_is_ended", "_rejection", "_request", "_wakeup")

    services: GatewayContext

    def __init__(self, context: GatewayContext, request: Request, body: Document) -> None:
        memory: RequestMemory | None = request.scope.get(MEMORY_KEY)
        super().__init__(context, _CODEC, None if memory is None else memory.account)
        self._body = body
        self._event: GenerateEvent | None = None
        self._is_ended = False
        self._rejection: WeirError | None = None
        self._request = request
        self._wakeup = asyncio.Event()

    async def opened(self) -> None:
        """Returns once the request is submitted. Raises WeirError if it is rejected."""
        self.open()
        try:
            while not self.is_submitted and self._rejection is None:
                await self._wakeup.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._rejection is not None:
            raise self._rejection

    async def next(self) -> GenerateEvent | None:
        """The next response; None when there are no more."""
        while self._event is None and not self._is_ended:
            self._wakeup.clear()
            await self._wakeup.wait()
        event, self._event = self._event, None
        self.resume()
        return event

    async def single(self) -> GenerateEvent:
        """The response of a request that must have exactly one."""
        first = await self.next()
        second = await self.next() if first is not None else None
        if first is not None and second is None:
            return first
        self.close()
        return GenerateEvent(first.status if first is not None else 200, error_body(WRONG_COUNT))

    def close(self) -> None:
        """Ends the request for its reader: it is cancelled if responses are still to come."""
        self._event, self._is_ended = None, True
        self._wakeup.set()
        self.cancel()

    # Call

    def begin(self) -> Document:
        """Implements `Call.begin`."""
        return self._body

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Implements `Call.submit`."""
        headers, served = self._request.headers, self.served
        request.traceparent = headers.get("traceparent", "")
        deadline = headers.get(DEADLINE_HEADER.decode())
        if deadline is not None:
            request.deadline_ms = read_deadline_ms(deadline.encode("latin-1"))
        connection: HttpConnection | None = self._request.scope.get(CONNECTION_KEY)
        if connection is not None and connection.raw_headers is not None:
            forwarded = self.services.access.http_parameters(connection.raw_headers)
            request.parameters = add_parameters(request.parameters, forwarded)
        key = "" if served.split is None else headers.get(served.split.rule.header, "")
        self._wakeup.set()
        return self.services.inference.submit(request, self.on_response, traffic_key=key, served=served)

    def send(self, encoded: bytes | None, is_final: bool) -> None:
        """Implements `Call.send`."""
        self._put(None if encoded is None else GenerateEvent(200, encoded), is_final)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Implements `Call.fail`."""
        if not self.is_submitted:
            self._rejection = error
        self._put(GenerateEvent(error.http_status, error_body(error.message), error.retry_after_s), is_final)

    def overflow(self) -> None:
        """Implements `Call.overflow`: ends the connection, whose client does not read."""
        self.close()
        connection: HttpConnection | None = self._request.scope.get(CONNECTION_KEY)
        if connection is not None:
            connection.abort()

    def _put(self, event: GenerateEvent | None, is_final: bool) -> None:
        self._event, self._is_ended = event, is_final
        self._wakeup.set()
        self.hold()


class _LoadHeader:
    """The report of the model's load in the response, if the request asks for one."""

    def __init__(self, context: GatewayContext, request: Request) -> None:
        self._reports = context.load_reports
        self._catalog = context.catalog
        self._format = request.headers.get(REQUEST_HEADER.decode())
        self._model = model_and_version(request)[0]

    async def rows(self) -> list[tuple[bytes, bytes]]:
        """The header, or none."""
        served = self._catalog.served_model(self._model) if self._format is not None else None
        if self._reports is None or self._format is None or served is None:
            return []
        await self._reports.refresh()
        report = self._reports.header(self._format.encode("latin-1"), served.name)
        return [(RESPONSE_HEADER, report)] if report else []


class _GenerateResponse(Response):
    """A response that is sent while the model generates; cancels the request when the client disconnects."""

    def __init__(self, call: GenerateCall, load: _LoadHeader) -> None:
        super().__init__()
        self._call = call
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self._respond(scope, send)
        finally:
            watching.cancel()
            self._call.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.close()

    async def _respond(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError


class _SingleResponse(_GenerateResponse):
    async def _respond(self, scope: Scope, send: Send) -> None:
        event = await self._call.single()
        length = (b"content-length", b"%d" % len(event.body))
        await send(_start(event, b"application/json", length, *await self._load.rows()))
        await send({"type": "http.response.body", "body": event.body})


class _EventStream(_GenerateResponse):
    async def _respond(self, scope: Scope, send: Send) -> None:
        event: GenerateEvent | None = await self._call.next()
        await send(_start(event, b"text/event-stream; charset=utf-8", *await self._load.rows()))
        while event is not None:
            # Waits where the client doesn't read; if that takes too long, its connection is ended.
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % event.body, "more_body": True})
            event = await self._call.next()
        await send({"type": "http.response.body", "body": b""})


def _start(event: GenerateEvent | None, content_type: bytes, *more: tuple[bytes, bytes]) -> Any:
    headers = [(b"content-type", content_type), *more]
    if event is not None and event.retry_after_s:
        headers.append((b"retry-after", b"%d" % event.retry_after_s))
    return {"type": "http.response.start", "status": 200 if event is None else event.status, "headers": headers}
