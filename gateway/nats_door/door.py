"""`NatsDoor`: a model is asked by a NATS request, and answers on its reply subject.

`infer.<model>` and `infer.<model>.v<version>` take what `POST …/infer` takes: KServe v2 JSON, or with header
`Inference-Header-Content-Length` JSON and binary tensors behind it; and msgpack (`gateway.durable.bodies`). Models with any
number of responses send them all, the last one flagged. Gateways share the subject as a queue group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from bus.headers import parse_headers
from bus.reserved_subjects import may_answer
from calls.catalog import ServedModel
from gateway.doors import Doors
from gateway.durable.bodies import Outline, format_of, outline_of, parse_body, parse_outline
from gateway.nats_door import call as nats_call
from gateway.nats_door.call import NatsCall
from gateway.nats_door.discovery import Endpoint, MicroService
from gateway.nats_door.window import window_of
from gateway.request_headers import read_headers
from gateway.server_info import server_version
from runtime.containment import contained, report
from schemas.errors import Reason, WeirError, internal, overloaded
from schemas.requests import InferRequest

logger = logging.getLogger("weir.gateway")

PRINCIPAL = "nats"
"""In the memory ledger all NATS callers share: nothing in a message proves who sent it."""

_BROKER_PATIENCE_S = 1.0
_DRAIN_POLL_S = 0.02

_BARE_VERSION = "0.0.0"  # the service API wants a semantic version, also of a bare source tree


class NatsDoor:
    """See the module. Everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str, doors: Doors) -> None:
        self._bus = bus
        self._doors = doors
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
        """Takes requests from now on."""
        await self._bus.subscribe(f"{self._flow}.*", self._on_flow)
        for endpoint in self._endpoints:
            take = partial(self._on_request, endpoint)
            unsubscribe = await self._bus.subscribe(endpoint.subject, take, subjects.INFER_QUEUE, drains=True)
            self._unsubscribe.append(unsubscribe)
        await self._service.start()

    async def stop(self) -> None:
        """Has no more requests sent here; returns when those are here that were on their way."""
        self._service.stop()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        with contextlib.suppress(ConnectionError, TimeoutError):  # without a broker nothing is on its way
            await asyncio.wait_for(self._bus.flush(), _BROKER_PATIENCE_S)

    async def close(self, timeout_s: float) -> None:
        """Waits for the acknowledgements of what has been answered; then ends what still waits for some.

        A caller that is silent for some seconds isn't waited for any longer.
        """
        began_s = time.monotonic()
        while self._calls and (now_s := time.monotonic()) < began_s + timeout_s:
            for call in list(self._calls.values()):
                if now_s > max(began_s, call.heard_s) + nats_call.STOPPING_PATIENCE_S:
                    call.refuse(overloaded("the server is stopping", reason=Reason.STOPPING))
            await asyncio.sleep(_DRAIN_POLL_S)
        for call in list(self._calls.values()):
            call.refuse(overloaded("the server is stopping", reason=Reason.STOPPING))

    def _on_request(self, endpoint: Endpoint, message: Message) -> None:
        if not message.reply:
            logger.warning("dropped a request on %s: it names no reply subject", message.subject)
            return
        endpoint.requests += 1
        if not may_answer(message):
            endpoint.ended(0, "400:its reply subject is reserved")
            return
        number = next(self._numbers)
        ended = partial(self._on_end, number, endpoint)
        call = self._calls[number] = NatsCall(
            self._bus,
            message.reply,
            f"{self._flow}.{number}",
            self._doors.ledger.account(PRINCIPAL),
            ended,
            self._doors.offload,
        )
        try:
            call.hold_body(len(message.data))
            self._submit(call, message, number)
        except WeirError as error:
            call.refuse(error)
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.nats_door.door: handling a call", error)
            call.refuse(internal("internal server error"))

    def _submit(self, call: NatsCall, message: Message, number: int) -> None:
        model, version = subjects.infer_target(message.subject)
        version = version.lstrip("0") or version[:1]  # 01 is 1, as over HTTP
        headers = parse_headers(message.header_block)
        call.format = format_of(headers)  # errors are told in it, too
        doors = self._doors
        served = doors.catalog.resolve(model, version)
        outline = outline_of(model, version, message.data, headers, doors.limits)
        if outline is not None:
            reading = doors.offload.start(outline.operation, outline.parts)
            call.give_up = lambda: reading.cancel()
            reading.add_done_callback(partial(self._on_outline, call, number, model, version, served, headers, outline))
            return
        request, _ = parse_body(model, version, message.data, headers, served.config, doors.limits, doors.regions.find)
        self._submit_read(call, served, headers, request)

    @contained(on_error="_fail")
    def _on_outline(
        self,
        call: NatsCall,
        number: int,
        model: str,
        version: str,
        served: ServedModel,
        headers: Mapping[str, str],
        outline: Outline,
        reading: asyncio.Future[list[memoryview]],
    ) -> None:
        """A helper process has read a long body."""
        if reading.cancelled() or self._calls.get(number) is not call:
            return
        doors = self._doors
        try:
            outline = outline._replace(result=reading.result())
            request, _ = parse_outline(model, version, outline, doors.limits, doors.regions.find)
            self._submit_read(call, served, headers, request)
        except WeirError as error:
            call.refuse(error)

    def _fail(self, _error: Exception, call: NatsCall, *_others: object) -> None:
        call.refuse(internal("internal server error"))

    def _submit_read(
        self, call: NatsCall, served: ServedModel, headers: Mapping[str, str], request: InferRequest
    ) -> None:
        doors = self._doors
        read_headers(headers, doors.limits).apply(request)
        call.begin(request, served, window_of(headers))
        pending = doors.inference.submit(request, call.answer)
        call.give_up = partial(doors.inference.abandon, pending)

    def _on_flow(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        call = self._calls.get(int(number)) if number.isascii() and number.isdigit() else None
        if call is None:
            return
        if message.status:
            call.gone()
        else:
            call.acknowledged()

    def _on_end(self, number: int, endpoint: Endpoint, call: NatsCall) -> None:
        if self._calls.pop(number, None) is not None:
            endpoint.ended(call.busy_ns, call.error)
