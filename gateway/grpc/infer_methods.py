"""`ModelInfer`: one request, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from calls.catalog import ServedModel
from gateway.grpc.call import UnaryCall
from gateway.grpc.infer_requests import InferRequests, OnAnswer, encoded
from gateway.grpc.messages import Message
from gateway.grpc.rpc import Handler, Methods
from gateway.grpc.status import CallError, Status
from runtime.containment import report
from schemas.errors import ErrorCode, WeirError, internal
from schemas.kserve_response import LongOutputs
from schemas.requests import InferRequest, InferResponse


def infer_methods(requests: InferRequests, compression_level: int = 0, later: Handler | None = None) -> Methods:
    """The method that runs models and answers once. Answers are compressed by zlib's `compression_level`.

    Calls that are to be answered later are given to `later`, where there is one.
    """
    return {"ModelInfer": _ModelInfer(requests, compression_level, later)}


class _ModelInfer:
    def __init__(self, requests: InferRequests, compression_level: int, later: Handler | None) -> None:
        self._later = later
        self._compression_level = compression_level
        self._requests = requests

    def __call__(self, call: UnaryCall, data: Message) -> None:
        if call.head.later is not None and self._later is not None:
            self._later(call, data)
            return
        on_answer = partial(self._answer, call)
        submitted = self._requests.submit_prepared(call.head, data, on_answer, False, call.deadline_ms)
        if submitted is not None:
            pending = submitted[1]
        else:
            then = partial(self._submit, call, data, on_answer)
            reading = self._requests.read(data, then, partial(self._refuse, call))
            if reading is not None:
                call.on_cancel = partial(_cancel, reading)
            return
        call.on_cancel = partial(self._requests.abandon, pending)

    def _submit(
        self,
        call: UnaryCall,
        data: Message,
        on_answer: OnAnswer,
        message: Any,
        raw_contents: Sequence[bytes | memoryview],
    ) -> None:
        served = self._requests.resolve(message)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        pending = self._requests.submit(call.head, data, message, raw_contents, served, on_answer, call.deadline_ms)
        call.on_cancel = partial(self._requests.abandon, pending)

    def _refuse(self, call: UnaryCall, error: WeirError) -> None:
        call.on_cancel = None
        call.fail(CallError.of(error))

    def _answer(
        self,
        call: UnaryCall,
        served: ServedModel,
        request: InferRequest,
        answer: InferResponse | WeirError | None,
        _is_final: bool,
    ) -> None:
        call.on_cancel = None
        try:
            if answer is None:
                raise internal("expected a single response, got 0")
            if isinstance(answer, WeirError):
                raise answer
            message = encoded(served, request, answer)
        except WeirError as error:
            call.fail(CallError.of(error))
        except LongOutputs:
            assert isinstance(answer, InferResponse)  # noqa: S101 - only that has outputs
            self._write(call, served, request, answer)
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.grpc.infer_methods: answering a call", error)
            call.fail(CallError(Status.INTERNAL, "internal server error"))
        else:
            self._send(call, message)

    def _write(self, call: UnaryCall, served: ServedModel, request: InferRequest, response: InferResponse) -> None:
        try:
            then = partial(self._send, call)
            writing = self._requests.write(served, request, response, then, partial(self._refuse, call))
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
