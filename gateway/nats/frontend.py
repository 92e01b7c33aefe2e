"""`NatsFrontend`: serves inference requests that arrive as NATS messages, and responds on their reply subjects.

`infer.<model>` and `infer.<model>.v<version>` take the bodies of `POST …/infer`: KServe v2 JSON, or with the header
`Inference-Header-Content-Length` JSON followed by binary tensors; and msgpack (`weir.calls.message_bodies`). All responses
of a decoupled model are sent, with a flag on the last. Gateways share the subjects as a queue group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import NamedTuple

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import parse_headers
from weir.calls.catalog import ServedModel
from weir.calls.message_bodies import OffloadedBody, format_of, offload_body, parse_body, parse_offloaded_body
from weir.calls.request_headers import read_headers
from weir.gateway.admin.metadata import server_version
from weir.gateway.context import GatewayContext
from weir.gateway.nats import call as nats_call
from weir.gateway.nats.call import NatsCall, ReplySubjects, requested_window
from weir.gateway.nats.discovery import Endpoint, MicroService
from weir.runtime.containment import contained, report
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded
from weir.schemas.core.requests import InferRequest

logger = logging.getLogger("weir.gateway")

PRINCIPAL = "nats"
"""The name that all NATS clients share in the memory ledger: nothing in a message proves who sent it."""

_BROKER_TIMEOUT_S = 1.0
_DRAIN_POLL_S = 0.02

_BARE_VERSION = "0.0.0"  # the service API requires a semantic version, which a source tree may lack


class _OffloadedRequest(NamedTuple):
    """A request of call `number` whose body a helper process parses."""

    number: int
    model: str
    version: str
    served: ServedModel
    headers: Mapping[str, str]
    body: OffloadedBody


class NatsFrontend:
    """The NATS frontend of one gateway. Everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str, context: GatewayContext) -> None:
        self._bus = bus
        self._context = context
        self._flow = subjects.infer_flow(gateway_id)
        self._numbers = count(1)
        self._calls: dict[int, NatsCall] = {}
        self._endpoints = [Endpoint("infer", subjects.INFER), Endpoint("infer-version", subjects.INFER_VERSION)]
        version = server_version()
        self._service = MicroService(
            bus, gateway_id, version if version[0].isdigit() else _BARE_VERSION, self._endpoints
        )
        self._unsubscribe: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Subscribes to requests."""
        await self._bus.subscribe(f"{self._flow}.*", self._on_flow)
        for endpoint in self._endpoints:
            take = partial(self._on_request, endpoint)
            unsubscribe = await self._bus.subscribe(endpoint.subject, take, subjects.INFER_QUEUE, drains=True)
            self._unsubscribe.append(unsubscribe)
        await self._service.start()
        with contextlib.suppress(ConnectionError, TimeoutError):  # a reconnection subscribes again
            await self._bus.flush()  # a gateway that reports that it is ready must have its subscriptions

    async def stop(self) -> None:
        """Unsubscribes; returns when the requests that were in transit have arrived."""
        self._service.stop()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        with contextlib.suppress(ConnectionError, TimeoutError):  # without a broker nothing is in transit
            await asyncio.wait_for(self._bus.flush(), _BROKER_TIMEOUT_S)

    async def close(self, timeout_s: float) -> None:
        """Waits for acknowledgements of responses, then ends the calls that still wait for some.

        A client that acknowledges nothing for some seconds is not waited for.
        """
        began_s = time.monotonic()
        while self._calls and (now_s := time.monotonic()) < began_s + timeout_s:
            for call in list(self._calls.values()):
                if now_s > max(began_s, call.last_acknowledged_s) + nats_call.STOP_ACKNOWLEDGEMENT_TIMEOUT_S:
                    call.reject(overloaded("the server is stopping", reason=Reason.STOPPING))
            await asyncio.sleep(_DRAIN_POLL_S)
        for call in list(self._calls.values()):
            call.reject(overloaded("the server is stopping", reason=Reason.STOPPING))

    def _on_request(self, endpoint: Endpoint, message: Message) -> None:
        if not message.reply:
            logger.warning("dropped a request on %s: it has no reply subject", message.subject)
            return
        endpoint.requests += 1
        if not may_reply_to(message):
            endpoint.count(0, "400:its reply subject is reserved")
            return
        number = next(self._numbers)
        ended = partial(self._on_end, number, endpoint)
        call = self._calls[number] = NatsCall(
            self._bus,
            ReplySubjects(message.reply, f"{self._flow}.{number}"),
            self._context.ledger.account(PRINCIPAL),
            ended,
            self._context.offload,
        )
        try:
            call.charge_body(len(message.data))
            self._submit(call, message, number)
        except WeirError as error:
            call.reject(error)
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("weir.gateway.nats.frontend: handling a call", error)
            call.reject(internal("internal server error"))

    def _submit(self, call: NatsCall, message: Message, number: int) -> None:
        model, version = subjects.infer_target(message.subject)
        version = version.lstrip("0") or version[:1]  # 01 is 1, as over HTTP
        headers = parse_headers(message.header_block)
        call.format = format_of(headers)  # also the format of errors
        context = self._context
        served = context.catalog.resolve(model, version)
        offloaded = offload_body(model, version, message.data, headers, context.limits)
        if offloaded is not None:
            reading = context.offload.start(offloaded.operation, offloaded.parts)
            call.cancel = lambda: reading.cancel()
            body = _OffloadedRequest(number, model, version, served, headers, offloaded)
            reading.add_done_callback(partial(self._on_offloaded, call, body))
            return
        request, _ = parse_body(
            model, version, message.data, headers, served.config, context.limits, context.regions.find
        )
        self._submit_parsed(call, served, headers, request)

    @contained(on_error="_fail")
    def _on_offloaded(
        self, call: NatsCall, request: _OffloadedRequest, reading: asyncio.Future[list[memoryview]]
    ) -> None:
        """Submits the request that a helper process has parsed."""
        if reading.cancelled() or self._calls.get(request.number) is not call:
            return
        limits, find_region = self._context.limits, self._context.regions.find
        try:
            body = request.body._replace(result=reading.result())
            parsed, _ = parse_offloaded_body(request.model, request.version, body, limits, find_region)
            self._submit_parsed(call, request.served, request.headers, parsed)
        except WeirError as error:
            call.reject(error)

    def _fail(self, _error: Exception, call: NatsCall, *_others: object) -> None:
        call.reject(internal("internal server error"))

    def _submit_parsed(
        self, call: NatsCall, served: ServedModel, headers: Mapping[str, str], request: InferRequest
    ) -> None:
        context = self._context
        read_headers(headers, context.limits).apply(request)
        key = "" if served.split is None else headers.get(served.split.rule.header, "")
        call.begin(request, served, requested_window(headers))
        pending = context.inference.submit(request, call.on_response, traffic_key=key)
        call.cancel = partial(context.inference.cancel, pending)

    def _on_flow(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        call = self._calls.get(int(number)) if number.isascii() and number.isdigit() else None
        if call is None:
            return
        if message.status:
            call.disconnected()
        else:
            call.acknowledged()

    def _on_end(self, number: int, endpoint: Endpoint, call: NatsCall) -> None:
        if self._calls.pop(number, None) is not None:
            endpoint.count(call.busy_ns, call.error)
