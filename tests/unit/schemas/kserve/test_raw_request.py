"""Bodies that are the content of a tensor and nothing else, as a running Triton 2.51 takes them."""

from __future__ import annotations

import pytest

from tests.support.rejections.kserve_bodies import INVALID_ARG
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.kserve.request import parse_raw_request


def config(*inputs: tuple[str, str, list[int]], max_batch_size: int = 0) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "name": "m",
            "max_batch_size": max_batch_size,
            "input": [{"name": n, "data_type": "TYPE_" + t, "dims": d} for n, t, d in inputs],
        }
    )


@pytest.mark.parametrize(
    ("model", "body", "shape", "content"),
    [
        (config(("A", "FP32", [-1])), bytes(8), [2], bytes(8)),
        (config(("A", "FP32", [-1])), b"", [0], b""),
        (config(("A", "INT16", [2, -1, 3]), max_batch_size=4), bytes(24), [1, 2, 2, 3], bytes(24)),
        (config(("A", "UINT8", [3])), b"abc", [3], b"abc"),
        (config(("A", "STRING", [1])), b"hello", [1], b"\5\0\0\0hello"),
        (config(("A", "STRING", [1]), max_batch_size=4), b"", [1, 1], b"\0\0\0\0"),
    ],
)
def test_raw_requests(model: ModelConfig, body: bytes, shape: list[int], content: bytes) -> None:
    request = parse_raw_request("m", "2", body, model)
    [tensor] = request.inputs
    assert (tensor.name, tensor.shape, bytes(tensor.data)) == ("A", shape, content)
    assert (request.model_version, request.binary_default, request.outputs) == ("2", True, [])


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        (
            config(("A", "FP32", [4]), ("B", "FP32", [4])),
            bytes(16),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
        ),
        (
            config(("A", "FP32", [-1, -1])),
            bytes(16),
            "The shape of the raw input 'A' can not be deduced because there are more than one variable-sized "
            "dimension",
        ),
        (config(("A", "STRING", [-1])), b"x", "For BYTE datatype raw input 'A', the model must have input shape [1]"),
        (config(("A", "STRING", [2])), b"x", "For BYTE datatype raw input 'A', the model must have input shape [1]"),
        (
            config(("A", "FP32", [-1])),
            bytes(7),
            "input byte size mismatch for input 'raw_input' for model 'm'. Expected 4, got 7",
        ),
        (
            config(("A", "FP32", [3]), max_batch_size=4),
            bytes(8),
            "input byte size mismatch for input 'raw_input' for model 'm'. Expected 12, got 8",
        ),
    ],
)
def test_raw_requests_that_do_not_fit(model: ModelConfig, body: bytes, text: str) -> None:
    with pytest.raises(WeirError) as caught:
        parse_raw_request("m", "", body, model)
    assert caught.value.code is INVALID_ARG
    assert caught.value.message == f"[request id: <id_unknown>] {text}"


def test_raw_requests_beyond_the_limit() -> None:
    with pytest.raises(WeirError, match=r"^INVALID_ARG: Raw input has a byte_size \(601 bytes\) that exceeds"):
        parse_raw_request("m", "", bytes(601), config(("A", "UINT8", [-1])), RequestLimits(input_size=600))
