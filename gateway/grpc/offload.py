"""Parsing of long gRPC requests in a helper process (`weir.runtime.offload`): protobuf's parser holds the interpreter's
lock.

A `ModelInferRequest` can be long because of typed contents, parameters, or unknown fields; raw contents never pass through
the parser. The helper makes all checks of `request_from_message`, and returns a short message with raw contents. The
gateway parses that again, because only it knows its shared-memory regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from weir.gateway.grpc.codec import SplitMessage, decode_split, request_from_message, split_request
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.tensors import ClientRef, RegionRef
from weir.schemas.kserve.offloaded import Job
from weir.schemas.kserve.triton_messages import messages

READ_REQUEST = "weir.gateway.grpc.offload:read_request"

LONG_BYTES = 256 * 1024
"""A helper process parses messages of more bytes than this, not counting raw contents."""

_PLACE = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")

Part = bytes | memoryview


def read_job(split: SplitMessage) -> Job | None:
    """The parsing of a long message by `read_request`; None for a short one. Raw contents that are split off stay here."""
    if len(split.rest) <= LONG_BYTES:
        return None
    sizes = None if split.raw_contents is None else [len(content) for content in split.raw_contents]
    return Job(READ_REQUEST, [msgpack.packb(sizes), split.rest])


def offloaded_message(split: SplitMessage, parts: Sequence[memoryview]) -> tuple[Any, Sequence[Part]]:
    """(message, raw contents) from the parts that `READ_REQUEST` has returned."""
    message = messages.ModelInferRequest.FromString(parts[0])
    return message, list(parts[1:]) or split.raw_contents or ()


def read_request(parts: Sequence[memoryview]) -> list[Part]:
    """Parses and checks a request in the helper; `offloaded_message` reads the result. Raises WeirError."""
    sizes = msgpack.unpackb(parts[0])
    if sizes is None:
        split = split_request(parts[1])
    else:
        # The checks need their presence, not their content.
        split = SplitMessage(parts[1], [memoryview(bytes(size)) for size in sizes])
    message, raw_contents = decode_split(split)
    request = request_from_message(message, raw_contents, DEFAULT_LIMITS, _any_region)
    typed = [tensor.HasField("contents") for tensor in message.inputs]
    contents: list[Part] = list(raw_contents) if sizes is None else []
    if any(typed):
        contents = [
            tensor.data  # type: ignore[misc]  # it came in the message, so it is not a reference
            for tensor, is_typed in zip(request.inputs, typed, strict=True)
            if is_typed
        ]
    message.DiscardUnknownFields()
    del message.raw_input_contents[:]
    for tensor in message.inputs:
        tensor.ClearField("contents")
        _keep_only(tensor.parameters, _PLACE)
    for output in message.outputs:
        _keep_only(output.parameters, ("classification", *_PLACE))
    return [message.SerializeToString(), *contents]


def _keep_only(parameters: Any, names: Sequence[str]) -> None:
    for name in [name for name in parameters if name not in names]:
        del parameters[name]


def _any_region(name: str, offset: int, size: int) -> ClientRef:
    return RegionRef(name, 0, offset, size)
