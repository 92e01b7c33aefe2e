"""`ModelStreamInfer`: any number of requests to any models on one stream, and their answers.

Answers of models that answer once are sent in the order of their requests, whichever models they are; those of decoupled
models as they come. An error is one more answer, unless the caller wants it to end the stream (`triton_grpc_error`).
Source of semantics: Triton's gRPC front end, observed on 2.51.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from calls.catalog import ServedModel
from calls.pending import Pending
from gateway.grpc.infer_requests import InferRequests, Reading, encoded
from gateway.grpc.messages import Message
from gateway.grpc.rpc import Methods, Streaming
from gateway.grpc.status import CallError, shutting_down
from gateway.grpc.stream_call import StreamCall
from gateway.grpc.stream_messages import streamed, streamed_end, streamed_error, streamed_refusal
from runtime.containment import report
from schemas.errors import WeirError, internal
from schemas.kserve_response import LongOutputs
from schemas.requests import InferRequest, InferResponse

MAX_STREAM_REQUESTS = 4096
"""Requests of one stream that may be without an answer before the next one is read."""

MAX_STREAM_REQUEST_BYTES = 64 * 1024 * 1024
"""Their messages together."""

_WAITING = "unsent"

_UNREAD_BYTES = 16 * 1024 * 1024
"""Answers that the client has not taken yet, above which it is not asked for more requests."""


def stream_methods(requests: InferRequests, compression_level: int = 0) -> Methods:
    """The method that runs models on a stream. Answers are compressed by zlib's `compression_level`."""

    def converse(call: StreamCall) -> _InferStream:
        if compression_level:
            call.compress(compression_level)
        return _InferStream(call, requests)

    return {"ModelStreamInfer": Streaming(converse)}


class _Asked:
    """A request of the stream: `answers` wait for those before it; once it `is_done` there are no more."""

    __slots__ = ("answers", "is_done", "is_ordered", "later", "pending", "size_bytes", "writing")

    def __init__(self, size_bytes: int) -> None:
        self.answers: list[tuple[bytes, ...]] = []
        self.is_done = False
        self.is_ordered = True
        self.pending: Pending | None = None
        self.size_bytes = size_bytes
        self.writing: Reading = None  # an answer of which a helper process writes a part, and what came after it
        self.later: deque[tuple[InferResponse | WeirError | None, bool]] = deque()


class _InferStream:
    """The conversation of one call."""

    def __init__(self, call: StreamCall, requests: InferRequests) -> None:
        self._call = call
        self._has_ended = False
        self._open: set[_Asked] = set()
        self._open_bytes = 0
        self._ordered: deque[_Asked] = deque()
        self._requests = requests
        self._reading: Reading = None
        self._waiting_bytes = 0

    # What the call tells

    def take(self, message: Message) -> None:
        """See Conversation."""
        asked = _Asked(len(message))
        self._open.add(asked)
        self._open_bytes += asked.size_bytes
        self._submit(asked, message)
        if asked.is_ordered and not self._call.is_closed:
            self._ordered.append(asked)
            self._send_in_order()
        self._take_stock()

    def end(self) -> None:
        """See Conversation."""
        self._has_ended = True
        self._take_stock()

    def drain(self) -> None:
        """See Conversation."""
        self._take_stock()

    def drained(self) -> None:
        """See Conversation."""
        self._take_stock()

    def closed(self) -> None:
        """See Conversation."""
        if self._reading is not None:
            self._reading.cancel()
        for asked in self._open:
            if asked.pending is not None:
                self._requests.abandon(asked.pending)
            if asked.writing is not None:
                asked.writing.cancel()
        self._open.clear()
        self._ordered.clear()
        self._release(self._waiting_bytes)

    # Requests

    def _submit(self, asked: _Asked, data: Message) -> None:
        head, on_answer, deadline_ms = self._call.head, partial(self._answer, asked), self._call.deadline_ms
        try:
            submitted = None
            if not self._call.is_draining:
                submitted = self._requests.submit_prepared(head, data, on_answer, True, deadline_ms)
            if submitted is not None:
                asked.is_ordered = not submitted[0].config.is_decoupled
                asked.pending = submitted[1]
                return
            then = partial(self._submit_read, asked, data)
            self._reading = self._requests.read(data, then, partial(self._read_failed, asked))
        except WeirError as error:
            self._refuse(asked, error, "")

    def _submit_read(
        self, asked: _Asked, data: Message, message: Any, raw_contents: Sequence[bytes | memoryview]
    ) -> None:
        head, on_answer, deadline_ms = self._call.head, partial(self._answer, asked), self._call.deadline_ms
        is_late, self._reading = self._reading is not None, None
        try:
            if self._call.is_draining:
                raise shutting_down()
            served = self._requests.resolve(message)
            asked.is_ordered = not served.config.is_decoupled
            if is_late and not asked.is_ordered and asked in self._ordered:
                self._ordered.remove(asked)
            asked.pending = self._requests.submit(head, data, message, raw_contents, served, on_answer, deadline_ms)
        except WeirError as error:
            self._refuse(asked, error, message.id)
        if is_late:
            self._take_stock()

    def _read_failed(self, asked: _Asked, error: WeirError) -> None:
        self._reading = None
        self._refuse(asked, error, "")
        self._take_stock()

    def _refuse(self, asked: _Asked, error: WeirError, request_id: str) -> None:
        if self._call.head.wants_grpc_errors:
            self._call.fail(CallError.of(error))
        else:
            self._put(asked, streamed_refusal(error.message, request_id), is_final=True)

    # Answers

    def _answer(
        self,
        asked: _Asked,
        served: ServedModel,
        request: InferRequest,
        answer: InferResponse | WeirError | None,
        is_final: bool,
    ) -> None:
        if is_final:
            asked.pending = None
        if asked.writing is not None:
            asked.later.append((answer, is_final))
            return
        try:
            pieces = _pieces(served, request, answer, is_final)
        except LongOutputs:
            self._write(asked, served, request, answer, is_final)
            return
        except WeirError as error:
            if self._call.head.wants_grpc_errors:
                self._call.fail(CallError.of(error))
                return
            pieces = streamed_error(error.message, request, is_final)
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.grpc.stream_methods: answering a call", error)
            pieces = streamed_error("internal server error", request, is_final)
        self._put(asked, pieces, is_final)
        self._take_stock()

    def _write(
        self,
        asked: _Asked,
        served: ServedModel,
        request: InferRequest,
        answer: InferResponse | WeirError | None,
        is_final: bool,
    ) -> None:
        """Has a helper process classify outputs that take long; answers that come meanwhile wait."""
        assert isinstance(answer, InferResponse)  # noqa: S101 - only that has outputs

        def go_on(message: tuple[bytes, ...]) -> None:
            put(streamed(message, is_final))

        def put(pieces: tuple[bytes, ...]) -> None:
            asked.writing = None
            self._put(asked, pieces, is_final)
            self._take_stock()
            while asked.later and asked.writing is None and not self._call.is_closed:
                self._answer(asked, served, request, *asked.later.popleft())

        def fail(error: WeirError) -> None:
            if self._call.head.wants_grpc_errors:
                self._call.fail(CallError.of(error))
            else:
                put(streamed_error(error.message, request, is_final))

        try:
            asked.writing = self._requests.write(served, request, answer, go_on, fail)
        except WeirError as error:
            fail(error)

    def _put(self, asked: _Asked, pieces: tuple[bytes, ...], is_final: bool) -> None:
        if self._call.is_closed:
            return  # a late answer to an abandoned request
        if pieces:
            size = sum(map(len, pieces))
            if asked.is_ordered:
                # It waits for its turn here, and where its client does not read, in the connection's output.
                if not self._call.account.charge(_WAITING, size):
                    self._call.exhaust()
                    return
                asked.answers.append(pieces)
                self._waiting_bytes += size
            else:
                self._call.send(*pieces)
        asked.is_done = is_final
        if not asked.is_ordered:
            if is_final:
                self._close(asked)
        elif self._ordered and self._ordered[0] is asked:
            self._send_in_order()

    def _send_in_order(self) -> None:
        while self._ordered:
            first = self._ordered[0]
            for pieces in first.answers:
                self._release(sum(map(len, pieces)))
                self._call.send(*pieces)
            first.answers = []
            if self._call.is_closed or not first.is_done:
                return
            self._ordered.popleft()
            self._close(first)

    def _release(self, size_bytes: int) -> None:
        self._waiting_bytes -= size_bytes
        self._call.account.release(_WAITING, size_bytes)

    def _close(self, asked: _Asked) -> None:
        if asked in self._open:
            self._open.remove(asked)
            self._open_bytes -= asked.size_bytes

    # The state of the call

    def _take_stock(self) -> None:
        """Ends the call when all is said, and reads on or stops reading as there is room."""
        call = self._call
        if call.is_closed:
            return
        if not self._open and self._has_ended:
            call.finish()
        elif not self._open and call.is_draining:
            call.fail(CallError.of(shutting_down()))
        elif call.is_on_hold != self._is_full:
            if call.is_on_hold:
                call.go_on()
            else:
                call.hold()

    @property
    def _is_full(self) -> bool:
        return (
            self._reading is not None  # the next message is not to overtake it
            or len(self._open) >= MAX_STREAM_REQUESTS
            or self._open_bytes >= MAX_STREAM_REQUEST_BYTES
            or self._call.unsent_bytes > _UNREAD_BYTES
        )


def _pieces(
    served: ServedModel, request: InferRequest, answer: InferResponse | WeirError | None, is_final: bool
) -> tuple[bytes, ...]:
    """The message that tells of an answer, in pieces; none where nothing is to be told."""
    if isinstance(answer, InferResponse):
        return streamed(encoded(served, request, answer), is_final)
    if answer is not None:
        raise answer
    if not served.config.is_decoupled:
        raise internal("expected a single response, got 0")
    return streamed_end(request) if request.wants_empty_final else ()
