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
from functools import partial
from typing import Any, NamedTuple, Protocol

from weir.calls.catalog import ServedModel
from weir.runtime.offload import OFF_LOOP_BYTES, SHORT_BYTES, takes_long
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.msgpack_documents import build_msgpack_response, msgpack_error_body, parse_msgpack_request
from weir.schemas.kserve.offloaded import (
    Job,
    json_job,
    msgpack_job,
    outline_document,
    output_job,
    written_outputs,
)
from weir.schemas.kserve.regions import FindRegion
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

Body = bytes | bytearray | memoryview


class ReadContext(Protocol):
    """What codecs need to read a request."""

    @property
    def limits(self) -> RequestLimits:
        """What a request may hold."""

    @property
    def find_region(self) -> FindRegion:
        """Looks up clients' shared memory."""


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


class ReadRules(NamedTuple):
    """A `ReadContext` apart from that of the process."""

    limits: RequestLimits
    find_region: FindRegion


class OwnRegions:
    """The services of a frontend, with `regions`, as a codec needs them to read a request of one owner."""

    __slots__ = ("_owner", "_services")

    def __init__(self, services: Any, owner: str) -> None:
        self._services = services
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services, name)

    @property
    def find_region(self) -> FindRegion:
        """Looks up the owner's shared memory."""
        return partial(self._services.regions.find, owner=self._owner)


class Document(NamedTuple):
    """A body for `served`, the model that the client called `model`, and the length of its JSON header if it has one."""

    served: ServedModel
    model: str
    version: str
    data: Body
    header_length: str | None = None


Encoded = tuple[list[bytes | memoryview], int | None, str]
"""A response: the chunks of its body, the length of the JSON header if binary tensors follow it, and the version that
responded. A plain tuple: one is made for each response."""


class JsonCodec:
    """Reads a `Document` of JSON, alone or before binary tensors, or of one tensor; writes `Encoded`."""

    def read_job(self, source: Document, context: ReadContext) -> Job | None:
        """Implements `Codec.read_job`."""
        if len(source.data) <= SHORT_BYTES:
            return None
        length, view = source.header_length, memoryview(source.data)
        json_bytes = len(view) if length is None else int(length) if is_header_length(length) else 0
        if json_bytes > len(view) or not takes_long(view[:json_bytes]):
            return None
        return json_job(source.model, source.version, view[:json_bytes], len(view) - json_bytes, context.limits)

    def read(
        self, source: Document, parts: Sequence[memoryview], context: ReadContext
    ) -> tuple[ServedModel, InferRequest]:
        """Implements `Codec.read`."""
        served, model, version, data, text = source
        limits, length = context.limits, None if text is None else parse_header_length(text)
        if parts:
            content = memoryview(data)[len(data) if length is None else length :]
            document = outline_document(parts)
            return served, read_document(model, version, document, content, limits, context.find_region)
        if length == 0:
            return served, parse_raw_request(model, version, data, served.config, limits)
        return served, parse_infer_request(model, version, data, length, limits, context.find_region)

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        """Implements `Codec.write_job`."""
        return output_job(request, response, served.labels.get, served.config.max_batch_size > 0)

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> Encoded:
        """Implements `Codec.write`."""
        labels, batching = served.labels.get, served.config.max_batch_size > 0
        written = written_outputs(parts) if parts else None
        chunks, header_length = build_infer_response(request, response, labels, batching, written)
        return chunks, header_length, response.model_version


class MsgpackCodec(JsonCodec):
    """Reads a `Document` of msgpack; writes `Encoded`."""

    def read_job(self, source: Document, context: ReadContext) -> Job | None:
        """Implements `Codec.read_job`."""
        if len(source.data) <= OFF_LOOP_BYTES:
            return None
        return msgpack_job(source.model, source.version, source.data, context.limits)

    def read(
        self, source: Document, parts: Sequence[memoryview], context: ReadContext
    ) -> tuple[ServedModel, InferRequest]:
        """Implements `Codec.read`."""
        served, model, version, data, length = source
        if length is not None:
            raise invalid("a msgpack body has no Inference-Header-Content-Length: its tensors are in it")
        if parts:
            document, nothing = outline_document(parts), memoryview(b"")
            return served, read_document(model, version, document, nothing, context.limits, context.find_region)
        return served, parse_msgpack_request(model, version, data, context.limits, context.find_region)

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        """Implements `Codec.write_job`."""
        return output_job(request, response, served.labels.get, served.config.max_batch_size > 0, all_binary=True)

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> Encoded:
        """Implements `Codec.write`."""
        labels, batching = served.labels.get, served.config.max_batch_size > 0
        written = written_outputs(parts) if parts else None
        chunks = build_msgpack_response(request, response, labels, batching, written)
        return chunks, None, response.model_version


JSON = JsonCodec()
_CODECS = {BodyFormat.JSON: JSON, BodyFormat.BINARY: JSON, BodyFormat.MSGPACK: MsgpackCodec()}


def codec_of(body_format: BodyFormat) -> JsonCodec:
    """The codec of bodies in this form."""
    return _CODECS[body_format]


def message_of(encoded: Encoded, body_format: BodyFormat) -> tuple[Headers, bytes]:
    """The headers and the body of a message with an encoded response, of any size."""
    chunks, header_length, _ = encoded
    body = b"".join(chunks)
    if header_length is None:
        media_type = body_format if body_format is BodyFormat.MSGPACK else BodyFormat.JSON
        return [("Content-Type", media_type.value)], body
    length = ("Inference-Header-Content-Length", str(header_length))
    return [("Content-Type", BodyFormat.BINARY.value), length], body


def encode_error(error: WeirError, body_format: BodyFormat) -> tuple[Headers, bytes]:
    """The headers and the body of an error, which always fit into a message."""
    message = error.message[:MAX_ERROR_LENGTH]
    if body_format is BodyFormat.MSGPACK:
        return [("Content-Type", BodyFormat.MSGPACK.value)], msgpack_error_body(message)
    return [("Content-Type", BodyFormat.JSON.value)], error_body(message)


def digest_of(data: bytes | memoryview) -> str:
    """The digest of a body: 32 hexadecimal digits of its BLAKE2b hash."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
