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
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from weir.bus.nats.connection import Bus
from weir.bus.nats.headers import pack_headers
from weir.calls.catalog import ServedModel
from weir.calls.message_bodies import BodyFormat, encode_error, encode_response, long_output_specs
from weir.calls.request_headers import read_number
from weir.http_server.connection_memory import no_memory
from weir.runtime.containment import contained
from weir.runtime.memory_ledger import Account
from weir.runtime.offload import Offload
from weir.schemas.core.errors import ErrorCode, WeirError, internal, unavailable
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.offloaded import WRITE_OUTPUTS, OutputWish, write_job, written_outputs
from weir.schemas.kserve.response import LongOutputs

MAX_UNREAD_BYTES = 16 << 20
"""Bytes of responses of one request that may wait for acknowledgements."""

ACKNOWLEDGEMENT_TIMEOUT_S = 300.0
"""How long responses wait for the next acknowledgement: a disconnected client is detected only by sending to it."""

STOP_ACKNOWLEDGEMENT_TIMEOUT_S = 5.0
"""The same while the gateway stops, so that a disconnected client does not delay the stop."""

_KIND = "nats"
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


class NatsCall:
    """One request of a NATS client. `on_end` is called when all is sent.

    The request's body and the responses that wait for acknowledgements are charged to `account`, which ends with the call.
    """

    __slots__ = (
        "_account",
        "_bus",
        "_credit",
        "_flow",
        "_offload",
        "_on_end",
        "_reply",
        "_started_ns",
        "_submitted",
        "_timer",
        "_unsent",
        "_unsent_bytes",
        "_waiting",
        "_window",
        "_writing",
        "cancel",
        "error",
        "format",
        "last_acknowledged_s",
    )

    def __init__(
        self,
        bus: Bus,
        subjects: ReplySubjects,
        account: Account,
        on_end: Callable[[NatsCall], None],
        offload: Offload | None = None,
    ) -> None:
        self._bus = bus
        self._offload = offload or Offload()
        self._writing: asyncio.Task[list[memoryview]] | None = None  # a response that a helper process encodes
        self._waiting: deque[tuple[InferResponse | WeirError | None, bool]] = deque()  # the responses after it
        self._reply = subjects.responses
        self._flow = subjects.acknowledgements
        self._on_end = on_end
        self._submitted: tuple[InferRequest, ServedModel] | None = None
        self._window = 0
        self._credit = 0
        self._unsent: deque[tuple[bytes, bytes, bool]] = deque()
        self._unsent_bytes = 0
        self._account = account
        self._timer: asyncio.TimerHandle | None = None
        self._started_ns = time.monotonic_ns()
        self.last_acknowledged_s = 0.0
        """Monotonic time of the last acknowledgement; 0 before the first."""
        self.format = BodyFormat.JSON
        """The format of responses and errors."""
        self.error = ""
        self.cancel: Callable[[], object] = lambda: None
        """Cancels the request; set by the code that submits it."""

    def begin(self, request: InferRequest, served: ServedModel, window: int) -> None:
        """The request is about to be submitted; at most `window` (0: any number) of its responses are unacknowledged."""
        self._submitted = request, served
        self._window = self._credit = window

    @property
    def busy_ns(self) -> int:
        """The time since the call began."""
        return time.monotonic_ns() - self._started_ns

    def on_response(self, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        """Takes a response of the model, an error, or the end of the responses (None)."""
        if self._writing is not None:
            # The helper process is slow, not the client: only the memory ledger bounds what waits here.
            if self._account.charge(_KIND, _size_bytes(outcome)):
                self._waiting.append((outcome, is_final))
            else:
                self._cancel(_FALLEN_BEHIND)
            return
        try:
            self._respond(outcome, is_final)
        except LongOutputs:
            assert isinstance(outcome, InferResponse)  # noqa: S101 - only that has outputs
            self._write(outcome, is_final)

    def _respond(
        self, outcome: InferResponse | WeirError | None, is_final: bool, written: Mapping[str, Tensor] | None = None
    ) -> None:
        try:
            headers, body = self._encoded(outcome, is_final, written)
        except WeirError as error:
            headers, body = self._error(error, is_final)
        block = pack_headers(headers)
        if not self._window or self._credit:
            self._send(block, body, is_final)
            return
        self._unsent.append((block, body, is_final))
        has_room = self._add_unsent(len(block) + len(body))
        if not has_room or (self._unsent_bytes > MAX_UNREAD_BYTES and not is_final):
            self._cancel(_FALLEN_BEHIND)
        elif self._timer is None:
            self._wait()

    def _write(self, response: InferResponse, is_final: bool) -> None:
        """Has a helper process encode outputs that take long; responses that arrive meanwhile wait."""
        assert self._submitted is not None  # noqa: S101 - a response implies a request
        wishes = long_output_specs(self._submitted[0], response, self._submitted[1], self.format)
        try:
            self._writing = self._offload.start(WRITE_OUTPUTS, write_job(wishes))
        except WeirError as error:
            self._respond(error, is_final)
            return
        self._writing.add_done_callback(partial(self._on_written, response, is_final, wishes))

    @contained(on_error="_fail")
    def _on_written(
        self,
        response: InferResponse,
        is_final: bool,
        wishes: list[OutputWish],
        writing: asyncio.Future[list[memoryview]],
    ) -> None:
        if self._writing is not writing or writing.cancelled():
            return  # the call has ended
        self._writing = None
        try:
            self._respond(response, is_final, written_outputs(wishes, writing.result()))
        except WeirError as error:
            self._respond(error, is_final)
        while self._waiting and self._writing is None:
            outcome, is_final = self._waiting.popleft()
            self._account.release(_KIND, _size_bytes(outcome))
            self.on_response(outcome, is_final)

    def _fail(self, _error: Exception, *_others: object) -> None:
        self.cancel()
        self.reject(internal("internal server error"))

    def reject(self, error: WeirError) -> None:
        """Ends the call with an error; responses that wait are dropped."""
        headers, body = self._error(error, True)
        self._send(pack_headers(headers), body, True)

    def acknowledged(self) -> None:
        """The client has acknowledged a response."""
        if not self._window:
            return
        self._credit = min(self._credit + 1, self._window)
        self.last_acknowledged_s = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._credit and self._unsent:
            block, body, is_final = self._unsent.popleft()
            self._remove_unsent(len(block) + len(body))
            self._send(block, body, is_final)
        if self._unsent:
            self._wait()

    def disconnected(self) -> None:
        """The client has disconnected."""
        self.cancel()
        self.error = self.error or "the client has disconnected"
        self._end()

    def _wait(self) -> None:
        timeout_s = ACKNOWLEDGEMENT_TIMEOUT_S
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._cancel, _SILENT)

    def _cancel(self, reason: str) -> None:
        self.cancel()
        self.reject(unavailable(reason))

    def _send(self, block: bytes, body: bytes, is_final: bool) -> None:
        if self._window:
            self._credit = max(0, self._credit - 1)
        self._bus.publish(self._reply, body, "" if is_final else self._flow, block)
        if is_final:
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        self._unsent.clear()
        self._waiting.clear()
        self._unsent_bytes = 0
        self._account.close()
        self._on_end(self)

    def charge_body(self, size_bytes: int) -> None:
        """Charges the request's body until the call ends. Raises WeirError (UNAVAILABLE) if there is no room for it."""
        if not self._account.charge(_KIND, size_bytes):
            raise no_memory()

    def _add_unsent(self, size_bytes: int) -> bool:
        """Counts a response that begins to wait. Returns False if there is no room for it: the call has to end then."""
        if not self._account.charge(_KIND, size_bytes):
            return False
        self._unsent_bytes += size_bytes
        return True

    def _remove_unsent(self, size_bytes: int) -> None:
        self._unsent_bytes -= size_bytes
        self._account.release(_KIND, size_bytes)

    def _encoded(
        self, outcome: InferResponse | WeirError | None, is_final: bool, written: Mapping[str, Tensor] | None = None
    ) -> tuple[list[tuple[str, str]], bytes]:
        if isinstance(outcome, WeirError):
            raise outcome
        assert self._submitted is not None  # noqa: S101 - a response implies a request
        request, served = self._submitted
        if outcome is None:
            if not served.config.is_decoupled:
                raise internal("expected a single response, got 0")
            return [_SUCCEEDED, _IS_FINAL[True]], b""
        # Checked before the body is built: it may have hundreds of megabytes.
        written_bytes = 0 if written is None else sum(tensor.size_bytes for tensor in written.values())
        if written_bytes > self._bus.max_payload_bytes:
            raise unavailable(f"the response of {written_bytes} bytes is larger than the message broker takes")
        headers, body = encode_response(request, outcome, served, self.format, written)
        if len(body) + _HEADERS_BYTES > self._bus.max_payload_bytes:
            raise unavailable(f"the response of {len(body)} bytes is larger than the message broker takes")
        return [*headers, _SUCCEEDED, _IS_FINAL[is_final]], body

    def _error(self, error: WeirError, is_final: bool) -> tuple[list[tuple[str, str]], bytes]:
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
        return headers, body


def _size_bytes(outcome: InferResponse | WeirError | None) -> int:
    return sum(tensor.size_bytes for tensor in outcome.outputs) if isinstance(outcome, InferResponse) else 0


WINDOW = "weir-window"
"""The header that sets how many responses may be unacknowledged."""

_MAX_WINDOW = 65_536


def requested_window(headers: Mapping[str, str]) -> int:
    """The requested window; 0 for no bound. Raises WeirError (INVALID_ARG) for anything but a number."""
    return min(read_number(headers, WINDOW), _MAX_WINDOW) if WINDOW in headers else 0
