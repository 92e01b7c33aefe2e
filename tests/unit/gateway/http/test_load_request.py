"""The body of a load request: a configuration, files, and Triton's texts for malformed bodies."""

import base64
import json
from typing import Any

import pytest

from weir.gateway.http.load_request import load_parameters, read_load, read_parameters
from weir.schemas.core.errors import WeirError


def body(parameters: Any) -> bytes:
    return json.dumps({"parameters": parameters}).encode()


def test_a_configuration_and_files() -> None:
    content = bytes(range(256))
    request = body({"config": "{}", "file:1/model.onnx": base64.b64encode(content).decode(), "file:a b": ""})
    expected = "{}", {"1/model.onnx": content, "a b": b""}
    assert load_parameters(request) == expected
    parts = [memoryview(part) for part in read_load([memoryview(request)])]
    assert read_parameters(parts) == expected


@pytest.mark.parametrize("request_body", [b"{}", b"[]", b'"text"', b'{"other": 1}'])
def test_without_parameters_the_model_is_loaded_as_it_is(request_body: bytes) -> None:
    assert load_parameters(request_body) == (None, {})


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ([], "attempt to get members for non-object"),
        ({"config": 1}, "attempt to access JSON non-string as string"),
        ({"other": "x"}, "unexpected error on creating Triton parameter"),
        ({"file:a": "?"}, "load parameter 'file:a' is not base64"),
    ],
)
def test_malformed_parameters_are_rejected(parameters: Any, text: str) -> None:
    with pytest.raises(WeirError, match=text):
        load_parameters(body(parameters))
