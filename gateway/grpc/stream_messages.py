"""`ModelStreamInferResponse`: what each answer on a stream looks like, made of parts so that no tensor is copied.

Source of semantics: Triton's gRPC front end, observed on 2.51: `triton_final_response` is on all that a model answers,
errors included, but not on refusals at the door, which name nothing but their request.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import service_pb2

from gateway.grpc.codec import varint
from schemas.requests import InferRequest

_RESPONSE_TAG = b"\x12"  # ModelStreamInferResponse.infer_response: field 2, length-delimited

_ENDINGS = [
    service_pb2.ModelInferResponse(parameters={"triton_final_response": {"bool_param": is_final}}).SerializeToString()
    for is_final in (False, True)
]
"""The parameter as a piece of a ModelInferResponse: by the wire format it may follow all else."""


def streamed(response: Sequence[bytes], is_final: bool) -> tuple[bytes, ...]:
    """The pieces of the message that carries `response`, a serialized ModelInferResponse in pieces."""
    ending = _ENDINGS[is_final]
    return _RESPONSE_TAG + varint(sum(map(len, response)) + len(ending)), *response, ending


def streamed_end(request: InferRequest) -> tuple[bytes, ...]:
    """The end of the answers to `request`, where no response comes with it."""
    return streamed((_name(request),), True)


def streamed_error(message: str, request: InferRequest, is_final: bool) -> tuple[bytes, ...]:
    """An error in the place of an answer to `request`."""
    return service_pb2.ModelStreamInferResponse(error_message=message).SerializeToString(), *streamed(
        (_name(request),), is_final
    )


def streamed_refusal(message: str, request_id: str) -> tuple[bytes, ...]:
    """A refusal at the door."""
    refusal = service_pb2.ModelStreamInferResponse(
        error_message=message, infer_response=service_pb2.ModelInferResponse(id=request_id)
    )
    return (refusal.SerializeToString(),)


def _name(request: InferRequest) -> bytes:
    response = service_pb2.ModelInferResponse(
        id=request.id, model_name=request.model_name, model_version=request.model_version
    )
    return bytes(response.SerializeToString())
