"""Invalid gRPC requests for `tests/compat/grpc/test_infer.py`, with the code and text of Triton 2.51."""

from typing import Any

Fields = dict[str, Any]
INPUT = {"name": "IN", "datatype": "FP32", "shape": [1, 2]}
SHARED = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8}}
RAW = {"raw_input_contents": [b"\0" * 8]}
UNKNOWN_ID = "[request id: <id_unknown>] "


def given(**changes: Any) -> Fields:
    return {"model_name": "identity_FP32", "inputs": [INPUT], **RAW, **changes}


def with_input(**changes: Any) -> Fields:
    return given(inputs=[{**INPUT, **changes}])


def typed(raw: bool = False, **contents: list[Any]) -> Fields:
    fields = with_input(contents=contents)
    return fields if raw else {**fields, "raw_input_contents": []}


def with_parameter(name: str, **value: Any) -> Fields:
    return given(parameters={name: value})


def with_output(**parameters: Any) -> Fields:
    return given(outputs=[{"name": "OUT", "parameters": parameters}])


def two(model: str, *names: str, **changes: Any) -> Fields:
    rows = [{**INPUT, "name": name, **changes.get(name, {})} for name in names]
    return {"model_name": model, "inputs": rows, "raw_input_contents": [b"\0" * 8] * len(names)}


def explicit(got: str, want: str = "FP32") -> str:
    return (
        f"unexpected explicit tensor data for input tensor 'IN' for model 'identity_FP32' of type '{got}', expected "
        f"datatype '{want}'"
    )


def wrong_type(name: str, wanted: str) -> str:
    return f"invalid value type for '{name}' parameter, expected {wanted}."


TWICE = (
    "unexpected explicit tensor data for input tensor 'IN' for model 'identity_FP32', binary data was already supplied."
)
MIXED = "contents field must not be specified when using raw_input_contents for 'IN' for model 'identity_FP32'"
NO_DATA = "unable to find data for input tensor 'IN' for model 'identity_FP32' in request."
RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
    "'triton_' are allowed: triton_enable_empty_final_response"
)
OWN = "int64_param, bool_param, or string_param"

REFUSED: dict[str, tuple[Fields, str, str]] = {
    # Models
    "unknown model": (given(model_name="no"), "NOT_FOUND", "Request for unknown model: 'no' is not found"),
    "no name": (given(model_name=""), "NOT_FOUND", "Request for unknown model: '' is not found"),
    "no version that could be loaded": (
        given(model_name="unloadable"),
        "NOT_FOUND",
        "Request for unknown model: 'unloadable' has no available versions: Internal: RuntimeError: not today",
    ),
    # Contents
    "typed and raw": (typed(raw=True, fp32_contents=[1, 2]), "INVALID_ARGUMENT", MIXED),
    "empty contents and raw": (typed(raw=True), "INVALID_ARGUMENT", MIXED),
    "no data": (given(raw_input_contents=[]), "INVALID_ARGUMENT", NO_DATA),
    "no data for nothing": ({**with_input(shape=[1, 0]), "raw_input_contents": []}, "INVALID_ARGUMENT", NO_DATA),
    "wrong field": (typed(int_contents=[1, 2]), "INVALID_ARGUMENT", explicit("INT32")),
    "strings for numbers": (typed(bytes_contents=[b"a"]), "INVALID_ARGUMENT", explicit("BYTES")),
    "two fields, wrong first": (typed(int_contents=[1], fp32_contents=[1]), "INVALID_ARGUMENT", explicit("INT32")),
    "two fields, right first": (typed(fp32_contents=[1], fp64_contents=[1]), "INVALID_ARGUMENT", TWICE),
    "typed half precision": (
        {**with_input(datatype="FP16", contents={"fp32_contents": [1, 2]}), "raw_input_contents": []},
        "INVALID_ARGUMENT",
        explicit("FP32", "FP16"),
    ),
    "typed contents of no type": (
        {**with_input(datatype="NO", contents={"fp32_contents": [1, 2]}), "raw_input_contents": []},
        "INVALID_ARGUMENT",
        explicit("FP32", "<invalid>"),
    ),
    "too few elements": (
        typed(fp32_contents=[1]),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}input byte size mismatch for input 'IN' for model 'identity_FP32'. Expected 8, got 4",
    ),
    "empty contents": (
        typed(),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}input byte size mismatch for input 'IN' for model 'identity_FP32'. Expected 8, got 0",
    ),
    "shared memory and content": (
        {**with_input(parameters=SHARED, contents={"fp32_contents": [1]}), "raw_input_contents": []},
        "INVALID_ARGUMENT",
        "unexpected 'content' provided when using shared memory for input tensor 'IN' for model 'identity_FP32'",
    ),
    # Inputs
    "too few inputs": (
        two("two", "A"),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['A'], but missing required "
        "input(s) ['B']. Please provide all required input(s).",
    ),
    "no inputs": (
        {"model_name": "two", "id": "7"},
        "INVALID_ARGUMENT",
        "[request id: 7] expected 2 inputs but got 0 inputs for model 'two'. Got input(s) [], but missing required "
        "input(s) ['A','B']. Please provide all required input(s).",
    ),
    "too few of those that are required": (
        two("some_optional", "A"),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}expected number of inputs between 2 and 3 but got 1 inputs for model 'some_optional'. Got "
        "input(s) ['A'], but missing required input(s) ['B']. Please provide all required input(s).",
    ),
    "unknown input": (
        two("two", "A", "X"),
        "INVALID_ARGUMENT",
        "unexpected inference input 'X' for model 'two'",
    ),
    "input twice": (two("two", "A", "A"), "INVALID_ARGUMENT", f"{UNKNOWN_ID}input 'A' already exists in request"),
    "input twice, before data": (
        {**two("two", "A", "A"), "raw_input_contents": []},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}input 'A' already exists in request",
    ),
    "wrong datatype": (
        with_input(datatype="INT32"),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}inference input 'IN' data-type is 'INT32', but model 'identity_FP32' expects 'FP32'",
    ),
    "no datatype": (
        with_input(datatype=""),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}inference input 'IN' data-type is '<invalid>', but model 'identity_FP32' expects 'FP32'",
    ),
    "unspecified shape": (
        with_input(shape=[1, -1]),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}All input dimensions should be specified for input 'IN' for model 'identity_FP32', got [1,-1]",
    ),
    "no shape": (
        with_input(shape=[]),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}input 'IN' has no shape but model requires batch dimension for 'identity_FP32'",
    ),
    "batches that differ": (
        {**two("two", "A", "B", B={"shape": [2, 2]}), "raw_input_contents": [b"\0" * 8, b"\0" * 16]},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}input 'A' batch size does not match other inputs for 'two'",
    ),
    "batch too large": (
        {**with_input(shape=[9, 1]), "raw_input_contents": [b"\0" * 36]},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}inference request batch-size must be <= 8 for 'identity_FP32'",
    ),
    "batch of nothing": (
        {**with_input(shape=[0, 2]), "raw_input_contents": [b""]},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}input byte size mismatch for input 'IN' for model 'identity_FP32'. Expected 8, got 0",
    ),
    "wrong size": (
        given(id="7", raw_input_contents=[b"1234"]),
        "INVALID_ARGUMENT",
        "[request id: 7] input byte size mismatch for input 'IN' for model 'identity_FP32'. Expected 8, got 4",
    ),
    "too few strings": (
        {**with_input(datatype="BYTES"), "model_name": "identity_BYTES", "raw_input_contents": [b"\1\0\0\0a"]},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}expected 2 string elements for inference input 'IN' for model 'identity_BYTES', got 1",
    ),
    "too many strings": (
        {**with_input(datatype="BYTES"), "model_name": "identity_BYTES", "raw_input_contents": [b"\1\0\0\0a" * 3]},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}unexpected number of string elements 3 for inference input 'IN' for model 'identity_BYTES', "
        "expecting 2",
    ),
    "half a string": (
        {**with_input(datatype="BYTES"), "model_name": "identity_BYTES", "raw_input_contents": [b"\1\0\0\0a\1\0"]},
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}incomplete string length indicator for inference input 'IN' for model 'identity_BYTES', "
        "expecting 4 bytes but only 2 bytes available. Please make sure the string length indicator is in one buffer.",
    ),
    # Parameters
    **{
        f"{name} as {kind}": (with_parameter(name, **{kind: value}), "INVALID_ARGUMENT", wrong_type(name, wanted))
        for name, wanted, allowed in [
            ("sequence_id", "int64_param or string_param", ["int64_param", "string_param"]),
            ("sequence_start", "bool_param", ["bool_param"]),
            ("sequence_end", "bool_param", ["bool_param"]),
            ("priority", "int64_param or uint64_param", ["int64_param", "uint64_param"]),
            ("timeout", "int64_param", ["int64_param"]),
            ("triton_enable_empty_final_response", "bool_param", ["bool_param"]),
            ("mine", OWN, ["bool_param", "int64_param", "string_param", "double_param"]),
        ]
        for kind, value in [
            ("bool_param", True),
            ("int64_param", 3),
            ("string_param", "s"),
            ("double_param", 1.5),
            ("uint64_param", 7),
        ]
        if kind not in allowed
    },
    "priority below nothing": (
        with_parameter("priority", int64_param=-1),
        "INVALID_ARGUMENT",
        "invalid value for 'priority', expected value >= 0.",
    ),
    "parameter without a value": (with_parameter("mine"), "INVALID_ARGUMENT", wrong_type("mine", OWN)),
    "reserved name": (with_parameter("triton_x", bool_param=True), "INVALID_ARGUMENT", RESERVED),
    "the servers own name": (with_parameter("triton_final_response", bool_param=True), "INVALID_ARGUMENT", RESERVED),
    # Outputs
    "unknown output": (
        given(outputs=[{"name": "X"}]),
        "INVALID_ARGUMENT",
        "unexpected inference output 'X' for model 'identity_FP32'",
    ),
    "output twice": (
        given(outputs=[{"name": "OUT"}] * 2),
        "INVALID_ARGUMENT",
        f"{UNKNOWN_ID}output 'OUT' already exists in request",
    ),
    **{
        f"classification as {kind}": (
            with_output(classification={kind: value}),
            "INVALID_ARGUMENT",
            "invalid value type for 'classification' parameter, expected int64_param",
        )
        for kind, value in [("bool_param", True), ("string_param", "2"), ("uint64_param", 2)]
    },
    "no classes": (
        with_output(classification={"int64_param": 0}),
        "INVALID_ARGUMENT",
        "invalid value for 'classification' parameter, expected >= 0",
    ),
    "classes in shared memory": (
        with_output(classification={"int64_param": 1}, **SHARED),
        "INVALID_ARGUMENT",
        "output can't set both 'shared_memory_region' and 'classification'",
    ),
    # Which of two errors is told
    "a parameter before data": (
        {**with_parameter("priority", bool_param=True), "raw_input_contents": []},
        "INVALID_ARGUMENT",
        wrong_type("priority", "int64_param or uint64_param"),
    ),
    "data before classes": (
        {**with_output(classification={"int64_param": 0}), "raw_input_contents": []},
        "INVALID_ARGUMENT",
        NO_DATA,
    ),
    "the model before a parameter": (
        given(model_name="no", parameters={"priority": {"bool_param": True}}),
        "NOT_FOUND",
        "Request for unknown model: 'no' is not found",
    ),
    # Answers of models
    "a model's error": (
        {
            "model_name": "faulty",
            "inputs": [
                {"name": "WHAT", "datatype": "BYTES", "shape": [1, 1], "contents": {"bytes_contents": [b"error"]}}
            ],
        },
        "NOT_FOUND",
        "as you asked",
    ),
}
