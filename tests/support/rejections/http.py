"""Invalid bodies for model `pair` of `tests/compat/http/test_errors.py`, with the status and the whole text of Triton."""

from __future__ import annotations

import json
from typing import Any

UNKNOWN = "[request id: <id_unknown>] "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
NO_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)


def one(name: str = "A", **changes: Any) -> dict[str, Any]:
    """An input of `pair`; None takes a member away."""
    members = {"name": name, "shape": [1, 4], "datatype": "INT32", "data": [1, 2, 3, 4], **changes}
    return {key: value for key, value in members.items() if value is not None}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def first(**changes: Any) -> bytes:
    """A request whose first input is changed."""
    return body(one(**changes), one("B"))


def with_output(**parameters: Any) -> bytes:
    return body(one(), one("B"), outputs=[{"name": "A_OUT", "parameters": parameters}])


def parse(field: str, kind: str) -> str:
    return f"Unable to parse '{field}': attempt to access JSON non-{kind} as {kind}"


def missing(field: str) -> str:
    return f"Unable to parse '{field}': attempt to access non-existing object member '{field}'"


MALFORMED = "failed to parse the request JSON buffer: "
NOT_THE_SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"

BODIES: dict[str, tuple[bytes, int, str]] = {
    # JSON
    "not JSON": (b"{", 500, MALFORMED + "Missing a name for object member. at 1"),
    "more behind it": (
        b"{} x",
        500,
        MALFORMED + "The document root must not be followed by other values. at 3",
    ),
    "no object": (b"7", 500, missing("inputs")),
    "no inputs": (b"{}", 500, missing("inputs")),
    "inputs no array": (b'{"inputs": {}}', 500, parse("inputs", "array")),
    "id": (body(one(), one("B"), id=7), 500, parse("id", "string")),
    "no name": (first(name=None), 500, missing("name")),
    "name": (first(name=7), 500, parse("name", "string")),
    "no shape": (first(shape=None), 500, missing("shape")),
    "shape": (first(shape=["1", 4]), 500, parse("shape", "unsigned-integer")),
    "negative shape": (first(shape=[-1, 4]), 500, parse("shape", "unsigned-integer")),
    "no datatype": (first(datatype=None), 500, missing("datatype")),
    "data": (first(data="abcd"), 500, parse("data", "array")),
    "floats for integers": (first(data=[1.0, 2, 3, 4]), 500, parse("data", "signed-integer")),
    "too many": (first(data=[1, 2, 3, 4, 5]), 500, NOT_THE_SHAPE),
    "too few": (first(data=[1, 2, 3]), 500, NOT_THE_SHAPE),
    "too deep": (
        first(data=0).replace(b'"data": 0', b'"data":' + b"[" * 101 + b"]" * 101),
        500,
        "JSON nesting depth exceeds maximum allowed limit (100)",
    ),
    # Where content is
    "no content": (first(data=None), 400, NO_SOURCE + "no field is set"),
    "content twice": (
        first(parameters={"binary_data_size": 16}),
        400,
        NO_SOURCE + "set 'data' 'binary_data_size'",
    ),
    "unknown datatype": (first(datatype="INT33"), 400, "invalid datatype for input A"),
    "FP16 as JSON": (
        first(datatype="FP16"),
        400,
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input A",
    ),
    "BF16 as JSON": (
        first(datatype="BF16"),
        400,
        "receiving BF16 data via JSON is not supported. Please use the binary data format for input A",
    ),
    "dimension beyond int64": (
        first(shape=[2**63, 4]),
        400,
        "invalid shape for input 'A': shape [9223372036854775808,4] contains one or more invalid dimensions",
    ),
    "too many elements": (
        first(shape=[2**31, 4]),
        400,
        "invalid shape for input 'A': shape [2147483648,4] causes total element count to exceed maximum size of "
        "2147483647",
    ),
    "byte size overflow": (first(shape=[2**62]), 400, "byte size overflow for input 'A'"),
    "huge JSON": (
        first(shape=[2**25]),
        400,
        "JSON input 'A' has a byte_size (134217728 bytes) that exceeds the maximum allowed value of 67108864 bytes. "
        "Use --http-max-input-size to increase the limit.",
    ),
    "input twice": (first(name="B"), 400, UNKNOWN + "input 'B' already exists in request"),
    # Parameters
    "reserved": (
        body(one(), one("B"), parameters={"triton_x": 1}),
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    "null parameter": (
        body(one(), one("B"), parameters={"x": None}),
        400,
        "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    "priority": (body(one(), one("B"), parameters={"priority": "1"}), 500, parse("priority", "unsigned-integer")),
    "timeout": (body(one(), one("B"), parameters={"timeout": -1}), 500, parse("timeout", "unsigned-integer")),
    "sequence_id": (body(one(), one("B"), parameters={"sequence_id": -1}), 500, parse("sequence_id", "string")),
    "sequence_start": (
        body(one(), one("B"), parameters={"sequence_start": 1}),
        500,
        parse("sequence_start", "boolean"),
    ),
    "sequence_end": (body(one(), one("B"), parameters={"sequence_end": None}), 500, parse("sequence_end", "boolean")),
    "binary_data_output": (
        body(one(), one("B"), parameters={"binary_data_output": 1}),
        500,
        parse("binary_data_output", "boolean"),
    ),
    "long sequence_id": (
        body(one(), one("B"), parameters={"sequence_id": "x" * 129}),
        501,
        "string correlation ID cannot be longer than 128 characters",
    ),
    # Outputs
    "outputs no array": (body(one(), one("B"), outputs=None), 500, parse("outputs", "array")),
    "output without a name": (body(one(), one("B"), outputs=[{}]), 500, missing("name")),
    "binary_data": (with_output(binary_data=1), 500, parse("binary_data", "boolean")),
    "output twice": (
        body(one(), one("B"), outputs=[{"name": "A_OUT"}] * 2),
        400,
        UNKNOWN + "output 'A_OUT' already exists in request",
    ),
    "unknown output": (
        body(one(), one("B"), outputs=[{"name": "Z"}]),
        400,
        "unexpected inference output 'Z' for model 'pair'",
    ),
    "classes into shared memory": (
        with_output(classification=1, shared_memory_region="r"),
        400,
        "Output can't set both 'shared_memory_region' and 'classification'",
    ),
    "binary into shared memory": (
        with_output(binary_data=True, shared_memory_region="r"),
        400,
        "Output can't set both 'shared_memory_region' and 'binary_data'",
    ),
    "negative classes": (
        with_output(classification=-1),
        500,
        "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    # Against the model
    "too few inputs": (
        body(one()),
        400,
        UNKNOWN + "expected 2 inputs but got 1 inputs for model 'pair'. Got input(s) ['A'], but missing required "
        "input(s) ['B']. Please provide all required input(s).",
    ),
    "no inputs at all": (
        body(),
        400,
        UNKNOWN + "expected 2 inputs but got 0 inputs for model 'pair'. Got input(s) [], but missing required "
        "input(s) ['A','B']. Please provide all required input(s).",
    ),
    "named request": (
        body(one(), id="mine"),
        400,
        "[request id: mine] expected 2 inputs but got 1 inputs for model 'pair'. Got input(s) ['A'], but missing "
        "required input(s) ['B']. Please provide all required input(s).",
    ),
    "unknown input": (first(name="C"), 400, "unexpected inference input 'C' for model 'pair'"),
    "wrong datatype": (
        first(datatype="FP32"),
        400,
        UNKNOWN + "inference input 'A' data-type is 'FP32', but model 'pair' expects 'INT32'",
    ),
    "wrong shape": (
        first(shape=[1, 2], data=[1, 2]),
        400,
        UNKNOWN + f"unexpected shape for input 'A' for model 'pair'. Expected [-1,4], got [1,2]. {NOTE}",
    ),
    "no batch dimension": (
        first(shape=[], data=[1]),
        400,
        UNKNOWN + "input 'A' has no shape but model requires batch dimension for 'pair'",
    ),
    "batches that differ": (
        first(shape=[2, 4], data=[1] * 8),
        400,
        UNKNOWN + "input 'A' batch size does not match other inputs for 'pair'",
    ),
    "batch over the limit": (
        body(one(shape=[9, 4], data=[1] * 36), one("B", shape=[9, 4], data=[1] * 36)),
        400,
        UNKNOWN + "inference request batch-size must be <= 8 for 'pair'",
    ),
}
