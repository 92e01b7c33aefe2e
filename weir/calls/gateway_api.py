"""`GatewayApi`: requests to the HTTP API of any gateway, over the bus.

A process that has a connection to the broker and no address of a gateway, such as the console, loads models, sets traffic
and lists jobs with the requests that HTTP clients send: access rules, texts and statuses are those of HTTP.
Inference requests are not part of it: they are published on `infer.<model>` (`weir.gateway.nats`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.replies import ReplyInbox
from weir.schemas.core.errors import Reason, internal, invalid, unavailable
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.gateway_api import ApiRequest, ApiResponse

TIMEOUT_S = 10.0
"""How long a request waits for its response, unless the caller says otherwise."""

_SPARE_BYTES = 512
"""Room in a message for what surrounds the body, besides the target and the headers."""


class Response(NamedTuple):
    """The response of a gateway. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class GatewayApi:
    """Requests of one process. Everything runs in one event loop. `id` is the process's id on the bus."""

    def __init__(self, bus: Bus, id: str) -> None:
        self._bus = bus
        self._replies = ReplyInbox(bus, subjects.api_replies(id))

    async def start(self) -> None:
        """Subscribes to responses."""
        await self._replies.start()
        self._bus.on_loss(self._replies.fail_all)

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float = TIMEOUT_S,
    ) -> Response:
        """Sends a request to one of the gateways and returns its response, whatever its status.

        `path` is percent-encoded and may have a query. Raises WeirError: UNAVAILABLE if the broker is away, no gateway is
        connected to it, or none responds within `timeout_s` (the request may have been carried out then); INVALID_ARG for
        a request that is malformed or larger than the broker takes.
        """
        message = self._message(method, path, dict(headers or {}), body, timeout_s)
        if not self._bus.is_connected:
            raise unavailable("the message broker is not connected", Reason.BROKER_AWAY)
        try:
            reply = await self._replies.request(subjects.API_REQUEST, message, timeout_s=timeout_s)
        except TimeoutError:
            raise unavailable(f"no gateway answered {method} {path} within {timeout_s:g} s") from None
        except ConnectionError:
            raise unavailable(
                f"the connection to the message broker was lost before {method} {path} was answered",
                Reason.BROKER_AWAY,
            ) from None
        if reply.status == "503":
            raise unavailable("no gateway is connected to the message broker")
        try:
            response = ApiResponse.unpack(reply.data)
        except MalformedMessage:
            raise internal(f"the gateway's answer to {method} {path} is malformed") from None
        return Response(response.status, {name.lower(): value for name, value in response.headers}, response.body)

    def _message(self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: float) -> bytes:
        row = {
            "method": method,
            "target": path,
            "headers": list(headers.items()),
            "body": body,
            "timeout_ms": int(timeout_s * 1000),
        }
        try:
            # The constructor of a record checks nothing.
            message = msgspec.convert(row, ApiRequest).pack()
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise invalid(f"{method[:16]} {path[:200]} is not a valid request: {error}") from None
        if len(message) + _SPARE_BYTES > self._bus.max_payload_bytes:
            raise invalid(
                f"the request of {len(message)} bytes is larger than the {self._bus.max_payload_bytes} bytes that the"
                " message broker takes"
            )
        return message
