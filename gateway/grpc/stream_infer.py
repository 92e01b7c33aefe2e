"""`ModelStreamInfer`: any number of requests to any models on one stream, and their responses.

Responses of models that are not decoupled are sent in the order of their requests, across models; those of decoupled
models as they arrive. An error is a response too, unless the client requests that it ends the stream
(`triton_grpc_error`). Responses of a model, errors included, have the parameter `triton_final_response`; rejections have
only the id of their request. No tensor is copied: messages are sent in pieces.
Source of semantics: Triton's gRPC frontend, observed on 2.51.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain

from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.gateway.grpc.codec import varint
from weir.gateway.grpc.handlers import Methods, Streaming
from weir.gateway.grpc.infer import DecodedRequest, InferSubmitter, Reading, encode_pieces
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.status import CallError, shutting_down
from weir.gateway.grpc.stream_call import StreamCall
from weir.runtime.containment import report
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.response import LongOutputs
from weir.schemas.kserve.triton_messages import messages

MAX_STREAM_REQUESTS = 4096
"""Unanswered requests of one stream; the next one is read only after a response."""

MAX_STREAM_REQUEST_BYTES = 64 * 1024 * 1024
"""The size of the messages of unanswered requests of one stream."""

_WAITING = "unsent"

_UNREAD_BYTES = 16 * 1024 * 1024
"""Unread responses beyond which no more requests are read from the client."""


def stream_methods(requests: InferSubmitter, compression_level: int = 0) -> Methods:
    """The method ModelStreamInfer. Responses are compressed with zlib's `compression_level`."""

    def make_handler(call: StreamCall) -> _InferStream:
        if compression_level:
            call.compress(compression_level)
        return _InferStream(call, requests)

    return {"ModelStreamInfer": Streaming(make_handler)}


class _StreamRequest:
    """A request of the stream. Its `responses` wait for those of earlier requests; once it `is_done` there are no more."""

    __slots__ = ("is_done", "is_ordered", "pending", "responses", "size_bytes", "waiting", "writing")

    def __init__(self, size_bytes: int) -> None:
        self.responses: list[tuple[bytes, ...]] = []
        self.is_done = False
        self.is_ordered = True
        self.pending: PendingRequest | None = None
        self.size_bytes = size_bytes
        self.writing: Reading = None  # a helper process that encodes a response; later ones wait for it
        self.waiting: deque[tuple[InferResponse | WeirError | None, bool]] = deque()

    @property
    def held_bytes(self) -> int:
        """What is charged for its waiting responses."""
        return sum(map(len, chain.from_iterable(self.responses)))


class _InferStream:
    """The handler of one call."""

    def __init__(self, call: StreamCall, requests: InferSubmitter) -> None:
        self._call = call
        self._has_ended = False
        self._open: set[_StreamRequest] = set()
        self._open_bytes = 0
        self._ordered: deque[_StreamRequest] = deque()
        self._requests = requests
        self._reading: Reading = None
        self._waiting_bytes = 0

    # StreamHandler

    def on_message(self, message: Message) -> None:
        """Implements `StreamHandler.on_message`."""
        entry = _StreamRequest(len(message))
        self._open.add(entry)
        self._open_bytes += entry.size_bytes
        self._submit(entry, message)
        if entry.is_ordered and not self._call.is_closed:
            self._ordered.append(entry)
            self._send_in_order()
        self._update_state()

    def end(self) -> None:
        """Implements `StreamHandler.end`."""
        self._has_ended = True
        self._update_state()

    def drain(self) -> None:
        """Implements `StreamHandler.drain`."""
        self._update_state()

    def drained(self) -> None:
        """Implements `StreamHandler.drained`."""
        self._update_state()

    def closed(self) -> None:
        """Implements `StreamHandler.closed`."""
        if self._reading is not None:
            self._reading.cancel()
        for entry in self._open:
            if entry.pending is not None:
                self._requests.cancel(entry.pending)
            if entry.writing is not None:
                entry.writing.cancel()
        self._open.clear()
        self._ordered.clear()
        self._release(self._waiting_bytes)

    # Requests

    def _submit(self, entry: _StreamRequest, data: Message) -> None:
        on_response = partial(self._on_response, entry)
        try:
            submitted = None
            if not self._call.is_draining:
                submitted = self._requests.submit_template(self._call, data, on_response, True)
            if submitted is not None:
                entry.is_ordered = not submitted[0].config.is_decoupled
                entry.pending = submitted[1]
                return
            then = partial(self._submit_decoded, entry)
            self._reading = self._requests.read(data, then, partial(self._read_failed, entry))
        except WeirError as error:
            self._reject(entry, error, "")

    def _submit_decoded(self, entry: _StreamRequest, decoded: DecodedRequest) -> None:
        is_late, self._reading = self._reading is not None, None
        try:
            if self._call.is_draining:
                raise shutting_down()
            served = self._requests.resolve(decoded.message)
            entry.is_ordered = not served.config.is_decoupled
            if is_late and not entry.is_ordered and entry in self._ordered:
                self._ordered.remove(entry)
            entry.pending = self._requests.submit(self._call, decoded, served, partial(self._on_response, entry))
        except WeirError as error:
            self._reject(entry, error, decoded.message.id)
        if is_late:
            self._update_state()

    def _read_failed(self, entry: _StreamRequest, error: WeirError) -> None:
        self._reading = None
        self._reject(entry, error, "")
        self._update_state()

    def _reject(self, entry: _StreamRequest, error: WeirError, request_id: str) -> None:
        if self._call.head.wants_grpc_errors:
            self._call.fail(CallError.of(error))
        else:
            self._put(entry, stream_rejection(error.message, request_id), is_final=True)

    # Responses

    def _on_response(
        self,
        entry: _StreamRequest,
        served: ServedModel,
        request: InferRequest,
        outcome: InferResponse | WeirError | None,
        is_final: bool,
    ) -> None:
        if is_final:
            entry.pending = None
        if entry.writing is not None:
            entry.waiting.append((outcome, is_final))
            return
        try:
            pieces = _pieces(served, request, outcome, is_final)
        except LongOutputs:
            self._write(entry, served, request, outcome, is_final)
            return
        except WeirError as error:
            if self._call.head.wants_grpc_errors:
                self._call.fail(CallError.of(error))
                return
            pieces = stream_error(error.message, request, is_final)
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("weir.gateway.grpc.stream_infer: answering a call", error)
            pieces = stream_error("internal server error", request, is_final)
        self._put(entry, pieces, is_final)
        self._update_state()

    def _write(
        self,
        entry: _StreamRequest,
        served: ServedModel,
        request: InferRequest,
        outcome: InferResponse | WeirError | None,
        is_final: bool,
    ) -> None:
        """Has a helper process encode outputs that take long; responses that arrive meanwhile wait."""
        assert isinstance(outcome, InferResponse)  # noqa: S101 - only that has outputs

        def resume(message: tuple[bytes, ...]) -> None:
            put(stream_response(message, is_final))

        def put(pieces: tuple[bytes, ...]) -> None:
            entry.writing = None
            self._put(entry, pieces, is_final)
            self._update_state()
            while entry.waiting and entry.writing is None and not self._call.is_closed:
                self._on_response(entry, served, request, *entry.waiting.popleft())

        def fail(error: WeirError) -> None:
            if self._call.head.wants_grpc_errors:
                self._call.fail(CallError.of(error))
            else:
                put(stream_error(error.message, request, is_final))

        try:
            entry.writing = self._requests.write(served, request, outcome, resume, fail)
        except WeirError as error:
            fail(error)

    def _put(self, entry: _StreamRequest, pieces: tuple[bytes, ...], is_final: bool) -> None:
        if self._call.is_closed:
            return  # a late response to a cancelled request
        if pieces:
            size = sum(map(len, pieces))
            if entry.is_ordered:
                # It waits for its turn here, and if the client does not read, in the connection's send buffer.
                if not self._call.account.charge(_WAITING, size, entry):
                    self._call.exhaust()
                    return
                entry.responses.append(pieces)
                self._waiting_bytes += size
            else:
                self._call.send(*pieces)
        entry.is_done = is_final
        if not entry.is_ordered:
            if is_final:
                self._close(entry)
        elif self._ordered and self._ordered[0] is entry:
            self._send_in_order()

    def _send_in_order(self) -> None:
        while self._ordered:
            first = self._ordered[0]
            for pieces in first.responses:
                self._release(sum(map(len, pieces)))
                self._call.send(*pieces)
            first.responses = []
            if self._call.is_closed or not first.is_done:
                return
            self._ordered.popleft()
            self._close(first)

    def _release(self, size_bytes: int) -> None:
        self._waiting_bytes -= size_bytes
        self._call.account.release(_WAITING, size_bytes)

    def _close(self, entry: _StreamRequest) -> None:
        if entry in self._open:
            self._open.remove(entry)
            self._open_bytes -= entry.size_bytes

    # The state of the call

    def _update_state(self) -> None:
        """Ends the call when all requests are answered; otherwise pauses or resumes reading by the room that is left."""
        call = self._call
        if call.is_closed:
            return
        if not self._open and self._has_ended:
            call.finish()
        elif not self._open and call.is_draining:
            call.fail(CallError.of(shutting_down()))
        elif call.is_on_hold != self._is_full:
            if call.is_on_hold:
                call.resume()
            else:
                call.hold()

    @property
    def _is_full(self) -> bool:
        return (
            self._reading is not None  # the next message must not overtake it
            or len(self._open) >= MAX_STREAM_REQUESTS
            or self._open_bytes >= MAX_STREAM_REQUEST_BYTES
            or self._call.unsent_bytes > _UNREAD_BYTES
        )


def _pieces(
    served: ServedModel, request: InferRequest, outcome: InferResponse | WeirError | None, is_final: bool
) -> tuple[bytes, ...]:
    """The message for a response, in pieces; no pieces if nothing is to be sent."""
    if isinstance(outcome, InferResponse):
        return stream_response(encode_pieces(served, request, outcome), is_final)
    if outcome is not None:
        raise outcome
    if not served.config.is_decoupled:
        raise internal("expected a single response, got 0")
    return stream_end(request) if request.wants_empty_final else ()


_RESPONSE_TAG = b"\x12"  # ModelStreamInferResponse.infer_response: field 2, length-delimited

_ENDINGS = [
    messages.ModelInferResponse(parameters={"triton_final_response": {"bool_param": is_final}}).SerializeToString()
    for is_final in (False, True)
]
"""The parameter as a piece of a ModelInferResponse: by the wire format it may come last."""


def stream_response(response: Sequence[bytes], is_final: bool) -> tuple[bytes, ...]:
    """The pieces of the message that carries `response`, a serialized ModelInferResponse in pieces."""
    ending = _ENDINGS[is_final]
    return _RESPONSE_TAG + varint(sum(map(len, response)) + len(ending)), *response, ending


def stream_end(request: InferRequest) -> tuple[bytes, ...]:
    """The empty final response to `request`."""
    return stream_response((_name(request),), True)


def stream_error(message: str, request: InferRequest, is_final: bool) -> tuple[bytes, ...]:
    """An error in place of a response to `request`."""
    return messages.ModelStreamInferResponse(error_message=message).SerializeToString(), *stream_response(
        (_name(request),), is_final
    )


def stream_rejection(message: str, request_id: str) -> tuple[bytes, ...]:
    """The rejection of a request."""
    rejection = messages.ModelStreamInferResponse(
        error_message=message, infer_response=messages.ModelInferResponse(id=request_id)
    )
    return (rejection.SerializeToString(),)


def _name(request: InferRequest) -> bytes:
    response = messages.ModelInferResponse(
        id=request.id, model_name=request.model_name, model_version=request.model_version
    )
    return bytes(response.SerializeToString())
