"""`NatsFrontend`: serves inference requests that arrive as NATS messages, and responds on their reply subjects.

`infer.<model>` and `infer.<model>.v<version>` take the bodies of `POST …/infer`: KServe v2 JSON, or with the header
`Inference-Header-Content-Length` JSON followed by binary tensors; and msgpack (`weir.calls.inference.documents`). All
responses of a decoupled model are sent, with a flag on the last. Gateways share the subjects as a queue group. The same
subjects behind `by.<user>.` are those of a user of the broker (`weir.bus.naming.subjects.publisher`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.headers import parse_headers
from weir.gateway.admin.metadata import server_version
from weir.gateway.context import GatewayContext
from weir.gateway.nats import call as nats_call
from weir.gateway.nats.call import NatsCall, NatsRequest, ReplySubjects
from weir.gateway.nats.discovery import Endpoint, MicroService
from weir.schemas.core.errors import Reason, overloaded

logger = logging.getLogger("weir.gateway")

_BROKER_TIMEOUT_S = 1.0
_DRAIN_POLL_S = 0.02

_BARE_VERSION = "0.0.0"  # the service API requires a semantic version, which a source tree may lack


class NatsFrontend:
    """The NATS frontend of one gateway. Everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str, context: GatewayContext) -> None:
        self._bus = bus
        self._context = context
        self._id = gateway_id
        self._flow = subjects.infer_flow(gateway_id)
        self._numbers = count(1)
        self._calls: dict[int, NatsCall] = {}
        self._endpoints = [
            Endpoint("infer", subjects.INFER),
            Endpoint("infer-version", subjects.INFER_VERSION),
            Endpoint("infer-by", subjects.INFER_BY),
            Endpoint("infer-version-by", subjects.INFER_VERSION_BY),
        ]
        version = server_version()
        self._service = MicroService(
            bus, gateway_id, version if version[0].isdigit() else _BARE_VERSION, self._endpoints
        )
        self._unsubscribe: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Subscribes to requests."""
        for flow in (self._flow, subjects.infer_flow_by_any(self._id)):
            await self._bus.subscribe(f"{flow}.*", self._on_flow)
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
        user, subject = subjects.publisher(message.subject)
        model, version = subjects.infer_target(subject)
        version = version.lstrip("0") or version[:1]  # 01 is 1, as over HTTP
        call = self._calls[number] = NatsCall(
            self._context,
            self._bus,
            ReplySubjects(message.reply, f"{subjects.infer_flow_by(self._id, user) if user else self._flow}.{number}"),
            NatsRequest(model, version, parse_headers(message.header_block), message.data, user),
            partial(self._on_end, number, endpoint),
        )
        call.open()

    def _on_flow(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        call = self._calls.get(int(number)) if number.isascii() and number.isdigit() else None
        if call is None or call.user != subjects.publisher(message.subject)[0]:
            return
        if message.status:
            call.disconnected()
        else:
            call.acknowledged()

    def _on_end(self, number: int, endpoint: Endpoint, call: NatsCall) -> None:
        if self._calls.pop(number, None) is not None:
            endpoint.count(call.busy_ns, call.error)
            if self._context.access_log is not None:
                call.log(self._context.access_log)
