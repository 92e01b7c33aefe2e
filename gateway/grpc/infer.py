"""`ModelInfer`: one request, one response. `MessageCall` is the `Call` of all methods that run models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from weir.access.policy.actions import Action
from weir.calls.catalog import Catalog, ServedModel
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.call import Call, Ready
from weir.calls.inference.documents import ReadContext
from weir.calls.tracing import NOT_TRACED, Sampling
from weir.gateway.access import add_parameters
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.call import GrpcCall, UnaryCall
from weir.gateway.grpc.codec import decode_split, read_version, request_from_message, response_pieces, split_request
from weir.gateway.grpc.handlers import Handler, Methods, Unary
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.offload import offloaded_message, read_job
from weir.gateway.grpc.status import CallError
from weir.gateway.grpc.templates import MessageTemplates
from weir.runtime.memory_ledger import Account
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.offloaded import Job, output_job, written_outputs
from weir.schemas.wire.calls import ANYBODY


class RequestMessage:
    """A serialized ModelInferRequest; what is known of it once it has been parsed. Raises WeirError as `split_request`."""

    __slots__ = ("id", "is_counted", "is_decoupled", "model", "rpc", "size", "split")

    def __init__(self, data: Message, rpc: GrpcCall, is_counted: bool = False) -> None:
        self.rpc = rpc
        self.size = len(data)
        self.is_counted = is_counted
        """Whether it counts already towards the limits of its owner."""
        self.split = split_request(data)
        self.id = ""
        self.model = ""
        self.is_decoupled = False


class MessageReadContext(ReadContext, Protocol):
    """What `MessageCodec` needs to read a request, which names its model itself."""

    @property
    def catalog(self) -> Catalog:
        """The models."""


class MessageCodec:
    """Reads a `RequestMessage`; writes the serialized ModelInferResponse in pieces.

    `takes_decoupled`: whether requests may be for decoupled models.
    """

    def __init__(self, takes_decoupled: bool) -> None:
        self.takes_decoupled = takes_decoupled

    def read_job(self, source: RequestMessage, context: MessageReadContext) -> Job | None:
        """Implements `Codec.read_job`."""
        return read_job(source.split)

    def read(
        self, source: RequestMessage, parts: Sequence[memoryview], context: MessageReadContext
    ) -> tuple[ServedModel, InferRequest]:
        """Implements `Codec.read`."""
        message, raw_contents = offloaded_message(source.split, parts) if parts else decode_split(source.split)
        source.id, source.model = message.id, message.model_name
        version = read_version(message.model_version)
        source.rpc.admit(message.model_name, version, source.size, source.is_counted)
        served = context.catalog.resolve(message.model_name, version)
        source.is_decoupled = served.config.is_decoupled
        if source.is_decoupled and not self.takes_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        return served, request_from_message(message, raw_contents, find_region=context.find_region)

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        """Implements `Codec.write_job`."""
        return output_job(request, response, served.labels.get, served.config.max_batch_size > 0, all_binary=True)

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> tuple[bytes, ...]:
        """Implements `Codec.write`."""
        written = written_outputs(parts) if parts else None
        return response_pieces(request, response, served.labels, served.config.max_batch_size > 0, written)


UNARY = MessageCodec(takes_decoupled=False)


class MessageCall(Call):
    """A ModelInferRequest, `data`, of the gRPC call `rpc`."""

    __slots__ = ("_data", "_sampling", "_templates", "rpc", "source")

    services: GatewayContext
    codec: MessageCodec

    def __init__(  # noqa: PLR0913 - runs for every request: an object for its arguments would cost as much
        self,
        context: GatewayContext,
        codec: MessageCodec,
        templates: MessageTemplates,
        rpc: GrpcCall,
        data: Message,
        account: Account | None = None,
    ) -> None:
        super().__init__(context, codec, account)
        self._data = data
        self._sampling: Sampling | None = None  # once it is decided
        self._templates = templates
        self.rpc = rpc
        self.source: RequestMessage | None = None

    def begin(self) -> RequestMessage | Ready:
        """Implements `Call.begin`."""
        data, head = self._data, self.rpc.head
        template = None if head.forwarded or not isinstance(data, bytes) else self._templates.find_message(data)
        if template is not None:
            name, version = template.request.model_name, template.request.model_version
            if self.rpc.gate is not None:
                self.rpc.admit(name, version, len(data), self.is_counted)
                self.is_counted = True
            served = self.services.catalog.resolve(name, version)
            if served is not template.owner:
                self._templates.forget(template.owner)
            elif not self._samples(served) and (self.codec.takes_decoupled or not served.config.is_decoupled):
                return served, template.request, template.pack(data)
        self.source = RequestMessage(data, self.rpc, self.is_counted)
        return self.source

    @property
    def owner(self) -> str:
        """Implements `Call.owner`."""
        return self.rpc.principal.owner

    def _samples(self, served: ServedModel) -> Sampling:
        tracing = self.services.inference.tracing
        if not tracing.is_on:
            return NOT_TRACED
        if self._sampling is None:
            self._sampling = tracing.samples(served.name, self.rpc.head.traceparent)
        return self._sampling

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Implements `Call.submit`."""
        inference, served, rpc = self.services.inference, self.served, self.rpc
        head, data, self._data = rpc.head, self._data, b""
        if rpc.line is not None:
            rpc.line.model, rpc.line.version = request.model_name, request.model_version
        key = ""
        if served.split is not None and served.split.rule.header:
            key = head.fields.get(served.split.rule.header.encode(), b"").decode("latin-1")
        caller = ANYBODY if rpc.gate is None else rpc.gate.caller_of(rpc.principal)
        if packed is not None:
            return inference.submit_packed(
                served, request, packed, self.on_response, rpc.deadline_ms, traffic_key=key, caller=caller
            )
        sampling = self._samples(served)
        request.traceparent, request.tracestate = head.traceparent, head.tracestate
        request.deadline_ms = rpc.deadline_ms
        if sampling:
            now_ns = time.time_ns()
            request.arrival = ("GRPC_WAITREAD_START", now_ns), ("GRPC_WAITREAD_END", now_ns)
        if head.forwarded:
            request.parameters = add_parameters(request.parameters, head.forwarded)
        pending = inference.submit(request, self.on_response, None, sampling, key, served, caller)
        source = self.source
        if source is not None and isinstance(data, bytes) and not head.forwarded and not inference.caches(served):
            self._templates.keep_message(request, served, data, source.split.raw_contents or ())
        return pending


def infer_methods(
    context: GatewayContext,
    templates: MessageTemplates,
    compression_level: int = 0,
    async_handler: Handler | None = None,
) -> Methods:
    """The method ModelInfer. Responses are compressed with zlib's `compression_level`.

    `async_handler`, if given, handles asynchronous requests.
    """

    def infer(rpc: UnaryCall, data: Message) -> None:
        if rpc.head.async_headers is not None and async_handler is not None:
            async_handler(rpc, data)
            return
        call = _UnaryInfer(context, UNARY, templates, rpc, data)
        if compression_level:
            rpc.compress(compression_level)
        rpc.on_cancel = call.cancel
        call.open()
        rpc.keeps_received = not call.is_submitted  # a helper process reads the message

    return {"ModelInfer": Unary(infer, Action.INFER)}


class _UnaryInfer(MessageCall):
    __slots__ = ()

    def send(self, encoded: tuple[bytes, ...], is_final: bool) -> None:
        self.rpc.send(*encoded, is_last=True)

    def fail(self, error: WeirError, is_final: bool = True) -> None:
        self.rpc.on_cancel = None
        if self.rpc.line is not None and self.source is not None:
            self.rpc.line.model = self.source.model
        self.rpc.fail(CallError.of(error))
