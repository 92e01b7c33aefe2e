"""Microseconds a call of the KServe v2 codec: `python -m benchmarks.codec` prints one line per case.

Each figure is the best of several rounds, model and network excluded.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import orjson

from schemas.kserve_request import parse_infer_request
from schemas.kserve_response import build_infer_response
from schemas.model_config import ModelConfig
from schemas.normalizer import RequestNormalizer
from schemas.requests import InferRequest, InferResponse, RequestedOutput
from schemas.tensors import Tensor

ROUNDS = 7


def microseconds(call: Callable[[], object], calls: int = 20_000) -> float:
    """The fastest round's time for one `call`."""
    return min(timeit.repeat(call, number=calls, repeat=ROUNDS)) / calls * 1e6


def binary_body(elements: int) -> tuple[bytes, int]:
    """A request of one binary FP32 tensor as tritonclient writes it, and the length of its JSON."""
    tensor = {
        "name": "INPUT0",
        "shape": [1, elements],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 4 * elements},
    }
    header = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return header + bytes(4 * elements), len(header)


def json_body(elements: int) -> bytes:
    """The same request as JSON only."""
    tensor = {"name": "INPUT0", "shape": [1, elements], "datatype": "FP32", "data": [0.5] * elements}
    return orjson.dumps({"inputs": [tensor]})


def config(dim: int) -> ModelConfig:
    """A batching model of one FP32 input and output."""
    return ModelConfig.model_validate(
        {
            "name": "model",
            "max_batch_size": 64,
            "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [dim]}],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [dim]}],
        }
    )


def response(elements: int) -> InferResponse:
    """An answer of one FP32 tensor."""
    output = Tensor("OUTPUT0", "FP32", [1, elements], bytes(4 * elements))
    return InferResponse("model", "1", outputs=[output])


def main() -> None:
    """Print the figures."""
    body, header_length = binary_body(16)
    large_body, large_header_length = binary_body(150_528)
    plain, large_plain = json_body(16), json_body(1000)
    request = parse_infer_request("model", "", body, header_length)
    fixed, variable = RequestNormalizer(config(16)), RequestNormalizer(config(-1))
    as_json = InferRequest("model")
    listed = InferRequest("model", outputs=[RequestedOutput("OUTPUT0", binary=True)])
    small, thousand = response(16), response(1000)
    cases: list[tuple[str, Callable[[], object], int]] = [
        ("parse, one 64 B binary tensor", lambda: parse_infer_request("model", "", body, header_length), 20_000),
        (
            "parse, one 602 KB binary tensor",
            lambda: parse_infer_request("model", "", large_body, large_header_length),
            20_000,
        ),
        ("parse, 16 JSON floats", lambda: parse_infer_request("model", "", plain, None), 20_000),
        ("parse, 1000 JSON floats", lambda: parse_infer_request("model", "", large_plain, None), 2_000),
        ("normalize, fixed shape", lambda: fixed.normalize(request), 20_000),
        ("normalize, variable shape", lambda: variable.normalize(request), 20_000),
        ("build, one 64 B binary output", lambda: build_infer_response(request, small), 20_000),
        ("build, the same, listed", lambda: build_infer_response(listed, small), 20_000),
        ("build, 16 JSON floats", lambda: build_infer_response(as_json, small), 20_000),
        ("build, 1000 JSON floats", lambda: build_infer_response(as_json, thousand), 2_000),
    ]
    for name, call, calls in cases:
        print(f"{name:34} {microseconds(call, calls):8.2f} us")


if __name__ == "__main__":
    main()
