"""The generate extension over HTTP: one JSON object, or a stream of server-sent events.

Source: Triton's generate extension, and the HTML standard for `text/event-stream`. The status is that of the first answer;
an error that comes later is an event of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.access import add_parameters
from gateway.connection_memory import MEMORY_KEY
from gateway.deadlines import DEADLINE_HEADER, read_deadline_ms
from gateway.doors import Doors
from gateway.generation import Event, Generation
from gateway.http.protocol import CONNECTION_KEY, HttpProtocol
from gateway.http.routing import MODEL_PATHS, named, post
from runtime.offload import OFF_LOOP_BYTES
from schemas.errors import invalid
from schemas.kserve_generate import parse_generate_request
from schemas.offloaded import READ_GENERATE, generate_job, outlined_request


def generate_routes(doors: Doors) -> list[Route]:
    """`generate` and `generate_stream`, of a model and of a version of it."""

    async def generate(request: Request) -> Response:
        return _SingleAnswer(await _started(doors, request))

    async def generate_stream(request: Request) -> Response:
        return _EventStream(await _started(doors, request))

    return [
        post(f"{prefix}/{name}", handler)
        for prefix in MODEL_PATHS
        for name, handler in (("generate", generate), ("generate_stream", generate_stream))
    ]


async def _started(doors: Doors, request: Request) -> Generation:
    """The generation that this request asks for, on its way. Raises WeirError for what is refused at the door."""
    name, version = named(request)
    served = doors.catalog.resolve(name, version)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise invalid("Unsupported content-encoding, only 'identity' is supported.")
    body = await request.body()
    if len(body) > OFF_LOOP_BYTES:
        job = generate_job(name, version, body, served.config, doors.limits)
        asked = outlined_request(name, version, await doors.offload.run(READ_GENERATE, job))
    else:
        asked = parse_generate_request(name, version, body, served.config, doors.limits)
    asked.traceparent = request.headers.get("traceparent", "")
    deadline = request.headers.get(DEADLINE_HEADER.decode())
    if deadline is not None:
        asked.deadline_ms = read_deadline_ms(deadline.encode("latin-1"))
    connection: HttpProtocol | None = request.scope.get(CONNECTION_KEY)
    if connection is not None and connection.raw_headers is not None:
        asked.parameters = add_parameters(asked.parameters, doors.access.http_parameters(connection.raw_headers))
    on_overflow = connection.abort if connection is not None else None
    generation = Generation(doors.inference, on_overflow, request.scope.get(MEMORY_KEY), doors.offload)
    generation.start(asked)
    return generation


class _GenerationResponse(Response):
    """A response that is made while its generation goes on, and ends it when its client goes away."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self._respond(scope, send)
        finally:
            watching.cancel()
            self._generation.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.close()

    async def _respond(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError


class _SingleAnswer(_GenerationResponse):
    async def _respond(self, scope: Scope, send: Send) -> None:
        event = await self._generation.only()
        await send(_start(event, b"application/json", (b"content-length", b"%d" % len(event.body))))
        await send({"type": "http.response.body", "body": event.body})


class _EventStream(_GenerationResponse):
    async def _respond(self, scope: Scope, send: Send) -> None:
        event: Event | None = await self._generation.next()
        await send(_start(event, b"text/event-stream; charset=utf-8"))
        while event is not None:
            # Waits where the client doesn't read; if that takes too long, its connection is ended.
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % event.body, "more_body": True})
            event = await self._generation.next()
        await send({"type": "http.response.body", "body": b""})


def _start(event: Event | None, content_type: bytes, *more: tuple[bytes, bytes]) -> Any:
    headers = [(b"content-type", content_type), *more]
    if event is not None and event.retry_after_s:
        headers.append((b"retry-after", b"%d" % event.retry_after_s))
    return {"type": "http.response.start", "status": 200 if event is None else event.status, "headers": headers}
