"""`InferRequests`: a ModelInferRequest on its way to the queue, and its answers back, whichever method it came by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from calls.catalog import ServedModel
from calls.pending import Pending
from gateway.access import add_parameters
from gateway.doors import Doors
from gateway.grpc.codec import decode_request, decode_split, request_from_message, response_pieces, split_request
from gateway.grpc.head import CallHead
from gateway.grpc.messages import Message
from gateway.grpc.offloaded import READ_REQUEST, is_long, read_result, request_job
from gateway.grpc.prepared import PreparedCalls
from gateway.grpc.versions import read_version
from runtime.containment import report
from schemas.errors import WeirError, internal
from schemas.offloaded import WRITE_OUTPUTS, long_wishes, write_job, written_outputs
from schemas.requests import InferRequest, InferResponse

OnAnswer = Callable[[ServedModel, InferRequest, InferResponse | WeirError | None, bool], None]
"""Told of each answer to a request to a model, and whether it is the last."""

OnError = Callable[[WeirError], None]
Reading = asyncio.Task[list[memoryview]] | None


class InferRequests:
    """What all methods that run models share, with the request headers they have seen."""

    def __init__(self, doors: Doors) -> None:
        self._catalog = doors.catalog
        self._inference = doors.inference
        self._find_region = doors.regions.find
        self._prepared = PreparedCalls()
        self._offload = doors.offload

    def read(
        self, data: Message, then: Callable[[Any, Sequence[bytes | memoryview]], None], on_error: OnError
    ) -> Reading:
        """Calls `then` with the ModelInferRequest and its raw contents: at once, or later where a helper process reads it.

        Returns what is under way then, None where nothing is. `on_error` is told what goes wrong later; what goes wrong at
        once is raised.
        """
        split = split_request(data)
        if not is_long(split):
            then(*decode_split(split))
            return None
        reading = self._offload.start(READ_REQUEST, request_job(split))
        reading.add_done_callback(lambda done: _finish(done, lambda parts: then(*read_result(split, parts)), on_error))
        return reading

    def write(
        self,
        served: ServedModel,
        request: InferRequest,
        response: InferResponse,
        then: Callable[[tuple[bytes, ...]], None],
        on_error: OnError,
    ) -> asyncio.Task[list[memoryview]]:
        """Calls `then` with the message of a response for which `encoded` has raised LongOutputs, later."""
        batching = served.config.max_batch_size > 0
        wishes = long_wishes(request, response, served.labels.get, batching, all_binary=True)
        writing = self._offload.start(WRITE_OUTPUTS, write_job(wishes))

        def encode(parts: list[memoryview]) -> None:
            written = written_outputs(wishes, parts)
            then(response_pieces(request, response, served.labels, batching, written))

        writing.add_done_callback(lambda done: _finish(done, encode, on_error))
        return writing

    def resolve(self, message: Any) -> ServedModel:
        """The model that a ModelInferRequest asks. Raises WeirError where there is none."""
        return self._catalog.resolve(message.model_name, read_version(message.model_version))

    def submit(
        self,
        head: CallHead,
        data: Message,
        message: Any,
        raw_contents: Sequence[bytes | memoryview],
        served: ServedModel,
        on_answer: OnAnswer,
        deadline_ms: int = 0,
        is_traced: bool | None = None,
    ) -> Pending:
        """Publishes the request that `decode_request` has read from `data`. Raises WeirError for what is refused.

        `is_traced` is whether it is to be traced, where that was decided before.
        """
        request = request_from_message(message, raw_contents, find_region=self._find_region)
        tracing = self._inference.tracing
        if is_traced is None:
            is_traced = tracing.is_on and tracing.samples(served.name, head.traceparent)
        request.traceparent, request.tracestate = head.traceparent, head.tracestate
        request.deadline_ms = deadline_ms
        if is_traced:
            now_ns = time.time_ns()
            request.arrival = ("GRPC_WAITREAD_START", now_ns), ("GRPC_WAITREAD_END", now_ns)
        if head.forwarded:
            request.parameters = add_parameters(request.parameters, head.forwarded)
        pending = self._inference.submit(request, partial(on_answer, served, request), is_traced=is_traced)
        if isinstance(data, bytes) and not head.forwarded and not self._inference.caches(served):
            self._prepared.keep(request, served, data, raw_contents)
        return pending

    def submit_prepared(
        self, head: CallHead, data: Message, on_answer: OnAnswer, takes_decoupled: bool, deadline_ms: int = 0
    ) -> tuple[ServedModel, Pending] | None:
        """Publishes a request of which all but the tensors is known; None for another. Raises WeirError as `submit`."""
        if head.forwarded or not isinstance(data, bytes):
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
        if tracing.is_on and tracing.samples(served.name, head.traceparent):
            message, raw_contents = decode_request(data)
            return served, self.submit(head, data, message, raw_contents, served, on_answer, deadline_ms, True)
        on_answer = partial(on_answer, served, request)
        return served, self._inference.submit_prepared(served, prepared, prepared.pack(data), on_answer, deadline_ms)

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for the answer any more."""
        self._inference.abandon(pending)


def _finish(
    done: asyncio.Future[list[memoryview]], then: Callable[[list[memoryview]], None], on_error: OnError
) -> None:
    if done.cancelled():
        return
    try:
        then(done.result())
    except WeirError as error:
        on_error(error)
    except Exception as error:  # noqa: BLE001 - it is reported
        report("gateway.grpc.infer_requests: a long request or response", error)
        on_error(internal("internal server error"))


def encoded(served: ServedModel, request: InferRequest, response: InferResponse) -> tuple[bytes, ...]:
    """The serialized ModelInferResponse in pieces. Raises WeirError where there can be none, and LongOutputs."""
    return response_pieces(request, response, served.labels, served.config.max_batch_size > 0)
