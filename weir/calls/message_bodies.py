"""Bodies of messages, both ways: KServe v2 as JSON, as JSON and binary tensors, and as msgpack.

The headers (names in any case) determine the form of a body:

| headers | body |
|---|---|
| none | JSON |
| `Inference-Header-Content-Length: <n>` | n bytes of JSON, then binary tensors; 0: the content of the only input |
| `Content-Type: application/msgpack` (or `application/x-msgpack`, `application/vnd.msgpack`) | msgpack |

A response has the form of its request: msgpack for msgpack, else JSON, with binary tensors where the request wants them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from weir.calls.catalog import ServedModel
from weir.runtime.offload import OFF_LOOP_BYTES, takes_long
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import DEFAULT_LIMITS, RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.msgpack_documents import build_msgpack_response, msgpack_error_body, parse_msgpack_request
from weir.schemas.kserve.offloaded import (
    READ_JSON,
    READ_MSGPACK,
    BodyPart,
    OutputWish,
    json_job,
    long_wishes,
    msgpack_job,
    outline_document,
)
from weir.schemas.kserve.regions import FindRegion, no_regions
from weir.schemas.kserve.request import (
    is_header_length,
    parse_header_length,
    parse_infer_request,
    parse_raw_request,
    read_document,
)
from weir.schemas.kserve.response import build_infer_response, error_body

CONTENT_TYPE = "content-type"
HEADER_LENGTH = "inference-header-content-length"

MAX_ERROR_LENGTH = 8192
"""Characters of an error's message: the broker closes the connection over a message that is too large."""

_MSGPACK_TYPES = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_DIGEST_BYTES = 16

Headers = list[tuple[str, str]]


class BodyFormat(Enum):
    """The forms of a body; the value is the media type of a response without binary tensors."""

    JSON = "application/json"
    BINARY = "application/octet-stream"
    MSGPACK = "application/msgpack"


def format_of(headers: Mapping[str, str]) -> BodyFormat:
    """The form of the body that comes with `headers` (names in lower case)."""
    content_type = headers.get(CONTENT_TYPE)
    if content_type and content_type.partition(";")[0].strip().lower() in _MSGPACK_TYPES:
        return BodyFormat.MSGPACK
    return BodyFormat.BINARY if HEADER_LENGTH in headers else BodyFormat.JSON


def parse_body(  # noqa: PLR0913 - the target, the parts of a message, and two policies with defaults
    model: str,
    version: str,
    data: bytes,
    headers: Mapping[str, str],
    config: ModelConfig,
    limits: RequestLimits = DEFAULT_LIMITS,
    find_region: FindRegion = no_regions,
) -> tuple[InferRequest, BodyFormat]:
    """The request in `data`, and its form. Binary tensors are views over `data`. Raises WeirError as over HTTP."""
    body_format = format_of(headers)
    length = headers.get(HEADER_LENGTH)
    if body_format is BodyFormat.MSGPACK:
        if length is not None:
            raise invalid("a msgpack body has no Inference-Header-Content-Length: its tensors are in it")
        return parse_msgpack_request(model, version, data, limits, find_region), body_format
    header_length = None if length is None else parse_header_length(length)
    if header_length == 0:
        return parse_raw_request(model, version, data, config, limits), body_format
    return parse_infer_request(model, version, data, header_length, limits, find_region), body_format


class OffloadedBody(NamedTuple):
    """A long body for a helper process to read (`operation` on `parts`), or one that it has read.

    `content` follows the JSON. `result` are the parts that the helper has returned, or the error of an invalid body.
    """

    operation: str
    parts: Sequence[BodyPart]
    content: memoryview
    body_format: BodyFormat
    result: Sequence[memoryview] | WeirError = ()


def offload_body(
    model: str, version: str, data: bytes, headers: Mapping[str, str], limits: RequestLimits
) -> OffloadedBody | None:
    """The work of a helper process on `data`; None for a body that is short enough to read at once."""
    length, body_format, view = headers.get(HEADER_LENGTH), format_of(headers), memoryview(data)
    if body_format is BodyFormat.MSGPACK:
        if len(data) <= OFF_LOOP_BYTES:
            return None
        return OffloadedBody(READ_MSGPACK, msgpack_job(model, version, view, limits), view[:0], body_format)
    json_bytes = len(data) if length is None else int(length) if is_header_length(length) else 0
    if json_bytes > len(data) or not takes_long(view[:json_bytes]):
        return None
    content = view[json_bytes:]
    job = json_job(model, version, view[:json_bytes], len(content), limits)
    return OffloadedBody(READ_JSON, job, content, body_format)


def parse_offloaded_body(
    model: str,
    version: str,
    outline: OffloadedBody,
    limits: RequestLimits = DEFAULT_LIMITS,
    find_region: FindRegion = no_regions,
) -> tuple[InferRequest, BodyFormat]:
    """As `parse_body`, for a body that a helper process has read. Raises WeirError."""
    if isinstance(outline.result, WeirError):
        raise outline.result
    document = outline_document(outline.result)
    return read_document(model, version, document, outline.content, limits, find_region), outline.body_format


def long_output_specs(
    request: InferRequest, response: InferResponse, served: ServedModel, body_format: BodyFormat
) -> list[OutputWish]:
    """The outputs for which `encode_response` raised LongOutputs."""
    is_msgpack = body_format is BodyFormat.MSGPACK
    return long_wishes(request, response, served.labels.get, served.config.max_batch_size > 0, is_msgpack)


def encode_response(
    request: InferRequest,
    response: InferResponse,
    served: ServedModel,
    body_format: BodyFormat,
    written: Mapping[str, Tensor] | None = None,
) -> tuple[Headers, bytes]:
    """The headers and the body of the response to `request`, of any size.

    Raises WeirError for an output that cannot be written in the requested form, and LongOutputs without the `written`
    outputs that a helper process must write.
    """
    batching = served.config.max_batch_size > 0
    if body_format is BodyFormat.MSGPACK:
        chunks = build_msgpack_response(request, response, served.labels.get, batching, written)
        return [("Content-Type", BodyFormat.MSGPACK.value)], b"".join(chunks)
    chunks, header_length = build_infer_response(request, response, served.labels.get, batching, written)
    if header_length is None:
        return [("Content-Type", BodyFormat.JSON.value)], b"".join(chunks)
    headers = [
        ("Content-Type", BodyFormat.BINARY.value),
        ("Inference-Header-Content-Length", str(header_length)),
    ]
    return headers, b"".join(chunks)


def encode_error(error: WeirError, body_format: BodyFormat) -> tuple[Headers, bytes]:
    """The headers and the body of an error, which always fit into a message."""
    message = error.message[:MAX_ERROR_LENGTH]
    if body_format is BodyFormat.MSGPACK:
        return [("Content-Type", BodyFormat.MSGPACK.value)], msgpack_error_body(message)
    return [("Content-Type", BodyFormat.JSON.value)], error_body(message)


def digest_of(data: bytes | memoryview) -> str:
    """The digest of a body: 32 hexadecimal digits of its BLAKE2b hash."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
