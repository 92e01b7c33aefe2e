import typing

import msgpack
import pytest
from pydantic import BaseModel, ValidationError
from tritonclient.grpc import model_config_pb2

from weir.schemas.config.model_config import DynamicBatching, InstanceGroup, ModelConfig, ModelInput, VersionPolicy


def _message_class(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_message_class, typing.get_args(annotation))), None)


def _mirrored(cls, descriptor, seen):
    """Every (class, descriptor) pair reachable from `cls`."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    yield cls, descriptor
    for name, field in cls.model_fields.items():
        message = descriptor.fields_by_name[field.alias or name].message_type
        if message is not None and message.GetOptions().map_entry:
            message = message.fields_by_name["value"].message_type
        nested = _message_class(field.annotation)
        assert (nested is None) == (message is None), f"{cls.__name__}.{name}"
        if nested is not None:
            yield from _mirrored(nested, message, seen)


PAIRS = list(_mirrored(ModelConfig, model_config_pb2.ModelConfig.DESCRIPTOR, set()))


@pytest.mark.parametrize("cls, descriptor", PAIRS, ids=[cls.__name__ for cls, _ in PAIRS])
def test_mirrors_the_proto_field_by_field(cls, descriptor):
    fields = {field.alias or name: field for name, field in cls.model_fields.items()}
    assert set(fields) == set(descriptor.fields_by_name)
    for name, field in fields.items():
        proto = descriptor.fields_by_name[name]
        default = field.get_default(call_default_factory=True)
        if proto.enum_type is not None:
            assert list(typing.get_args(field.annotation)) == [value.name for value in proto.enum_type.values]
            assert default == proto.enum_type.values_by_number[0].name
        elif proto.is_repeated:
            assert not default
            assert isinstance(default, list | dict)
        elif proto.has_presence:
            assert default is None
        else:
            assert default == proto.default_value


def test_travels_in_msgpack_without_its_defaults():
    config = ModelConfig(
        name="net",
        max_batch_size=8,
        input=[ModelInput(name="x", data_type="TYPE_FP32", dims=[3, -1])],
        dynamic_batching=DynamicBatching(priority_levels=2, priority_queue_policy={2: {"max_queue_size": 5}}),
        instance_group=[InstanceGroup(rate_limiter={"resources": [{"name": "r", "global": True, "count": 1}]})],
    )
    packed = msgpack.packb(config.model_dump(exclude_defaults=True))
    assert len(packed) < 250
    assert ModelConfig.model_validate(msgpack.unpackb(packed)) == config


def test_an_empty_message_is_not_an_absent_one():
    config = ModelConfig(dynamic_batching={}, version_policy={"all": {}})
    dumped = config.model_dump(exclude_defaults=True)
    assert dumped == {"dynamic_batching": {}, "version_policy": {"all": {}}}
    assert ModelConfig.model_validate(dumped) == config


@pytest.mark.parametrize(
    "fields",
    [
        {"dynamic_batching": {}, "sequence_batching": {}},
        {"version_policy": {"all": {}, "latest": {}}},
        {"sequence_batching": {"direct": {}, "oldest": {}}},
        {"sequence_batching": {"state": [{"initial_state": [{"zero_data": True, "data_file": "x"}]}]}},
        {"model_warmup": [{"inputs": {"x": {"zero_data": True, "random_data": False}}}]},
        {"max_batch": 3},
        {"max_batch_size": 2**31},
        {"input": [{"data_type": "FP32"}]},
    ],
)
def test_rejects_values_that_the_proto_cannot_hold(fields):
    with pytest.raises(ValidationError):
        ModelConfig.model_validate(fields)


def test_is_immutable_and_replaced_as_a_whole():
    config = ModelConfig(name="net", input=[ModelInput(name="x")])
    with pytest.raises(ValidationError):
        config.name = "other"
    assert set(config.input_by_name) == {"x"}
    other = config.replace(input=[ModelInput(name="y")])
    assert set(other.input_by_name) == {"y"}
    assert other.name == "net"
    assert config.input[0].name == "x"
    with pytest.raises(ValidationError):
        config.replace(max_batch_size="many")


def test_derived_properties():
    config = ModelConfig(
        input=[ModelInput(name="x", optional=True)],
        output=[{"name": "y"}],
        model_transaction_policy={"decoupled": True},
        response_cache={"enable": True},
        parameters={"threads": {"string_value": "3"}},
    )
    assert config.is_decoupled
    assert config.has_optional_inputs
    assert config.caches_responses
    assert config.output_by_name["y"] is config.output[0]
    assert config.parameter("threads") == "3"
    assert config.parameter("absent", "1") == "1"
    plain = ModelConfig()
    for answer in (plain.is_decoupled, plain.has_optional_inputs, plain.caches_responses, plain.is_ensemble):
        assert answer is False
    assert ModelConfig(platform="ensemble").is_ensemble
    assert VersionPolicy(all={}).latest is None
