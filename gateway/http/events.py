"""`EventCall`: a request over HTTP that is answered with one JSON object, or with a stream of server-sent events.

The HTTP status is that of the first response; a later error is an event of its own. A reader may be slower than the model:
its call is held while an event waits for it, and a reader that falls too far behind has its connection ended.
Source: the HTML standard for `text/event-stream`.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import Call, Codec
from weir.calls.inference.documents import Document
from weir.calls.request_headers import DEADLINE_HEADER, read_deadline_ms
from weir.gateway.access import add_parameters
from weir.gateway.admin.load_report import REQUEST_HEADER, RESPONSE_HEADER
from weir.gateway.context import GatewayContext
from weir.http_server.asgi import CONNECTION_KEY
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_memory import MEMORY_KEY, RequestMemory
from weir.http_server.door import principal_of
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.kserve.response import error_body

WRONG_COUNT = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class Event(NamedTuple):
    """One response as an event: HTTP status, JSON body, and for an error the seconds for `Retry-After` (0: none)."""

    status: int
    body: bytes
    retry_after_s: int = 0


class EventCall(Call):
    """A request, which came as `request` with `body`, whose responses `codec` writes as JSON objects."""

    __slots__ = ("_body", "_connection", "_event", "_is_ended", "_rejection", "_request", "_wakeup")

    services: GatewayContext

    def __init__(self, context: GatewayContext, codec: Codec, request: Request, body: Document) -> None:
        memory: RequestMemory | None = request.scope.get(MEMORY_KEY)
        super().__init__(context, codec, None if memory is None else memory.account)
        self._body = body
        self._connection: HttpConnection | None = request.scope.get(CONNECTION_KEY)
        self._event: Event | None = None
        self._is_ended = False
        self._rejection: WeirError | None = None
        self._request = request
        self._wakeup = asyncio.Event()

    @property
    def owner(self) -> str:
        """Implements `Call.owner`."""
        return principal_of(self._request).owner

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

    async def next(self) -> Event | None:
        """The next response; None when there are no more."""
        while self._event is None and not self._is_ended:
            self._wakeup.clear()
            await self._wakeup.wait()
        event, self._event = self._event, None
        self.resume()
        return event

    async def single(self) -> Event:
        """The response of a request that must have exactly one."""
        first = await self.next()
        second = await self.next() if first is not None else None
        if first is not None and second is None:
            return first
        self.close()
        return Event(first.status if first is not None else 200, error_body(WRONG_COUNT))

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
        if self._connection is not None and self._connection.raw_headers is not None:
            forwarded = self.services.access.http_parameters(self._connection.raw_headers)
            request.parameters = add_parameters(request.parameters, forwarded)
        key = "" if served.split is None else headers.get(served.split.rule.header, "")
        self._wakeup.set()
        caller = self.services.gate.caller_of(principal_of(self._request))
        inference = self.services.inference
        return inference.submit(request, self.on_response, traffic_key=key, served=served, caller=caller)

    def send(self, encoded: bytes | None, is_final: bool) -> None:
        """Implements `Call.send`."""
        self._put(None if encoded is None else Event(200, encoded), is_final)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Implements `Call.fail`."""
        if not self.is_submitted:
            self._rejection = error
        self._put(Event(error.http_status, error_body(error.message), error.retry_after_s), is_final)

    def overflow(self) -> None:
        """Implements `Call.overflow`: ends the connection, whose client does not read."""
        self.close()
        if self._connection is not None:
            self._connection.abort()

    def _put(self, event: Event | None, is_final: bool) -> None:
        self._event, self._is_ended = event, is_final
        self._wakeup.set()
        self.hold()


class EventResponse(Response):
    """The response to a submitted `call`: one JSON object, or with `is_stream` an event for each response of the model.

    Cancels the request when the client disconnects.
    """

    def __init__(self, call: EventCall, is_stream: bool) -> None:
        super().__init__()
        self._call = call
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_events(scope, send) if self._is_stream else self._send_object(scope, send))
        finally:
            watching.cancel()
            self._call.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.close()

    async def _send_object(self, scope: Scope, send: Send) -> None:
        event = await self._call.single()
        await send(await self._start(scope, event, b"application/json", (b"content-length", b"%d" % len(event.body))))
        await send({"type": "http.response.body", "body": event.body})

    async def _send_events(self, scope: Scope, send: Send) -> None:
        event = await self._call.next()
        await send(await self._start(scope, event, b"text/event-stream; charset=utf-8"))
        while event is not None:
            # Waits where the client doesn't read; if that takes too long, its connection is ended.
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % event.body, "more_body": True})
            event = await self._call.next()
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, scope: Scope, event: Event | None, content_type: bytes, *more: tuple[bytes, bytes]) -> Any:
        headers = [(b"content-type", content_type), *more]
        if event is not None and event.retry_after_s:
            headers.append((b"retry-after", b"%d" % event.retry_after_s))
        reports, load_format = self._call.services.load_reports, dict(scope["headers"]).get(REQUEST_HEADER)
        if load_format is not None and reports is not None:
            await reports.refresh()
            report = reports.header(load_format, self._call.served.name)
            headers += [(RESPONSE_HEADER, report)] if report else []
        return {"type": "http.response.start", "status": 200 if event is None else event.status, "headers": headers}
