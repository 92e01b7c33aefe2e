"""Bodies of messages in their three forms, both ways."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import (
    HEADER_LENGTH,
    BodyFormat,
    Document,
    ReadRules,
    codec_of,
    digest_of,
    encode_error,
    format_of,
    message_of,
)
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.regions import no_regions

INPUT = {"name": "IN", "data_type": "TYPE_INT8", "dims": [-1]}
CONFIG = ModelConfig.model_validate({"name": "m", "max_batch_size": 4, "input": [INPUT]})
SERVED = ServedModel("m", CONFIG, [1], {})
ROW: dict[str, Any] = {"name": "IN", "datatype": "INT8", "shape": [1, 3]}
CONTENT = b"\1\2\3"
HEADER = orjson.dumps(
    {"inputs": [ROW | {"parameters": {"binary_data_size": 3}}], "parameters": {"binary_data_output": True}}
)
FORMS = {
    BodyFormat.JSON: ({}, orjson.dumps({"inputs": [ROW | {"data": [1, 2, 3]}]})),
    BodyFormat.BINARY: ({"inference-header-content-length": str(len(HEADER))}, HEADER + CONTENT),
    BodyFormat.MSGPACK: ({"content-type": "application/msgpack"}, msgpack.packb({"inputs": [ROW | {"data": CONTENT}]})),
}


def parsed(headers: dict[str, str], body: bytes) -> tuple[InferRequest, BodyFormat]:
    body_format = format_of(headers)
    document = Document(SERVED, "m", "2", body, headers.get(HEADER_LENGTH))
    return codec_of(body_format).read(document, (), ReadRules(DEFAULT_LIMITS, no_regions))[1], body_format


@pytest.mark.parametrize("body_format", BodyFormat)
def test_a_request_is_the_same_in_each_form_and_answered_in_it(body_format: BodyFormat) -> None:
    request, found = parsed(*FORMS[body_format])
    assert found is body_format
    [tensor] = request.inputs
    assert (request.model_version, tensor.shape, bytes(tensor.data)) == ("2", [1, 3], CONTENT)
    response = InferResponse("m", "2", "", [Tensor("OUT", "INT8", [1, 3], CONTENT)], None)
    headers, body = message_of(codec_of(found).write(SERVED, request, response, ()), found)
    named = {name.lower(): value for name, value in headers}
    assert named["content-type"] == body_format.value
    row = {"name": "OUT", "datatype": "INT8", "shape": [1, 3]}
    if body_format is BodyFormat.MSGPACK:
        assert msgpack.unpackb(body)["outputs"] == [row | {"data": CONTENT}]
    elif body_format is BodyFormat.JSON:
        assert orjson.loads(body)["outputs"] == [row | {"data": [1, 2, 3]}]
        assert list(named) == ["content-type"]
    else:
        length = int(named["inference-header-content-length"])
        assert orjson.loads(body[:length])["outputs"] == [row | {"parameters": {"binary_data_size": 3}}]
        assert body[length:] == CONTENT


@pytest.mark.parametrize(
    ("content_type", "body_format"),
    [
        ("application/msgpack", BodyFormat.MSGPACK),
        ("Application/X-MsgPack; charset=binary", BodyFormat.MSGPACK),
        (" application/vnd.msgpack ", BodyFormat.MSGPACK),
        ("application/json", BodyFormat.JSON),
        ("text/plain", BodyFormat.JSON),
        ("", BodyFormat.JSON),
        ("application/msgpackage", BodyFormat.JSON),
    ],
)
def test_forms_by_content_type(content_type: str, body_format: BodyFormat) -> None:
    assert format_of({"content-type": content_type}) is body_format


def test_a_body_that_is_the_content_of_the_only_input() -> None:
    request, body_format = parsed({"inference-header-content-length": "0"}, CONTENT)
    assert (request.inputs[0].shape, bytes(request.inputs[0].data)) == ([1, 3], CONTENT)
    assert (body_format, request.binary_default) == (BodyFormat.BINARY, True)


@pytest.mark.parametrize(
    ("headers", "body", "code", "text"),
    [
        ({}, b"{", ErrorCode.INTERNAL, "failed to parse the request JSON buffer"),
        ({}, b"", ErrorCode.INTERNAL, "failed to parse the request JSON buffer"),
        ({"inference-header-content-length": "x"}, b"{}", ErrorCode.INVALID_ARG, "Unable to parse Inference-Header"),
        ({"inference-header-content-length": "9"}, b"{}", ErrorCode.INVALID_ARG, "inference header size should be in"),
        ({"content-type": "application/msgpack"}, b"{}", ErrorCode.INVALID_ARG, "failed to parse the request msgpack"),
        (
            {"content-type": "application/msgpack", "inference-header-content-length": "1"},
            b"\x80",
            ErrorCode.INVALID_ARG,
            "a msgpack body has no Inference-Header-Content-Length",
        ),
    ],
)
def test_rejected_requests(headers: dict[str, str], body: bytes, code: ErrorCode, text: str) -> None:
    with pytest.raises(WeirError) as refused:
        parsed(headers, body)
    assert refused.value.code is code
    assert refused.value.message.startswith(text)


@pytest.mark.parametrize("body_format", BodyFormat)
def test_an_error_of_any_length_is_small(body_format: BodyFormat) -> None:
    for text in ("why", "x" * 2_000_000, "\ud800" * 100_000):
        [(name, media_type)], body = encode_error(internal(text), body_format)
        is_msgpack = body_format is BodyFormat.MSGPACK
        assert (name, media_type) == ("Content-Type", "application/msgpack" if is_msgpack else "application/json")
        told = msgpack.unpackb(body) if is_msgpack else orjson.loads(body)
        assert told["error"][0] == text.encode(errors="replace").decode()[0]
        assert len(body) < 64 << 10


def test_a_digest_tells_bodies_apart() -> None:
    assert digest_of(b"a") == digest_of(memoryview(b"a")) != digest_of(b"b")
    assert len(digest_of(b"")) == 32


@settings(deadline=None, database=None, max_examples=300)
@given(
    st.binary(max_size=40) | st.sampled_from([body for _, body in FORMS.values()]),
    st.none() | st.integers(-2, 50).map(str) | st.text(max_size=3),
    st.sampled_from(["", "application/msgpack", "application/json"]),
)
def test_any_bytes_with_any_headers_are_read_or_refused(body: bytes, length: str | None, content_type: str) -> None:
    headers = {"content-type": content_type} | ({} if length is None else {"inference-header-content-length": length})
    with suppress(WeirError):
        parsed(headers, body)
