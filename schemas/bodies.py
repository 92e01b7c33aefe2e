"""The body of a request: the part of it that only its worker reads, and a scheduler passes on unread."""

from __future__ import annotations

from typing import Any

import msgpack

from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from schemas.tensors import ClientRef, PayloadRef
from schemas.wire import (
    MalformedMessage,
    any_ref,
    bin_header,
    pack,
    packer,
    parameters_or_none,
    payload_ref,
    text,
    unpack_tensors,
)

_BODY_REF = b"\x95"  # how an array of five begins; a body is an array of seven to eleven
_ALL_FLAGS = SEQUENCE_START | SEQUENCE_END


def pack_body(request: InferRequest) -> bytes:
    """The part of `request` that only the worker reads. Tensor data is copied once, into the returned bytes."""
    return bytes(
        pack(
            (
                request.id,
                request.parameters,
                [(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in request.inputs],
                [_output_row(output) for output in request.outputs],
                request.correlation_id,
                request.sequence_flags,
                request.timeout_us,
                *_ending(request),
            )
        )
    )


def _ending(request: InferRequest) -> tuple[str | bool | int, ...]:
    """What few requests have: a place in a trace, the wish for times without one, a priority."""
    if request.priority:
        return (request.traceparent, request.tracestate, request.wants_moments, request.priority)
    if request.wants_moments:
        return (request.traceparent, request.tracestate, True)
    if not request.traceparent:
        return ()
    return (request.traceparent, request.tracestate) if request.tracestate else (request.traceparent,)


def body_template(request: InferRequest) -> list[bytes]:
    """What `pack_body` makes of `request`, without the content of its tensors: the bytes before, between and after it.

    Joined with the content of other tensors of the same sizes, it is the body of the request that has those.
    """
    pieces: list[bytes] = []
    ending = _ending(request)
    piece = packer.pack_array_header(7 + len(ending)) + pack(request.id) + pack(request.parameters)
    piece += packer.pack_array_header(len(request.inputs))
    for tensor in request.inputs:
        piece += packer.pack_array_header(4) + pack(tensor.name) + pack(tensor.datatype) + pack(tensor.shape)
        pieces.append(piece + bin_header(tensor.size_bytes))
        piece = b""
    piece += pack([_output_row(output) for output in request.outputs])
    piece += pack(request.correlation_id) + pack(request.sequence_flags) + pack(request.timeout_us)
    pieces.append(piece + b"".join(map(pack, ending)))
    return pieces


def pack_body_ref(ref: PayloadRef) -> bytes:
    """In the place of a body: where it lies, when the bodies of a frame are together too large for a message."""
    return bytes(pack(ref))


def is_body_ref(body: bytes) -> bool:
    """Whether this stands in the place of a body."""
    return body[:1] == _BODY_REF


def body_ref(body: bytes) -> PayloadRef | None:
    """Where the body lies, if this stands in its place. Raises MalformedMessage."""
    if not is_body_ref(body):
        return None
    try:
        return payload_ref(*msgpack.unpackb(body))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a reference to a body: {error}") from error


def unpack_body(body: bytes | memoryview, model: str, version: int) -> InferRequest:
    """The request whose body this is, with tensors over the unpacked bytes. Raises MalformedMessage."""
    try:
        id, parameters, inputs, outputs, correlation_id, sequence_flags, timeout_us, *more = msgpack.unpackb(body)
        request = InferRequest(model, str(version), text(id), parameters=parameters_or_none(parameters))
        if not (type(inputs) is type(outputs) is list and type(sequence_flags) is type(timeout_us) is int):
            raise TypeError("wrong types")
        if type(correlation_id) is not str and not (type(correlation_id) is int and correlation_id >= 0):
            raise TypeError("not a correlation id")
        if not 0 <= sequence_flags <= _ALL_FLAGS or timeout_us < 0:
            raise TypeError("numbers that can't be")
        request.inputs = unpack_tensors(inputs, any_ref)
        request.outputs = [_requested_output(row) for row in outputs]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a request body: {error}") from error
    request.correlation_id = correlation_id
    request.sequence_flags = sequence_flags
    request.timeout_us = timeout_us
    if more:
        try:
            _unpack_ending(request, *more)
        except TypeError as error:  # more of it than there is
            raise MalformedMessage(f"not a request body: {error}") from error
    return request


def _unpack_ending(
    request: InferRequest, traceparent: Any, tracestate: Any = "", wants_moments: Any = False, priority: Any = 0
) -> None:
    if type(wants_moments) is not bool or type(priority) is not int or priority < 0:
        raise MalformedMessage("not a request body: wrong types")
    request.traceparent, request.tracestate = text(traceparent), text(tracestate)
    request.wants_moments = wants_moments or bool(traceparent)
    request.priority = priority


def _output_row(output: RequestedOutput) -> str | tuple[str, ClientRef]:
    return output.name if output.region is None else (output.name, output.region)


def _requested_output(row: Any) -> RequestedOutput:
    if not isinstance(row, list):
        return RequestedOutput(text(row))
    name, place = row
    output = RequestedOutput(text(name))
    region = any_ref(*place)
    if isinstance(region, PayloadRef):
        raise TypeError("outputs are not put into payload slots")
    output.region = region
    return output
