"""The body of a request: the part that only its worker reads. A scheduler passes it on without decoding it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, Parameters, RequestedOutput
from weir.schemas.core.tensors import MAX_WALKED_BYTES, ClientRef, PayloadRef
from weir.schemas.wire.codec import (
    MalformedMessage,
    NonNegative,
    WireTensor,
    bin_header,
    decode,
    decoder,
    encode,
    reference,
)

_REFERENCE = b"\x95"  # the first byte of an array of five; a body is an array of seven to twelve


class _Body(msgspec.Struct, array_like=True):
    """The fields of `InferRequest` that its worker reads, in their order on the wire; few requests have the last five."""

    id: str
    parameters: Parameters | None
    inputs: list[WireTensor]
    outputs: list[str | tuple[str, list[Any]]]
    correlation_id: NonNegative | str
    sequence_flags: Annotated[int, Meta(ge=0, le=SEQUENCE_START | SEQUENCE_END)]
    timeout_us: NonNegative
    traceparent: str = ""
    tracestate: str = ""
    wants_timestamps: bool = False
    priority: NonNegative = 0
    owner: str = ""


def pack_body(request: InferRequest) -> bytes:
    """The body of `request`. Tensor content is copied once, into the returned bytes."""
    return encode(
        (
            request.id,
            request.parameters,
            request.inputs,
            [_output_row(output) for output in request.outputs],
            request.correlation_id,
            request.sequence_flags,
            request.timeout_us,
            *_ending(request),
        )
    )


def body_template(request: InferRequest) -> list[bytes]:
    """The pieces of the body of `request` before, between and after the content of its tensors.

    Joined with the content of other tensors of the same sizes, they are the body of the request that has those tensors. For
    a tensor in a payload slot, its reference (`pack_ref`) takes the place of content.
    """
    pieces: list[bytes] = []
    ending = _ending(request)
    piece = _array_header(7 + len(ending)) + encode(request.id) + encode(request.parameters)
    piece += _array_header(len(request.inputs))
    for tensor in request.inputs:
        piece += _array_header(4) + encode(tensor.name) + encode(tensor.datatype) + encode(tensor.shape)
        pieces.append(piece if isinstance(tensor.data, PayloadRef) else piece + bin_header(tensor.size_bytes))
        piece = b""
    piece += encode([_output_row(output) for output in request.outputs])
    piece += encode(request.correlation_id) + encode(request.sequence_flags) + encode(request.timeout_us)
    pieces.append(piece + b"".join(map(encode, ending)))
    return pieces


def pack_ref(ref: PayloadRef) -> bytes:
    """A reference as the content of a tensor in a body."""
    return encode(ref)


def pack_body_ref(ref: PayloadRef) -> bytes:
    """What replaces a body that lies in a payload slot, because the bodies of its frame are too large for a message."""
    return encode(ref)


def is_body_ref(body: bytes) -> bool:
    """Whether `body` is what `pack_body_ref` returns."""
    return body[:1] == _REFERENCE


def body_ref(body: bytes) -> PayloadRef | None:
    """Where the body lies, None where `body` is the body itself. Raises MalformedMessage."""
    if body[:1] != _REFERENCE:
        return None
    ref: PayloadRef = decode(body, PayloadRef, "reference to a request body")
    return ref


def unpack_body(body: bytes | memoryview, model: str, version: int) -> InferRequest:
    """The request whose body this is. Its tensors own copies of their content, or refer to it. Raises MalformedMessage."""
    fields: _Body = decode(body, _Body, "request body")
    try:
        for tensor in fields.inputs:
            if type(tensor.data) is list:
                tensor.data = reference(tensor.data)  # type: ignore[assignment]  # now it is a plain `Tensor`
        outputs = [
            RequestedOutput(row) if type(row) is str else _requested_output(row)  # type: ignore[arg-type]  # then a tuple
            for row in fields.outputs
        ]
    except (ValueError, TypeError) as error:
        raise MalformedMessage(f"not a request body: {error}") from error
    return _request(fields, outputs, model, str(version))


def unpack_plain(bodies: Iterable[bytes], model: str, version: int) -> list[InferRequest] | None:
    """The requests of these bodies, which are bytes alone; None if one of them needs a closer look by `unpack_body`.

    That is one that is malformed, refers to memory elsewhere, or has strings that are too long for a gateway to check.
    """
    decode_body, version_name = decoder(_Body), str(version)
    requests: list[InferRequest] = []
    try:
        for body in bodies:
            if body[:1] == _REFERENCE:
                return None
            fields: _Body = decode_body(body)
            for tensor in fields.inputs:
                if type(tensor.data) is not bytes or (
                    tensor.datatype == "BYTES" and len(tensor.data) > MAX_WALKED_BYTES
                ):
                    return None
            outputs: list[RequestedOutput] = []
            for row in fields.outputs:
                if type(row) is not str:
                    return None
                outputs.append(RequestedOutput(row))
            requests.append(_request(fields, outputs, model, version_name))
    except (ValueError, RecursionError):
        return None
    return requests


def _request(fields: _Body, outputs: list[RequestedOutput], model: str, version: str) -> InferRequest:
    return InferRequest(
        model,
        version,
        fields.id,
        fields.inputs,  # type: ignore[arg-type]  # a list is invariant
        outputs,
        fields.parameters,
        priority=fields.priority,
        timeout_us=fields.timeout_us,
        correlation_id=fields.correlation_id,
        sequence_flags=fields.sequence_flags,
        traceparent=fields.traceparent,
        tracestate=fields.tracestate,
        wants_timestamps=fields.wants_timestamps or bool(fields.traceparent),
        owner=fields.owner,
    )


def _ending(request: InferRequest) -> tuple[str | bool | int, ...]:
    """The last fields of the body, without those at the end that have their default."""
    if request.owner:
        return (request.traceparent, request.tracestate, request.wants_timestamps, request.priority, request.owner)
    if request.priority:
        return (request.traceparent, request.tracestate, request.wants_timestamps, request.priority)
    if request.wants_timestamps:
        return (request.traceparent, request.tracestate, True)
    if not request.traceparent:
        return ()
    return (request.traceparent, request.tracestate) if request.tracestate else (request.traceparent,)


def _output_row(output: RequestedOutput) -> str | tuple[str, ClientRef]:
    return output.name if output.region is None else (output.name, output.region)


def _requested_output(row: tuple[str, list[Any]]) -> RequestedOutput:
    name, place = row
    region = reference(place)
    if isinstance(region, PayloadRef):
        raise TypeError("outputs are not written to payload slots")
    output = RequestedOutput(name)
    output.region = region
    return output


def _array_header(length: int) -> bytes:
    return bytes((0x90 | length,)) if length < 16 else b"\xdc" + length.to_bytes(2, "big")
