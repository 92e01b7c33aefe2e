"""A response with a header that came before is encoded as one whose header is packed anew."""

from __future__ import annotations

from itertools import product

import pytest

from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import JSON
from weir.calls.inference.response_templates import MAX_HEADERS, ResponseTemplates
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import Tensor

SERVED = ServedModel("m", ModelConfig(name="m"), [1], {})
FLOATS = b"\x00\x00\x80\x3f"  # 1.0

REQUESTS = {
    "binary outputs": InferRequest("m", binary_default=True),
    "JSON outputs": InferRequest("m"),
    "with an id": InferRequest("m", id="one", binary_default=True),
    "named outputs": InferRequest("m", outputs=[RequestedOutput("A", True), RequestedOutput("B", True)]),
    "one of two outputs": InferRequest("m", outputs=[RequestedOutput("B", True)]),
    "a binary and a JSON output": InferRequest("m", outputs=[RequestedOutput("A", True), RequestedOutput("B", False)]),
    "classes": InferRequest("m", outputs=[RequestedOutput("A", True, class_count=1)]),
}


def responses() -> list[InferResponse]:
    found = []
    for rows, version, parameters in product((1, 3, 0), ("1", "2"), (None, {"p": 1})):
        for fill in (FLOATS, b"\x00\x00\x00\x40"):
            outputs = [Tensor(name, "FP32", [rows, 1], fill * rows) for name in "AB"]
            found += [
                InferResponse("m", version, "", outputs[:1], parameters),
                InferResponse("m", version, "", outputs, parameters),
            ]
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_a_known_header_changes_nothing(name: str) -> None:
    request, templates = REQUESTS[name], ResponseTemplates(REQUESTS[name])
    for response in responses() * 2:
        found, expected = (codec.write(SERVED, request, response, ()) for codec in (templates, JSON))
        assert b"".join(found[0]) == b"".join(expected[0])
        assert found[1:] == expected[1:]


def test_many_shapes_leave_no_more_than_a_few_headers() -> None:
    templates = ResponseTemplates(REQUESTS["binary outputs"])
    for rows in range(1, 10 * MAX_HEADERS):
        response = InferResponse("m", "1", "", [Tensor("A", "FP32", [rows, 1], FLOATS * rows)])
        templates.write(SERVED, REQUESTS["binary outputs"], response, ())
        assert len(templates._known) <= MAX_HEADERS
