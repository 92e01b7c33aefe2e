"""`NatsCall`: one request of a NATS client, and its responses on the reply subject.

The headers of a response state whether it is the last (`Weir-Final`) and the outcome of the request (`Weir-Outcome`). A
model may respond faster than its client reads, and NATS has no back pressure. A client that needs it requests a window:
it gets that many responses, and one more for each that it acknowledges with an empty message on the response's own reply
subject. The responses that wait are bounded in bytes and in time. If no client listens any more, nats-server reports that
on the same subject: the request is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from weir.access.gate import Asked, Shown
from weir.access.policy.actions import Action
from weir.access.principal import NOBODY
from weir.bus.nats.connection import Bus
from weir.bus.nats.headers import pack_headers
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import MAX_WAITING_BYTES, Call, Outcome
from weir.calls.inference.documents import (
    HEADER_LENGTH,
    Document,
    Encoded,
    Headers,
    codec_of,
    encode_error,
    format_of,
    message_of,
)
from weir.calls.request_headers import read_headers, read_number
from weir.gateway.context import GatewayContext
from weir.http_server.connection_memory import no_memory
from weir.schemas.core.errors import ErrorCode, WeirError, unavailable
from weir.schemas.core.requests import InferRequest
from weir.telemetry.access_log import CANCELLED, AccessLog

ACKNOWLEDGEMENT_TIMEOUT_S = 300.0
"""How long responses wait for the next acknowledgement: a disconnected client is detected only by sending to it."""

FULL_ACKNOWLEDGEMENT_TIMEOUT_S = 5.0
"""The same while more than `MAX_WAITING_BYTES` wait."""

STOP_ACKNOWLEDGEMENT_TIMEOUT_S = 5.0
"""The same while the gateway stops, so that a disconnected client does not delay the stop."""

PRINCIPAL = "nats"
"""The name that all NATS clients share in the memory ledger: nothing in a message proves who sent it."""

_OK = 200
_SUBJECT, _SUBJECT_OF_VERSION, _BY = "infer.{model}", "infer.{model}.v{version}", "by.{user}."  # in the access log
_HEADERS_BYTES = 512  # an upper bound for the headers of a response
_MAX_HEADER_LENGTH = 1024
_FALLEN_BEHIND = "the client has fallen behind: too many responses wait for acknowledgements"
_SILENT = "the client has acknowledged no response for too long"
_SUCCEEDED = ("Weir-Outcome", "succeeded")
_IS_FINAL = {False: ("Weir-Final", "false"), True: ("Weir-Final", "true")}


class ReplySubjects(NamedTuple):
    """The subject of responses, and the one on which the client acknowledges them."""

    responses: str
    acknowledgements: str


class NatsRequest(NamedTuple):
    """A request message: the model and the version of its subject, its headers, and its body.

    `user` is the user of the broker on whose subject it came, "" for a subject of nobody's.
    """

    model: str
    version: str
    headers: Mapping[str, str]
    data: bytes
    user: str = ""


class NatsCall(Call):
    """One request of a NATS client. `on_end` is called when all is sent.

    The request's body and the responses that wait for acknowledgements are charged to an account of `PRINCIPAL`, which ends
    with the call.
    """

    __slots__ = (
        "_bus",
        "_credit",
        "_message",
        "_on_end",
        "_started_ns",
        "_subjects",
        "_timer",
        "_window",
        "error",
        "format",
        "last_acknowledged_s",
        "principal",
        "sent_bytes",
    )

    kind = "nats"
    services: GatewayContext

    def __init__(
        self,
        context: GatewayContext,
        bus: Bus,
        subjects: ReplySubjects,
        message: NatsRequest,
        on_end: Callable[[NatsCall], None],
    ) -> None:
        self.format = format_of(message.headers)
        """The format of responses and errors."""
        super().__init__(context, codec_of(self.format), context.ledger.account(PRINCIPAL))
        self._bus = bus
        self._subjects = subjects
        self._message = message
        self._on_end = on_end
        self._window = 0
        self._credit = 0
        self._timer: asyncio.TimerHandle | None = None
        self._started_ns = time.monotonic_ns()
        self.last_acknowledged_s = 0.0
        """Monotonic time of the last acknowledgement; 0 before the first."""
        self.error = ""
        self.principal = NOBODY
        """Who sends the request."""
        self.sent_bytes = 0

    @property
    def user(self) -> str:
        """The user of the broker who has published the request, "" where its subject proves none."""
        return self._message.user

    @property
    def busy_ns(self) -> int:
        """The time since the call began."""
        return time.monotonic_ns() - self._started_ns

    def log(self, log: AccessLog) -> None:
        """Writes the line of the request, which has ended, in the access log."""
        model, version, _, data, user = self._message
        status = self.error.partition(":")[0]
        log.record(
            "nats",
            "PUB",
            (_BY if user else "") + (_SUBJECT_OF_VERSION if version else _SUBJECT),
            model,
            version,
            int(status) if status.isdecimal() else CANCELLED if status else _OK,
            len(data),
            self.sent_bytes,
            self._started_ns,
            self.principal,
        )

    # From the client

    def begin(self) -> Document:
        """Implements `Call.begin`."""
        model, version, headers, data, user = self._message
        gate = self.services.gate
        if gate.is_on:
            tenant = headers.get("weir-tenant", "").encode("latin-1", "replace")
            authorization = headers.get("authorization", "").encode(errors="replace")
            shown = Shown(authorization, tenant=tenant, broker_user=user)
            self.principal = gate.admit(shown, self._asked(model, version, len(data)))
        if self.account is not None and not self.account.charge(self.kind, len(data)):
            raise no_memory()
        served = self.services.catalog.resolve(model, version)
        return Document(served, model, version, data, headers.get(HEADER_LENGTH))

    @property
    def owner(self) -> str:
        """Implements `Call.owner`."""
        return self.principal.owner

    def _asked(self, model: str, version: str, size: int) -> Asked:
        return Asked("nats", "infer", Action.INFER, model, version, size=size, is_counted=self.is_counted)

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Implements `Call.submit`."""
        headers, served = self._message.headers, self.served
        read_headers(headers, self.services.limits).apply(request)
        self._window = self._credit = requested_window(headers)
        key = "" if served.split is None else headers.get(served.split.rule.header, "")
        caller = self.services.gate.caller_of(self.principal)
        inference = self.services.inference
        return inference.submit(request, self.on_response, traffic_key=key, served=served, caller=caller)

    def acknowledged(self) -> None:
        """The client has acknowledged a response."""
        if not self._window:
            return
        self._credit = min(self._credit + 1, self._window)
        self.last_acknowledged_s = time.monotonic()
        self._stop_timer()
        self.resume()

    def disconnected(self) -> None:
        """The client has disconnected."""
        self.cancel()
        self.error = self.error or "the client has disconnected"
        self._close()

    def reject(self, error: WeirError) -> None:
        """Ends the call with an error; responses that wait are dropped."""
        self.cancel()
        self.fail(error)

    # To the client

    def keep(self, outcome: Outcome, is_final: bool) -> None:
        """Implements `Call.keep`. What waits for an acknowledgement waits for a limited time."""
        super().keep(outcome, is_final)
        if self._window and not self._credit and not self.is_over:
            self._start_timer()

    def send(self, encoded: Encoded | None, is_final: bool) -> None:
        """Implements `Call.send`."""
        headers: Headers = []
        body = b""
        if encoded is not None:
            # Checked before the body is joined: it may have hundreds of megabytes.
            size, limit = sum(map(len, encoded[0])), self._bus.max_payload_bytes
            if size + _HEADERS_BYTES > limit:
                self.fail(
                    unavailable(f"the response of {size} bytes is larger than the message broker takes"), is_final
                )
                return
            headers, body = message_of(encoded, self.format)
        self._publish([*headers, _SUCCEEDED, _IS_FINAL[is_final]], body, is_final)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Implements `Call.fail`."""
        message = error.message[:_MAX_HEADER_LENGTH]
        self.error = f"{error.http_status}:{message}"
        outcome = "cancelled" if error.code is ErrorCode.CANCELLED else "failed"
        headers, body = encode_error(error, self.format)
        headers += [
            ("Nats-Service-Error-Code", str(error.http_status)),
            ("Nats-Service-Error", message),
            ("Weir-Outcome", outcome),
            _IS_FINAL[is_final],
        ]
        if error.retry_after_s:
            headers.append(("Retry-After", str(error.retry_after_s)))
        headers += error.headers
        self._publish(headers, body, is_final)

    def overflow(self) -> None:
        """Implements `Call.overflow`."""
        self.fail(unavailable(_FALLEN_BEHIND))

    def _publish(self, headers: Headers, body: bytes, is_final: bool) -> None:
        responses, acknowledgements = self._subjects
        self.sent_bytes += len(body)
        self._bus.publish(responses, body, "" if is_final else acknowledgements, pack_headers(headers))
        if is_final:
            self._close()
        elif self._window:
            self._credit -= 1
            if self._credit <= 0:
                self.hold()
                if self.has_waiting:
                    self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            timeout_s, reason = ACKNOWLEDGEMENT_TIMEOUT_S, _SILENT
            if self.held_bytes > MAX_WAITING_BYTES:  # they came while a helper process wrote one
                timeout_s, reason = FULL_ACKNOWLEDGEMENT_TIMEOUT_S, _FALLEN_BEHIND
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.reject, unavailable(reason))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._stop_timer()
        self._on_end(self)

    def release(self) -> None:
        """Implements `Call.release`."""
        if self.account is not None:
            self.account.close()


WINDOW = "weir-window"
"""The header that sets how many responses may be unacknowledged."""

_MAX_WINDOW = 65_536


def requested_window(headers: Mapping[str, str]) -> int:
    """The requested window; 0 for no bound. Raises WeirError (INVALID_ARG) for anything but a number."""
    return min(read_number(headers, WINDOW), _MAX_WINDOW) if WINDOW in headers else 0
