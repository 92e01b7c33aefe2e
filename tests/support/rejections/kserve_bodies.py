"""KServe v2 bodies for tests, and the errors for invalid ones."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest
from weir.schemas.kserve.request import parse_infer_request

INTERNAL, INVALID_ARG = ErrorCode.INTERNAL, ErrorCode.INVALID_ARG
IMPOSSIBLE = "invalid shape for input 'A': shape "


def access(field: str, kind: str) -> str:
    return f"Unable to parse '{field}': attempt to access JSON non-{kind} as {kind}"


def absent(field: str) -> str:
    return f"Unable to parse '{field}': attempt to access non-existing object member '{field}'"


def one_input(**members: Any) -> dict[str, Any]:
    return {"name": "A", "datatype": "FP32", "shape": [2]} | members


def parse(document: Any, content: bytes = b"", limits: RequestLimits | None = None) -> InferRequest:
    header = document if isinstance(document, bytes) else orjson.dumps(document)
    return parse_infer_request("m", "", header + content, len(header), limits or RequestLimits())


def parse_input(content: bytes = b"", **members: Any) -> InferRequest:
    return parse({"inputs": [one_input(**members)]}, content)


def parse_data(datatype: str, text: str, shape: str = "[1]") -> bytes:
    body = f'{{"inputs":[{{"name":"A","datatype":"{datatype}","shape":{shape},"data":{text}}}]}}'
    return bytes(parse_infer_request("m", "", body.encode(), None).inputs[0].data)


def refusal(document: Any, content: bytes = b"", limits: RequestLimits | None = None) -> tuple[ErrorCode, str]:
    with pytest.raises(WeirError) as caught:
        parse(document, content, limits)
    return caught.value.code, caught.value.message
