"""`ModelInfer`: one request, one response. `InferSubmitter` submits the requests of all methods that run models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.calls.tracing import NOT_TRACED, Sampling
from weir.gateway.access import add_parameters
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.call import GrpcCall, UnaryCall
from weir.gateway.grpc.codec import (
    decode_request,
    decode_split,
    read_version,
    request_from_message,
    response_pieces,
    split_request,
)
from weir.gateway.grpc.handlers import Handler, Methods
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.offload import READ_REQUEST, is_long, offload_parts, offloaded_message
from weir.gateway.grpc.status import CallError, call_error
from weir.gateway.grpc.templates import MessageTemplateCache
from weir.runtime.containment import report
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.offloaded import WRITE_OUTPUTS, long_wishes, write_job, written_outputs
from weir.schemas.kserve.response import LongOutputs


def infer_methods(
    requests: InferSubmitter, compression_level: int = 0, async_handler: Handler | None = None
) -> Methods:
    """The method ModelInfer. Responses are compressed with zlib's `compression_level`.

    `async_handler`, if given, handles asynchronous requests.
    """
    return {"ModelInfer": _ModelInfer(requests, compression_level, async_handler)}


class _ModelInfer:
    def __init__(self, requests: InferSubmitter, compression_level: int, async_handler: Handler | None) -> None:
        self._async_handler = async_handler
        self._compression_level = compression_level
        self._requests = requests

    def __call__(self, call: UnaryCall, data: Message) -> None:
        if call.head.async_headers is not None and self._async_handler is not None:
            self._async_handler(call, data)
            return
        on_response = partial(self._on_response, call)
        submitted = self._requests.submit_template(call, data, on_response, False)
        if submitted is not None:
            pending = submitted[1]
        else:
            then = partial(self._submit, call, on_response)
            reading = self._requests.read(data, then, partial(self._reject, call))
            if reading is not None:
                call.on_cancel = partial(_cancel, reading)
            return
        call.on_cancel = partial(self._requests.cancel, pending)

    def _submit(self, call: UnaryCall, on_response: OnResponse, decoded: DecodedRequest) -> None:
        served = self._requests.resolve(decoded.message)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        pending = self._requests.submit(call, decoded, served, on_response)
        call.on_cancel = partial(self._requests.cancel, pending)

    def _reject(self, call: UnaryCall, error: WeirError) -> None:
        call.on_cancel = None
        call.fail(CallError.of(error))

    def _on_response(
        self,
        call: UnaryCall,
        served: ServedModel,
        request: InferRequest,
        outcome: InferResponse | WeirError | None,
        _is_final: bool,
    ) -> None:
        call.on_cancel = None
        try:
            if outcome is None:
                raise internal("expected a single response, got 0")
            if isinstance(outcome, WeirError):
                raise outcome
            message = encode_pieces(served, request, outcome)
        except LongOutputs:
            assert isinstance(outcome, InferResponse)  # noqa: S101 - only that has outputs
            self._write(call, served, request, outcome)
        except Exception as error:  # noqa: BLE001 - those without a status are reported
            call.fail(call_error(error, "weir.gateway.grpc.infer: answering a call"))
        else:
            self._send(call, message)

    def _write(self, call: UnaryCall, served: ServedModel, request: InferRequest, response: InferResponse) -> None:
        try:
            then = partial(self._send, call)
            writing = self._requests.write(served, request, response, then, partial(self._reject, call))
        except WeirError as error:
            call.fail(CallError.of(error))
        else:
            call.on_cancel = partial(_cancel, writing)

    def _send(self, call: UnaryCall, message: tuple[bytes, ...]) -> None:
        if self._compression_level:
            call.compress(self._compression_level)
        call.send(*message, is_last=True)


def _cancel(task: asyncio.Task[list[memoryview]]) -> None:
    task.cancel()


OnResponse = Callable[[ServedModel, InferRequest, InferResponse | WeirError | None, bool], None]
"""Called with model, request, each response to it, and whether it is the last."""


class DecodedRequest(NamedTuple):
    """A ModelInferRequest: the message as it was received, parsed without its raw contents, and these."""

    data: Message
    message: Any
    raw_contents: Sequence[bytes | memoryview]


OnError = Callable[[WeirError], None]
Reading = asyncio.Task[list[memoryview]] | None


class InferSubmitter:
    """Parses and submits requests; holds the cache of message templates."""

    def __init__(self, context: GatewayContext) -> None:
        self._catalog = context.catalog
        self._inference = context.inference
        self._find_region = context.regions.find
        self._prepared = MessageTemplateCache()
        self._offload = context.offload

    def read(self, data: Message, then: Callable[[DecodedRequest], None], on_error: OnError) -> Reading:
        """Calls `then` with the decoded request: at once, or later if a helper process parses it.

        Returns the task of the helper, None if there is none. Errors are raised, or, if they occur later, given to
        `on_error`.
        """
        split = split_request(data)
        if not is_long(split):
            then(DecodedRequest(data, *decode_split(split)))
            return None
        reading = self._offload.start(READ_REQUEST, offload_parts(split))
        reading.add_done_callback(
            lambda done: _finish(
                done, lambda parts: then(DecodedRequest(data, *offloaded_message(split, parts))), on_error
            )
        )
        return reading

    def write(
        self,
        served: ServedModel,
        request: InferRequest,
        response: InferResponse,
        then: Callable[[tuple[bytes, ...]], None],
        on_error: OnError,
    ) -> asyncio.Task[list[memoryview]]:
        """Has a helper process encode a response for which `encode_pieces` raised LongOutputs; then calls `then`."""
        batching = served.config.max_batch_size > 0
        wishes = long_wishes(request, response, served.labels.get, batching, all_binary=True)
        writing = self._offload.start(WRITE_OUTPUTS, write_job(wishes))

        def encode(parts: list[memoryview]) -> None:
            written = written_outputs(wishes, parts)
            then(response_pieces(request, response, served.labels, batching, written))

        writing.add_done_callback(lambda done: _finish(done, encode, on_error))
        return writing

    def resolve(self, message: Any) -> ServedModel:
        """The model that a ModelInferRequest names. Raises WeirError if it is not served."""
        return self._catalog.resolve(message.model_name, read_version(message.model_version))

    def submit(
        self,
        call: GrpcCall,
        decoded: DecodedRequest,
        served: ServedModel,
        on_response: OnResponse,
        sampling: Sampling | None = None,
    ) -> PendingRequest:
        """Submits a decoded request of `call`. Raises WeirError if it is rejected.

        `sampling` is the trace sampling decision if it was made before.
        """
        head = call.head
        request = request_from_message(decoded.message, decoded.raw_contents, find_region=self._find_region)
        tracing = self._inference.tracing
        if sampling is None:
            sampling = tracing.samples(served.name, head.traceparent) if tracing.is_on else NOT_TRACED
        request.traceparent, request.tracestate = head.traceparent, head.tracestate
        request.deadline_ms = call.deadline_ms
        if sampling:
            now_ns = time.time_ns()
            request.arrival = ("GRPC_WAITREAD_START", now_ns), ("GRPC_WAITREAD_END", now_ns)
        if head.forwarded:
            request.parameters = add_parameters(request.parameters, head.forwarded)
        then, key = partial(on_response, served, request), _traffic_key(call, served)
        pending = self._inference.submit(request, then, sampling=sampling, traffic_key=key)
        if isinstance(decoded.data, bytes) and not head.forwarded and not self._inference.caches(served):
            self._prepared.keep(request, served, decoded.data, decoded.raw_contents)
        return pending

    def submit_template(
        self, call: GrpcCall, data: Message, on_response: OnResponse, takes_decoupled: bool
    ) -> tuple[ServedModel, PendingRequest] | None:
        """Submits a request that fits a message template; returns None for any other. Raises WeirError as `submit`."""
        if call.head.forwarded or not isinstance(data, bytes):
            return None
        prepared = self._prepared.find(data)
        if prepared is None:
            return None
        request = prepared.request
        served = self._catalog.resolve(request.model_name, request.model_version)
        if served is not prepared.served:
            self._prepared.forget(prepared)
            return None
        if served.config.is_decoupled and not takes_decoupled:
            return None
        tracing = self._inference.tracing
        sampling = tracing.samples(served.name, call.head.traceparent) if tracing.is_on else NOT_TRACED
        if sampling:
            decoded = DecodedRequest(data, *decode_request(data))
            return served, self.submit(call, decoded, served, on_response, sampling)
        on_response = partial(on_response, served, request)
        packed = prepared.pack(data)
        key = _traffic_key(call, served)
        return served, self._inference.submit_template(
            served, prepared, packed, on_response, call.deadline_ms, traffic_key=key
        )

    def cancel(self, pending: PendingRequest) -> None:
        """Cancels a request: its client has disconnected."""
        self._inference.cancel(pending)


def _traffic_key(call: GrpcCall, served: ServedModel) -> str:
    """The value of the header that keeps callers of the model on one version; "" without one."""
    if served.split is None or not served.split.rule.header:
        return ""
    return call.head.fields.get(served.split.rule.header.encode(), b"").decode("latin-1")


def _finish(
    done: asyncio.Future[list[memoryview]], then: Callable[[list[memoryview]], None], on_error: OnError
) -> None:
    if done.cancelled():
        return
    try:
        then(done.result())
    except WeirError as error:
        on_error(error)
    except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
        report("weir.gateway.grpc.infer: a long request or response", error)
        on_error(internal("internal server error"))


def encode_pieces(served: ServedModel, request: InferRequest, response: InferResponse) -> tuple[bytes, ...]:
    """The serialized ModelInferResponse in pieces. Raises WeirError if it can't be encoded, and LongOutputs."""
    return response_pieces(request, response, served.labels, served.config.max_batch_size > 0)
