"""The generate extension over HTTP: one JSON object, or a stream of server-sent events.

The HTTP status is that of the first response; a later error is an event of its own. A reader may be slower than the model:
what waits for it is bounded, and a reader that falls further behind has its request cancelled.
Source: Triton's generate extension, and the HTML standard for `text/event-stream`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.calls.dispatch import RequestDispatcher
from weir.calls.in_flight import PendingRequest
from weir.calls.request_headers import DEADLINE_HEADER, read_deadline_ms
from weir.gateway.access import add_parameters
from weir.gateway.admin.load_report import REQUEST_HEADER, RESPONSE_HEADER
from weir.gateway.context import GatewayContext
from weir.gateway.http.routing import MODEL_PATHS, model_and_version, post
from weir.http_server.asgi import CONNECTION_KEY
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_memory import MEMORY_KEY, RequestMemory
from weir.http_server.routing import Route
from weir.runtime.offload import Offload, takes_long
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.generate import build_generate_response, parse_generate_request
from weir.schemas.kserve.offloaded import (
    READ_GENERATE,
    WRITE_GENERATE,
    generate_job,
    generate_response_job,
    outlined_request,
)
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES, error_body


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


async def _submitted(context: GatewayContext, request: Request) -> GenerateRequest:
    """Submits the generate request. Raises WeirError if it is rejected."""
    name, version = model_and_version(request)
    served = context.catalog.resolve(name, version)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise invalid("Unsupported content-encoding, only 'identity' is supported.")
    body = await request.body()
    if takes_long(body):
        job = generate_job(name, version, body, served.config, context.limits)
        parsed = outlined_request(name, version, await context.offload.run(READ_GENERATE, job))
    else:
        parsed = parse_generate_request(name, version, body, served.config, context.limits)
    parsed.traceparent = request.headers.get("traceparent", "")
    deadline = request.headers.get(DEADLINE_HEADER.decode())
    if deadline is not None:
        parsed.deadline_ms = read_deadline_ms(deadline.encode("latin-1"))
    connection: HttpConnection | None = request.scope.get(CONNECTION_KEY)
    if connection is not None and connection.raw_headers is not None:
        parsed.parameters = add_parameters(parsed.parameters, context.access.http_parameters(connection.raw_headers))
    key = "" if served.split is None else request.headers.get(served.split.rule.header, "")
    on_overflow = connection.abort if connection is not None else None
    generate_request = GenerateRequest(context.inference, on_overflow, request.scope.get(MEMORY_KEY), context.offload)
    generate_request.start(parsed, key)
    return generate_request


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

    def __init__(self, generate_request: GenerateRequest, load: _LoadHeader) -> None:
        super().__init__()
        self._generate_request = generate_request
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self._respond(scope, send)
        finally:
            watching.cancel()
            self._generate_request.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generate_request.close()

    async def _respond(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError


class _SingleResponse(_GenerateResponse):
    async def _respond(self, scope: Scope, send: Send) -> None:
        event = await self._generate_request.single()
        length = (b"content-length", b"%d" % len(event.body))
        await send(_start(event, b"application/json", length, *await self._load.rows()))
        await send({"type": "http.response.body", "body": event.body})


class _EventStream(_GenerateResponse):
    async def _respond(self, scope: Scope, send: Send) -> None:
        event: GenerateEvent | None = await self._generate_request.next()
        await send(_start(event, b"text/event-stream; charset=utf-8", *await self._load.rows()))
        while event is not None:
            # Waits where the client doesn't read; if that takes too long, its connection is ended.
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % event.body, "more_body": True})
            event = await self._generate_request.next()
        await send({"type": "http.response.body", "body": b""})


def _start(event: GenerateEvent | None, content_type: bytes, *more: tuple[bytes, bytes]) -> Any:
    headers = [(b"content-type", content_type), *more]
    if event is not None and event.retry_after_s:
        headers.append((b"retry-after", b"%d" % event.retry_after_s))
    return {"type": "http.response.start", "status": 200 if event is None else event.status, "headers": headers}


MAX_UNREAD_BYTES = 16 << 20
"""Bytes of responses of one request that may wait for their reader."""

_EVENT_BYTES = 200  # memory of an event besides its text

WRONG_COUNT = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class GenerateEvent(NamedTuple):
    """One response as an event: HTTP status, JSON body, and for an error the seconds for `Retry-After` (0: none)."""

    status: int
    body: bytes
    retry_after_s: int = 0


class GenerateRequest:
    """One generate request. `start` submits it; `next` returns its responses in order.

    `on_overflow` is called when the reader has fallen too far behind and the request was cancelled. Responses that wait
    for the reader are charged to `memory`; if that has no room, the reader has fallen too far behind as well.
    """

    def __init__(
        self,
        inference: RequestDispatcher,
        on_overflow: Callable[[], None] | None = None,
        memory: RequestMemory | None = None,
        offload: Offload | None = None,
    ) -> None:
        self._offload = offload or Offload()
        self._memory = memory
        self._inference = inference
        self._on_overflow = on_overflow
        self._pending: PendingRequest | None = None
        self._events: deque[GenerateEvent | InferResponse] = deque()  # a long response is serialized when it is read
        self._unread_bytes = 0
        self._charged_bytes = 0  # all of them, except a first one that found no room
        self._is_over = False
        self._wakeup = asyncio.Event()

    def start(self, request: InferRequest, traffic_key: str = "") -> None:
        """Submits the request, as `RequestDispatcher.submit` describes. Raises WeirError if it is rejected."""
        self._pending = self._inference.submit(request, self._on_response, traffic_key=traffic_key)

    async def next(self) -> GenerateEvent | None:
        """The next response; None when there are no more."""
        while not self._events and not self._is_over:
            self._wakeup.clear()
            await self._wakeup.wait()
        if not self._events:
            return None
        event = self._events.popleft()
        self._count_unread(-_size_bytes(event))
        return await self._serialized(event) if isinstance(event, InferResponse) else event

    async def _serialized(self, response: InferResponse) -> GenerateEvent:
        try:
            parts = await self._offload.run(WRITE_GENERATE, generate_response_job(response))
        except WeirError as error:
            return _event(error)
        return GenerateEvent(200, bytes(parts[0]))

    async def single(self) -> GenerateEvent:
        """The response of a request that must have exactly one."""
        first = await self.next()
        second = await self.next() if first is not None else None
        if first is not None and second is None:
            return first
        self.close()
        return GenerateEvent(first.status if first is not None else 200, error_body(WRONG_COUNT))

    def _count_unread(self, size_bytes: int) -> bool:
        """Counts responses that begin to wait (positive), or were read. Returns False if there is no room for them."""
        self._unread_bytes += size_bytes
        if self._memory is None:
            return True
        if size_bytes < 0:
            self._memory.release_some("unsent", min(-size_bytes, self._charged_bytes))
            self._charged_bytes = max(0, self._charged_bytes + size_bytes)
            return True
        if not self._memory.charge("unsent", size_bytes):
            return False
        self._charged_bytes += size_bytes
        return True

    def close(self) -> None:
        """Ends the request for its reader: it is cancelled if responses are still to come."""
        self._is_over = True
        self._wakeup.set()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._inference.cancel(pending)

    def _on_response(self, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if is_final:
            self._is_over = True
            self._pending = None
        if outcome is not None:
            is_long = isinstance(outcome, InferResponse) and _size_bytes(outcome) > MAX_WRITTEN_BYTES
            event = outcome if isinstance(outcome, InferResponse) and is_long else _event(outcome)
            has_room = self._count_unread(_size_bytes(event))
            if (not has_room or self._unread_bytes > MAX_UNREAD_BYTES) and self._events:
                self._events.clear()
                self.close()
                if self._on_overflow is not None:
                    self._on_overflow()
            else:
                self._events.append(event)
        self._wakeup.set()


def _size_bytes(event: GenerateEvent | InferResponse) -> int:
    if isinstance(event, InferResponse):
        return sum(tensor.size_bytes for tensor in event.outputs) + _EVENT_BYTES
    return len(event.body) + _EVENT_BYTES


def _event(outcome: InferResponse | WeirError) -> GenerateEvent:
    try:
        if isinstance(outcome, InferResponse):
            return GenerateEvent(200, build_generate_response(outcome))
        error = outcome
    except WeirError as unwritable:
        error = unwritable
    return GenerateEvent(error.http_status, error_body(error.message), error.retry_after_s)
