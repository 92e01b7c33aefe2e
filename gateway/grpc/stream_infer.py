"""`ModelStreamInfer`: any number of requests to any models on one stream, and their responses.

Responses of models that are not decoupled are sent in the order of their requests, across models; those of decoupled
models as they arrive. An error is a response too, unless the client requests that it ends the stream
(`triton_grpc_error`). Responses of a model, errors included, have the parameter `triton_final_response`; rejections have
only the id of their request. No tensor is copied: messages are sent in pieces.
Source of semantics: Triton's gRPC frontend, observed on 2.51.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from weir.access.policy.actions import Action
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import Outcome
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.codec import varint
from weir.gateway.grpc.handlers import Methods, Streaming
from weir.gateway.grpc.infer import MessageCall, MessageCodec
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.status import CallError, shutting_down
from weir.gateway.grpc.stream_call import StreamCall
from weir.gateway.grpc.templates import MessageTemplates
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.kserve.triton_messages import messages

MAX_STREAM_REQUESTS = 4096
"""Unanswered requests of one stream; the next one is read only after a response."""

MAX_STREAM_REQUEST_BYTES = 64 * 1024 * 1024
"""The size of the messages of unanswered requests of one stream."""

_UNREAD_BYTES = 16 * 1024 * 1024
"""Unread responses beyond which no more requests are read from the client."""

_TURN_REQUESTS = 64
"""Requests whose waiting responses are sent in one turn of the event loop."""

_CODEC = MessageCodec(takes_decoupled=True)


def stream_methods(context: GatewayContext, templates: MessageTemplates, compression_level: int = 0) -> Methods:
    """The method ModelStreamInfer. Responses are compressed with zlib's `compression_level`."""

    def make_handler(rpc: StreamCall) -> _InferStream:
        if compression_level:
            rpc.compress(compression_level)
        return _InferStream(rpc, context, templates)

    return {"ModelStreamInfer": Streaming(make_handler, Action.INFER)}


class _StreamRequest(MessageCall):
    """One request of the stream, held until its turn unless its model is decoupled."""

    __slots__ = ("_stream", "size_bytes")

    def __init__(self, stream: _InferStream, data: Message) -> None:
        super().__init__(stream.context, _CODEC, stream.templates, stream.rpc, data, stream.rpc.account)
        self._stream = stream
        self.size_bytes = len(data)

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Implements `Call.submit`."""
        stream = self._stream
        if stream.rpc.is_draining:
            raise shutting_down()
        if self.served.config.is_decoupled:
            stream.unorder(self)
        return super().submit(request, packed)

    def keep(self, outcome: Outcome, is_final: bool) -> None:
        """Implements `Call.keep`. Errors that end the stream do not wait, nor do rejections of decoupled ones."""
        is_rejected = not self.is_submitted and self.source is not None and self.source.is_decoupled
        if is_rejected:
            self._stream.unorder(self)
        if isinstance(outcome, WeirError) and (is_rejected or self.rpc.head.wants_grpc_errors):
            self.fail(outcome)
        else:
            super().keep(outcome, is_final)

    def send(self, encoded: tuple[bytes, ...] | None, is_final: bool) -> None:
        """Implements `Call.send`."""
        pieces: tuple[bytes, ...] = ()
        if encoded is not None:
            pieces = stream_response(encoded, is_final)
        elif self.request.wants_empty_final:
            pieces = stream_end(self.request)
        self._stream.send(self, pieces, is_final)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Implements `Call.fail`."""
        if self.rpc.head.wants_grpc_errors:
            self.rpc.fail(CallError.of(error))
        elif self.is_submitted:
            self._stream.send(self, stream_error(error.message, self.request, is_final), is_final)
        else:
            id = "" if self.source is None else self.source.id
            self._stream.send(self, stream_rejection(error.message, id), True)

    def overflow(self) -> None:
        """Implements `Call.overflow`."""
        self._stream.rpc.exhaust()


class _InferStream:
    """The handler of one call, `rpc`: the order of its requests, and how many it takes."""

    def __init__(self, rpc: StreamCall, context: GatewayContext, templates: MessageTemplates) -> None:
        self.rpc = rpc
        self.context = context
        self.templates = templates
        self._has_ended = False
        self._open: set[_StreamRequest] = set()
        self._open_bytes = 0
        self._ordered: deque[_StreamRequest] = deque()
        self._is_advancing = False
        self._reading: _StreamRequest | None = None

    # StreamHandler

    def on_message(self, message: Message) -> None:
        """Implements `StreamHandler.on_message`."""
        request = _StreamRequest(self, message)
        self._open.add(request)
        self._open_bytes += request.size_bytes
        if self._ordered:
            request.hold()
        self._ordered.append(request)
        request.open()
        self._reading = request if request.is_reading else None
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
        requests, self._open = self._open, set()
        self._ordered.clear()
        for request in requests:
            request.cancel()

    # Requests

    def unorder(self, request: _StreamRequest) -> None:
        """The request, the latest one, is for a decoupled model: its responses do not wait for those of others."""
        self._ordered.pop()
        request.resume()

    def send(self, request: _StreamRequest, pieces: tuple[bytes, ...], is_final: bool) -> None:
        """Sends a message for a request whose turn it is; the last one makes it the turn of the next request."""
        if pieces:
            self.rpc.send(*pieces)
        if is_final and request in self._open:
            self._open.remove(request)
            self._open_bytes -= request.size_bytes
            if self._ordered and self._ordered[0] is request:
                self._ordered.popleft()
                if not self._is_advancing:
                    self._advance()
        self._update_state()

    def _advance(self) -> None:
        """Sends the responses that wait, up to those of the first request that has not ended."""
        self._is_advancing = True
        for _ in range(_TURN_REQUESTS):
            if not self._ordered:
                break
            first = self._ordered[0]
            first.resume()
            if self._ordered and self._ordered[0] is first:
                break
        else:
            asyncio.get_running_loop().call_soon(self._advance)
            return
        self._is_advancing = False
        self._update_state()

    # The state of the call

    def _update_state(self) -> None:
        """Ends the call when all requests are answered; otherwise pauses or resumes reading by the room that is left."""
        rpc = self.rpc
        if rpc.is_closed or self._is_advancing:
            return
        if not self._open and self._has_ended:
            rpc.finish()
        elif not self._open and rpc.is_draining:
            rpc.fail(CallError.of(shutting_down()))
        elif rpc.is_on_hold != self._is_full:
            if rpc.is_on_hold:
                rpc.resume()
            else:
                rpc.hold()

    @property
    def _is_full(self) -> bool:
        return (
            (self._reading is not None and self._reading.is_reading)  # the next message must not overtake it
            or len(self._open) >= MAX_STREAM_REQUESTS
            or self._open_bytes >= MAX_STREAM_REQUEST_BYTES
            or self.rpc.unsent_bytes > _UNREAD_BYTES
        )


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
