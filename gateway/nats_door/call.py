"""`NatsCall`: one request of a NATS client, and its answers on the way to the reply subject.

Each answer tells in headers whether it is the last (`Weir-Final`) and what became of the request (`Weir-Outcome`). A model
may answer faster than its caller reads, and NATS has no back pressure: a caller that wants some names a window, gets so
many answers, and one more for each that it acknowledges by an empty message on that answer's own reply subject. What waits
here is bounded. An answer that nobody listens for tells so (nats-server says it on the same subject): its request is given
up, and its model finds it cancelled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from bus.connection import Bus
from bus.headers import pack_headers
from calls.catalog import ServedModel
from schemas.errors import ErrorCode, WeirError, internal, unavailable
from schemas.kserve_response import build_infer_response, error_body
from schemas.requests import InferRequest, InferResponse

MAX_UNREAD_BYTES = 16 << 20
"""Answers of one request that may wait for their caller's acknowledgements."""

_HEADERS_BYTES = 512  # more than the headers of an answer take, but for the text of an error
_SUCCEEDED = ("Weir-Outcome", "succeeded")
_IS_FINAL = {False: ("Weir-Final", "false"), True: ("Weir-Final", "true")}


class NatsCall:
    """See the module. `flow` is the subject for acknowledgements; `on_end` is called when the last answer is sent."""

    __slots__ = (
        "_asked",
        "_bus",
        "_credit",
        "_flow",
        "_on_end",
        "_reply",
        "_started_ns",
        "_unsent",
        "_unsent_bytes",
        "_window",
        "error",
        "give_up",
    )

    def __init__(self, bus: Bus, reply: str, flow: str, on_end: Callable[[NatsCall], None]) -> None:
        self._bus = bus
        self._reply = reply
        self._flow = flow
        self._on_end = on_end
        self._asked: tuple[InferRequest, ServedModel] | None = None
        self._window = 0
        self._credit = 0
        self._unsent: deque[tuple[bytes, bytes, bool]] = deque()
        self._unsent_bytes = 0
        self._started_ns = time.monotonic_ns()
        self.error = ""
        self.give_up: Callable[[], None] = lambda: None
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
        try:
            headers, body = self._encoded(outcome, is_final)
        except WeirError as error:
            headers, body = self._error(error, is_final)
        block = pack_headers(headers)
        if self._window and not self._credit:
            self._unsent_bytes += len(block) + len(body)
            self._unsent.append((block, body, is_final))
            if self._unsent_bytes > MAX_UNREAD_BYTES and not is_final:
                self.give_up()
                self._unsent.clear()
                self._unsent_bytes = 0
                self.refuse(unavailable("the caller has fallen behind: too many answers wait for acknowledgements"))
            return
        self._send(block, body, is_final)

    def refuse(self, error: WeirError) -> None:
        """Answers with an error, whatever waits: it is the end."""
        headers, body = self._error(error, True)
        self._send(pack_headers(headers), body, True)

    def acknowledged(self) -> None:
        """The caller has taken an answer."""
        if not self._window:
            return
        self._credit = min(self._credit + 1, self._window)
        while self._credit and self._unsent:
            block, body, is_final = self._unsent.popleft()
            self._unsent_bytes -= len(block) + len(body)
            self._send(block, body, is_final)

    def gone(self) -> None:
        """Nobody listens for answers any more."""
        self.give_up()
        self.error = self.error or "the caller has gone"
        self._on_end(self)

    def _send(self, block: bytes, body: bytes, is_final: bool) -> None:
        if self._window:
            self._credit = max(0, self._credit - 1)
        self._bus.publish(self._reply, body, "" if is_final else self._flow, block)
        if is_final:
            self._on_end(self)

    def _encoded(
        self, outcome: InferResponse | WeirError | None, is_final: bool
    ) -> tuple[list[tuple[str, str]], bytes]:
        if isinstance(outcome, WeirError):
            raise outcome
        assert self._asked is not None  # noqa: S101 - there is an answer to it
        request, served = self._asked
        if outcome is None:
            if not served.config.is_decoupled:
                raise internal("expected a single response, got 0")
            return [_SUCCEEDED, _IS_FINAL[True]], b""
        batching = served.config.max_batch_size > 0
        chunks, header_length = build_infer_response(request, outcome, served.labels.get, batching)
        headers = [("Content-Type", "application/json" if header_length is None else "application/octet-stream")]
        if header_length is not None:
            headers.append(("Inference-Header-Content-Length", str(header_length)))
        size_bytes = sum(map(len, chunks))
        if size_bytes + _HEADERS_BYTES > self._bus.max_payload_bytes:
            raise unavailable(f"the response of {size_bytes} bytes is larger than the message broker takes")
        return [*headers, _SUCCEEDED, _IS_FINAL[is_final]], b"".join(chunks)

    def _error(self, error: WeirError, is_final: bool) -> tuple[list[tuple[str, str]], bytes]:
        self.error = f"{error.http_status}:{error.message}"
        outcome = "cancelled" if error.code is ErrorCode.CANCELLED else "failed"
        headers = [
            ("Content-Type", "application/json"),
            ("Nats-Service-Error-Code", str(error.http_status)),
            ("Nats-Service-Error", error.message),
            ("Weir-Outcome", outcome),
            _IS_FINAL[is_final],
        ]
        return headers, error_body(error.message)
