"""`NatsCall`: one request of a NATS client, and its answers on the way to the reply subject.

Each answer tells in headers whether it is the last (`Weir-Final`) and what became of the request (`Weir-Outcome`). A model
may answer faster than its caller reads, and NATS has no back pressure: a caller that wants some names a window, gets so
many answers, and one more for each that it acknowledges by an empty message on that answer's own reply subject. What waits
here is bounded, in bytes and in time. An answer that nobody listens for tells so (nats-server says it on the same subject):
its request is given up, and its model finds it cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from bus.connection import Bus
from bus.headers import pack_headers
from calls.catalog import ServedModel
from gateway.connection_memory import no_memory
from gateway.durable.bodies import BodyFormat, encode_error, encode_response, long_outputs
from runtime.containment import contained
from runtime.memory_ledger import Account
from runtime.offload import Offload
from schemas.errors import ErrorCode, WeirError, internal, unavailable
from schemas.kserve_response import LongOutputs
from schemas.offloaded import WRITE_OUTPUTS, OutputWish, write_job, written_outputs
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import Tensor

MAX_UNREAD_BYTES = 16 << 20
"""Answers of one request that may wait for their caller's acknowledgements."""

ACKNOWLEDGEMENT_PATIENCE_S = 300.0
"""How long answers wait for the next acknowledgement: that a caller has gone is told only when something is sent to it."""

STOPPING_PATIENCE_S = 5.0
"""The same while the gateway stops, which one caller that has gone is not to hold up any longer."""

_KIND = "nats"
_HEADERS_BYTES = 512  # more than the headers of an answer take
_MAX_HEADER_LENGTH = 1024
_FALLEN_BEHIND = "the caller has fallen behind: too many answers wait for acknowledgements"
_SILENT = "the caller has acknowledged no answer for too long"
_SUCCEEDED = ("Weir-Outcome", "succeeded")
_IS_FINAL = {False: ("Weir-Final", "false"), True: ("Weir-Final", "true")}


class NatsCall:
    """One request of a NATS client. `flow` is the subject for acknowledgements; `on_end` is called when all is sent.

    The request's body and the answers that wait for acknowledgements are charged to `account`, which ends with the call.
    """

    __slots__ = (
        "_account",
        "_asked",
        "_bus",
        "_credit",
        "_flow",
        "_later",
        "_offload",
        "_on_end",
        "_reply",
        "_started_ns",
        "_timer",
        "_unsent",
        "_unsent_bytes",
        "_window",
        "_writing",
        "error",
        "format",
        "give_up",
        "heard_s",
    )

    def __init__(
        self,
        bus: Bus,
        reply: str,
        flow: str,
        account: Account,
        on_end: Callable[[NatsCall], None],
        offload: Offload | None = None,
    ) -> None:
        self._bus = bus
        self._offload = offload or Offload()
        self._writing: asyncio.Task[list[memoryview]] | None = None  # an answer that takes long to be written
        self._later: deque[tuple[InferResponse | WeirError | None, bool]] = deque()  # what came after it
        self._reply = reply
        self._flow = flow
        self._on_end = on_end
        self._asked: tuple[InferRequest, ServedModel] | None = None
        self._window = 0
        self._credit = 0
        self._unsent: deque[tuple[bytes, bytes, bool]] = deque()
        self._unsent_bytes = 0
        self._account = account
        self._timer: asyncio.TimerHandle | None = None
        self._started_ns = time.monotonic_ns()
        self.heard_s = 0.0
        """When, by the monotonic clock, its caller acknowledged an answer last; 0 before the first."""
        self.format = BodyFormat.JSON
        """The form that it is answered in."""
        self.error = ""
        self.give_up: Callable[[], object] = lambda: None
        """Abandons the request; set by whoever submits it."""

    def begin(self, request: InferRequest, served: ServedModel, window: int) -> None:
        """The request is about to be submitted; at most `window` (0: any number) of its answers are unacknowledged."""
        self._asked = request, served
        self._window = self._credit = window

    @property
    def busy_ns(self) -> int:
        """For how long it has been going on."""
        return time.monotonic_ns() - self._started_ns

    def answer(self, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        """An answer of the model, an error, or the bare end of the answers (None)."""
        if self._writing is not None:
            # It is not the caller that is slow: what waits here is bounded by the memory ledger alone.
            if self._account.charge(_KIND, _size_bytes(outcome)):
                self._later.append((outcome, is_final))
            else:
                self._give_up(_FALLEN_BEHIND)
            return
        try:
            self._answer(outcome, is_final)
        except LongOutputs:
            assert isinstance(outcome, InferResponse)  # noqa: S101 - only that has outputs
            self._write(outcome, is_final)

    def _answer(
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
            self._give_up(_FALLEN_BEHIND)
        elif self._timer is None:
            self._wait()

    def _write(self, response: InferResponse, is_final: bool) -> None:
        """Has a helper process write outputs that take long; answers that come meanwhile wait."""
        assert self._asked is not None  # noqa: S101 - there is an answer to it
        wishes = long_outputs(self._asked[0], response, self._asked[1], self.format)
        try:
            self._writing = self._offload.start(WRITE_OUTPUTS, write_job(wishes))
        except WeirError as error:
            self._answer(error, is_final)
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
            self._answer(response, is_final, written_outputs(wishes, writing.result()))
        except WeirError as error:
            self._answer(error, is_final)
        while self._later and self._writing is None:
            outcome, is_final = self._later.popleft()
            self._account.release(_KIND, _size_bytes(outcome))
            self.answer(outcome, is_final)

    def _fail(self, _error: Exception, *_others: object) -> None:
        self.give_up()
        self.refuse(internal("internal server error"))

    def refuse(self, error: WeirError) -> None:
        """Answers with an error, in the place of whatever waits: it is the end."""
        headers, body = self._error(error, True)
        self._send(pack_headers(headers), body, True)

    def acknowledged(self) -> None:
        """The caller has taken an answer."""
        if not self._window:
            return
        self._credit = min(self._credit + 1, self._window)
        self.heard_s = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._credit and self._unsent:
            block, body, is_final = self._unsent.popleft()
            self._remove_unsent(len(block) + len(body))
            self._send(block, body, is_final)
        if self._unsent:
            self._wait()

    def gone(self) -> None:
        """Nobody listens for answers any more."""
        self.give_up()
        self.error = self.error or "the caller has gone"
        self._end()

    def _wait(self) -> None:
        patience = ACKNOWLEDGEMENT_PATIENCE_S
        self._timer = asyncio.get_running_loop().call_later(patience, self._give_up, _SILENT)

    def _give_up(self, reason: str) -> None:
        self.give_up()
        self.refuse(unavailable(reason))

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
        self._later.clear()
        self._unsent_bytes = 0
        self._account.close()
        self._on_end(self)

    def hold_body(self, size_bytes: int) -> None:
        """Charges the request's body until the call ends. Raises WeirError (UNAVAILABLE) where there is no room for it."""
        if not self._account.charge(_KIND, size_bytes):
            raise no_memory()

    def _add_unsent(self, size_bytes: int) -> bool:
        """Counts an answer that begins to wait. False where there is no room for it: the call is to end then."""
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
        assert self._asked is not None  # noqa: S101 - there is an answer to it
        request, served = self._asked
        if outcome is None:
            if not served.config.is_decoupled:
                raise internal("expected a single response, got 0")
            return [_SUCCEEDED, _IS_FINAL[True]], b""
        # Before it is put together: it may be hundreds of megabytes.
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
