"""`ModelInfer`: one request, one answer."""

from __future__ import annotations

import logging
from functools import partial

from gateway.catalog import ServedModel
from gateway.doors import Doors
from gateway.grpc.call import UnaryCall
from gateway.grpc.codec import decode_request, encode_response, request_from_message
from gateway.grpc.messages import Message
from gateway.grpc.prepared import PreparedCalls
from gateway.grpc.rpc import Methods
from gateway.grpc.status import CallError, Status
from schemas.errors import ErrorCode, WeirError, internal
from schemas.requests import InferRequest, InferResponse

logger = logging.getLogger("weir.gateway")


def infer_methods(doors: Doors) -> Methods:
    """The methods that run models."""
    return {"ModelInfer": _ModelInfer(doors)}


class _ModelInfer:
    def __init__(self, doors: Doors) -> None:
        self._catalog = doors.catalog
        self._inference = doors.inference
        self._prepared = PreparedCalls()

    def __call__(self, call: UnaryCall, data: Message) -> None:
        if isinstance(data, bytes) and not call.head.traceparent and self._infer_prepared(call, data):
            return
        message, raw_contents = decode_request(data)
        served = self._catalog.resolve(message.model_name, message.model_version)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        request = request_from_message(message, raw_contents)
        request.traceparent = call.head.traceparent
        pending = self._inference.submit(request, partial(self._answer, call, served, request))
        call.on_cancel = partial(self._inference.abandon, pending)
        if isinstance(data, bytes):
            self._prepared.keep(request, served, data, raw_contents)

    def _infer_prepared(self, call: UnaryCall, data: bytes) -> bool:
        """Submits a request of which all but the tensors is known; False for another."""
        prepared = self._prepared.find(data)
        if prepared is None:
            return False
        request = prepared.request
        served = self._catalog.resolve(request.model_name, request.model_version)
        if served is not prepared.served:
            self._prepared.forget(prepared)
            return False
        on_answer = partial(self._answer, call, served, request)
        pending = self._inference.submit_prepared(served, prepared, prepared.pack(data), on_answer)
        call.on_cancel = partial(self._inference.abandon, pending)
        return True

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
            message = encode_response(request, answer, served.labels, served.config.max_batch_size > 0)
        except WeirError as error:
            call.fail(CallError.of(error))
        except Exception:  # a bug of ours: the log gets the traceback, the client no internals
            logger.exception("a gRPC call could not be answered")
            call.fail(CallError(Status.INTERNAL, "internal server error"))
        else:
            call.send(message, is_last=True)
