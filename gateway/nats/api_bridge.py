"""`ApiBridge`: serves the HTTP API to requests that arrive as NATS messages on `api.request` (`weir.calls.gateway_api`).

It runs the ASGI application of the HTTP frontend, so access rules, checks of other web sites, validation, texts and
statuses are those of HTTP. Inference alone has subjects of its own (`weir.gateway.nats.frontend`): the application
answers the infer routes with 405. Gateways share the subject as a queue group. A response travels as one message, so
one that is larger than the broker takes is answered with 413, and `generate_stream` sends all its events at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from starlette.types import ASGIApp

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.gateway.nats.call import PRINCIPAL
from weir.http_server.connection_memory import MEMORY_KEY, RequestMemory, no_memory
from weir.runtime.containment import report
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded
from weir.schemas.core.names import routed_path
from weir.schemas.kserve.response import error_body
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.gateway_api import ApiRequest, ApiResponse

logger = logging.getLogger("weir.gateway")

MAX_IN_FLIGHT = 64
"""Requests that one gateway answers at a time; further ones are answered with 503. Long polls do not count."""

MAX_POLLS = 1000
"""Long polls (`Prefer: wait` for a durable request) of one gateway; further ones are answered at once."""

_KIND = "nats"
_SPARE_BYTES = 16_384
"""Room in a message for the status and the headers of a response."""

_HOST = (b"host", b"nats")
"""With it a forwarded `Origin` is one of another site: no page has this host (`weir.gateway.cross_site`)."""

_BROKER_TIMEOUT_S = 1.0
_DRAIN_POLL_S = 0.02


class ApiBridge:
    """The API of one gateway on the bus. `app` is the application of its HTTP frontend. Runs in one event loop."""

    def __init__(self, bus: Bus, app: ASGIApp, ledger: MemoryLedger) -> None:
        self._bus = bus
        self._app = app
        self._ledger = ledger
        self._tasks: set[asyncio.Task[None]] = set()
        self._polls: set[asyncio.Task[None]] = set()  # of these
        self._unsubscribe: Callable[[], None] = lambda: None
        self.malformed_messages = 0

    async def start(self) -> None:
        """Subscribes to requests."""
        self._unsubscribe = await self._bus.subscribe(
            subjects.API_REQUEST, self._on_request, subjects.API_QUEUE, drains=True
        )

    async def stop(self, timeout_s: float) -> None:
        """Unsubscribes, and returns when the requests in flight are answered, or after `timeout_s`."""
        self._unsubscribe()
        end_s = time.monotonic() + timeout_s
        with contextlib.suppress(ConnectionError, TimeoutError):  # without a broker nothing is in transit
            await asyncio.wait_for(self._bus.flush(), min(_BROKER_TIMEOUT_S, timeout_s))
        while self._tasks and time.monotonic() < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        for task in self._tasks:
            task.cancel()

    def _on_request(self, message: Message) -> None:
        if not may_reply_to(message, subjects.api_replies("")):
            return
        try:
            request = ApiRequest.unpack(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            self._answer(message.reply, _error(400, str(error)))
            return
        is_poll = _is_long_poll(request)
        if is_poll and len(self._polls) >= MAX_POLLS:
            request, is_poll = _without_waiting(request), False
        if not is_poll and len(self._tasks) - len(self._polls) >= MAX_IN_FLIGHT:
            text = f"this gateway answers {MAX_IN_FLIGHT} API requests over the bus at a time; try again later"
            self._answer(message.reply, _weir_error(overloaded(text)))
            return
        account = self._ledger.account(PRINCIPAL)
        if not account.charge(_KIND, len(message.data)):
            account.close()
            self._answer(message.reply, _weir_error(no_memory()))
            return
        exchange = _BusExchange(request, RequestMemory(account), self._bus.max_payload_bytes - _SPARE_BYTES)
        task = asyncio.get_running_loop().create_task(self._serve(exchange, message.reply))
        for kept in (self._tasks, self._polls) if is_poll else (self._tasks,):
            kept.add(task)
            task.add_done_callback(kept.discard)
        task.add_done_callback(lambda _: account.close())

    async def _serve(self, exchange: _BusExchange, reply: str) -> None:
        timer = asyncio.get_running_loop().call_later(exchange.request.timeout_ms / 1000, exchange.disconnect)
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            stopping = overloaded("the server is stopping", reason=Reason.STOPPING)
            self._answer(reply, _weir_error(stopping))
            raise
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("weir.gateway.nats.api_bridge: serving a request", error)
            if not exchange.is_disconnected:
                self._answer(reply, _weir_error(internal("internal server error")))
            return
        finally:
            timer.cancel()
        if not exchange.is_disconnected:
            self._answer(reply, exchange.response())

    def _answer(self, reply: str, response: ApiResponse) -> None:
        self._bus.publish(reply, response.pack())


def _is_long_poll(request: ApiRequest) -> bool:
    """Whether the application may wait before it responds, which takes no work meanwhile."""
    is_of_request = request.method == "GET" and request.target.startswith("/v2/jobs/")
    return is_of_request and any(name.lower() == "prefer" for name, _ in request.headers)


def _without_waiting(request: ApiRequest) -> ApiRequest:
    """The request, to be answered at once."""
    return replace(request, headers=[row for row in request.headers if row[0].lower() != "prefer"])


class _BusExchange:
    """One request as the ASGI application sees it, and the response that it sends."""

    def __init__(self, request: ApiRequest, memory: RequestMemory, max_body_bytes: int) -> None:
        self.request = request
        self.is_disconnected = False
        self._memory = memory
        self._max_body_bytes = max_body_bytes
        self._is_read = False
        self._disconnected = asyncio.Event()
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._body = bytearray()
        self._problem: ApiResponse | None = None
        raw_path, _, query = request.target.partition("?")
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in request.headers]
        if all(name != b"host" for name, _ in headers):
            headers.append(_HOST)
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "server": None,
            "client": None,
            "scheme": "http",
            "root_path": "",
            "method": request.method,
            "path": routed_path(raw_path),
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "headers": headers,
            "state": {},
            MEMORY_KEY: memory,
        }

    def disconnect(self) -> None:
        """The requester no longer waits: to the application it looks as if a client had disconnected."""
        self.is_disconnected = True
        self._disconnected.set()

    async def receive(self) -> dict[str, Any]:
        """The body of the request, then the disconnection."""
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Takes the next part of the response. Drops the rest of one that is too large or finds no memory."""
        if self._problem is not None or self.is_disconnected:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            rows = message.get("headers", ())
            self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in rows]
            return
        part = message.get("body", b"")
        if len(self._body) + len(part) > self._max_body_bytes:
            text = f"the response is larger than the {self._max_body_bytes} bytes that the message broker takes"
            self._fail(_error(413, text))
        elif not self._memory.charge(_KIND, len(part)):
            self._fail(_weir_error(no_memory()))
        else:
            self._body += part
        if not message.get("more_body", False):
            self._disconnected.set()

    def response(self) -> ApiResponse:
        """The response, once the application has returned."""
        if self._problem is not None:
            return self._problem
        if not self._status:
            return _weir_error(internal("internal server error"))
        return ApiResponse(self._status, self._headers, bytes(self._body))

    def _fail(self, problem: ApiResponse) -> None:
        self._problem = problem
        self._body.clear()
        self._disconnected.set()


def _error(status: int, text: str) -> ApiResponse:
    return ApiResponse(status, [("content-type", "application/json")], error_body(text))


def _weir_error(error: WeirError) -> ApiResponse:
    response = _error(error.http_status, error.message)
    if error.retry_after_s:
        response.headers.append(("retry-after", str(error.retry_after_s)))
    return response
