import json

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.repository.config_text import (
    config_from_dict,
    config_from_json,
    config_from_message,
    config_to_json,
    config_to_message,
    config_to_text,
    parse_config,
)
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.kserve.triton_messages import model_config

FILE = "net/config.pbtxt"

# (what is wrong, text, line, field)
BROKEN = [
    ("an unknown field", 'nam: "net"', 1, "nam"),
    ("an unknown field deeper", 'parameters: {\n key: "x"\n value: {\n  string_valu: "1"\n }\n}', 4, "string_valu"),
    ("a name without quotes", "# net\nname: net", 2, "name"),
    ("a field without a value", "name:", 1, "name"),
    ("a field without a colon", 'name "net"', 1, "name"),
    ("an open string", 'name: "net', 1, "name"),
    ("a string that is not UTF-8", 'name: "\\xff"', 1, "name"),
    ("a scalar given twice", 'name: "a"\nname: "b"', 2, "name"),
    ("text for a number", 'max_batch_size: "8"', 1, "max_batch_size"),
    ("a fraction for a whole number", "max_batch_size: 8.5", 1, "max_batch_size"),
    ("a number too large", "\n\nmax_batch_size: 99999999999", 3, "max_batch_size"),
    (
        "a negative unsigned number",
        "version_policy { latest { num_versions: -1 } }",
        1,
        "version_policy.latest.num_versions",
    ),
    ("a number for text", 'parameters { key: "a" value { string_value: 3 } }', 1, "parameters.value.string_value"),
    ("text for a message", 'parameters {\n key: "a"\n value: "b"\n}', 3, "parameters.value"),
    ("a number for a message", "input: 3", 1, "input"),
    ("an unknown datatype", 'input [\n {\n  name: "a"\n  data_type: TYPE_FP33\n }\n]', 4, "input[0].data_type"),
    ("a wire name for a datatype", 'input [ { name: "a" },\n { name: "b" data_type: FP32 } ]', 2, "input[1].data_type"),
    ("a datatype without a name", "output {\n data_type: 77\n}", 2, "output[0].data_type"),
    ("an unknown kind", "instance_group [\n { kind: KIND_TPU }\n]", 2, "instance_group[0].kind"),
    ("not a truth value", "input {}\ninput { optional: maybe }", 2, "input[1].optional"),
    ("a word among numbers", "input {\n dims: [ 1,\n  x ]\n}", 3, "input[0].dims"),
    ("a list that never closes", "dynamic_batching {\n preferred_batch_size: [ 4, 8\n}", 3, "preferred_batch_size"),
    ("a message that never closes", 'input {\n name: "a"\n', 2, "input[0].name"),
    ("a list of messages that never closes", 'input [ {\n name: "a"\n}', 3, "input[0].name"),
    ("one brace too many", 'input {\n name: "a"\n}\n}', 4, "input[0].name"),
    ("the wrong bracket", 'input <\n name: "a"\n}', 3, "input[0].name"),
    ("two schedulers", "dynamic_batching {}\nsequence_batching {}", 2, "sequence_batching"),
    ("two version policies", "version_policy {\n all {}\n latest {}\n}", 3, "version_policy.latest"),
    ("two strategies", "sequence_batching {\n direct {}\n oldest {}\n}", 3, "sequence_batching.oldest"),
    ("an extension", '[a.b]: 3\nname: "net"', 1, "ModelConfig"),
    ("no field at all", "{", 1, "ModelConfig"),
    ("a NUL", 'name: "net"\n\0', 2, "name"),
    ("JSON", '{\n "name": "net"\n}', 1, "ModelConfig"),
    ("a merge conflict", 'name: "net"\n<<<<<<< HEAD\nmax_batch_size: 8', 2, ""),
]


@pytest.mark.parametrize("text, line, field", [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_text_names_file_line_and_field(text, line, field):
    with pytest.raises(WeirError) as caught:
        parse_config(text.encode(), FILE)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert f"{FILE}:{line}" in caught.value.message
    assert f"{field}'" in caught.value.message


def test_bytes_that_are_not_text_name_their_line():
    with pytest.raises(
        WeirError, match=r"^INVALID_ARG: net/config.pbtxt:2:8: field 'backend': the file is not UTF-8 text$"
    ):
        parse_config(b'name: "net"\nbackend\xe9: "python"', FILE)


def test_reads_what_triton_reads():
    text = """
        # comment
        name: 'net'  max_batch_size: 8;
        input [ { name: "x" "y", data_type: TYPE_FP32, dims: [ 3, -1 ] } ]
        output < name: "z" data_type: 11 dims: 1 dims: 2 >
        parameters: { key: "a" value: { string_value: "1" } }
        sequence_batching { state { initial_state { zero_data: false } } }
    """
    config = parse_config(b"\xef\xbb\xbf" + text.encode(), FILE)
    assert config.name == "net"
    assert config.input[0].name == "xy"
    assert config.input[0].dims == [3, -1]
    assert config.output[0].data_type == "TYPE_FP32"
    assert config.output[0].dims == [1, 2]
    assert config.parameter("a") == "1"
    assert config.sequence_batching.state[0].initial_state[0].zero_data is False
    assert parse_config(b"", FILE) == ModelConfig()


RANGES = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def values(field):
    """A strategy for one value of a protobuf field, in the form `ModelConfig` takes."""
    if field.message_type is not None:
        return messages(field.message_type)
    if field.enum_type is not None:
        return st.sampled_from([value.name for value in field.enum_type.values])
    if field.type in RANGES:
        return st.integers(*RANGES[field.type])
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXT
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_FLOAT:
        # Six digits are what a float32 keeps of a decimal number.
        return st.integers(-(10**6) + 1, 10**6 - 1).map(lambda number: number / 1000)
    return st.floats(allow_nan=False, allow_infinity=False)


def contents(field):
    """A strategy for all that a field holds: a value, a list or a map."""
    if not field.is_repeated:
        return values(field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(values(entry["key"]), values(entry["value"]), max_size=2)
    return st.lists(values(field), max_size=2)


@st.composite
def messages(draw, descriptor):
    fields = list(descriptor.fields)
    chosen = draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)) if fields else []
    groups = {field.containing_oneof.name if field.containing_oneof else field.name: field for field in chosen}
    return {field.name: draw(contents(field)) for field in groups.values()}


@settings(max_examples=150, deadline=None)
@given(messages(model_config.ModelConfig.DESCRIPTOR))
def test_survives_every_form(fields):
    config = config_from_dict(fields)
    message = config_to_message(config)
    assert message == json_format.ParseDict(fields, model_config.ModelConfig())
    assert config_from_message(message) == config
    assert parse_config(config_to_text(config).encode(), FILE) == config
    assert config_from_json(json.dumps(config_to_json(config))) == config
    assert ModelConfig.model_validate(config.model_dump(exclude_defaults=True)) == config


@settings(max_examples=100, deadline=None)
@given(messages(model_config.ModelConfig.DESCRIPTOR))
def test_json_form_is_protobufs_with_numbers(fields):
    config = config_from_dict(fields)
    by_protobuf = json_format.MessageToDict(
        config_to_message(config), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert _with_text_numbers(config_to_json(config)) == _with_text_numbers(by_protobuf)


def _with_text_numbers(value):
    if isinstance(value, dict):
        return {key: _with_text_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_text_numbers(item) for item in value]
    return value if isinstance(value, bool | float) else str(value)


def test_json_form_prints_defaults_and_numbers():
    config = ModelConfig(name="net", input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [2**40]}])
    form = config_to_json(config)
    assert form["max_batch_size"] == 0
    assert form["input"][0]["dims"] == [2**40]
    assert form["input"][0]["optional"] is False
    assert form["parameters"] == {}
    assert "dynamic_batching" not in form


@pytest.mark.parametrize(
    "text, named",
    [
        ("{", "Expecting property name"),
        ("[]", ""),
        ("3", ""),
        ('{"max_batch": 3}', "max_batch"),
        ('{"max_batch_size": "many"}', "max_batch_size"),
        ('{"max_batch_size": 1, "max_batch_size": 2}', "max_batch_size"),
        ('{"input": [{"data_type": "TYPE_FP33"}]}', "data_type"),
        ('{"input": [{"data_type": 77}]}', "input[0].data_type"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "oneof"),
        ("[" * 100_000, ""),
    ],
)
def test_a_broken_override_is_rejected_with_tritons_text(text, named):
    with pytest.raises(WeirError, match=r"^INVALID_ARG: Invalid config override: ") as caught:
        config_from_json(text)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert named in caught.value.message


def test_override_reads_both_spellings_and_text_numbers():
    config = config_from_json('{"maxBatchSize": 4, "input": [{"name": "x", "dims": ["3", -1]}]}')
    assert config.max_batch_size == 4
    assert config.input[0].dims == [3, -1]


def test_an_invalid_dictionary_names_the_field():
    with pytest.raises(ConfigProblem) as caught:
        config_from_dict({"input": [{"name": "x"}, {"dims": ["many"]}]})
    assert caught.value.field == "input[1].dims[0]"
