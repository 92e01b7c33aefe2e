"""The needs that models declare, and their form in workers' records."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from weir.repository.config_text import parse_config
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import ModelNeeds, ParameterError, ResourceAmounts, needs_of, read_resource
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage
from weir.schemas.wire.registry import ModelOffer, WorkerRecord


def declaring(**parameters: str) -> ModelConfig:
    text = "\n".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items())
    return parse_config(text.encode(), "config.pbtxt")


def test_declared_needs() -> None:
    config = declaring(weir_memory_bytes="123", weir_requires=" a100=2, licence ", weir_workers="3")
    assert needs_of(config) == ModelNeeds(ResourceAmounts(123, {"a100": 2, "licence": 1}), 3)
    assert needs_of(declaring(weir_workers="1")) == ModelNeeds(workers=1)
    assert needs_of(declaring(something="else", weir_checkpoint_every="3")) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("weir_memory_bytes", "1 GB"),
        ("weir_memory_bytes", "-1"),
        ("weir_memory_bytes", "9" * 30),
        ("weir_workers", "0"),
        ("weir_workers", "all"),
        ("weir_requires", "a=b"),
        ("weir_requires", "a=1,a=2"),
        ("weir_requires", "=1"),
        ("weir_requires", ",".join(f"r{number}" for number in range(65))),
    ],
)
def test_an_invalid_parameter_is_named(name: str, text: str) -> None:
    with pytest.raises(ParameterError, match=f"parameter '{name}'"):
        needs_of(declaring(**{name: text}))


def test_a_resource_is_a_name_and_a_number() -> None:
    assert (read_resource("a100"), read_resource("a100=0")) == (("a100", 1), ("a100", 0))
    for text in ("", "=", "a=", "a=1.5", "a b=1"):
        with pytest.raises(ValueError, match="resource"):
            read_resource(text)


RECORD = WorkerRecord(
    "w",
    1,
    capacity=ResourceAmounts(5, {"gpu": 1}),
    offers={"m": ModelOffer(ModelNeeds(ResourceAmounts(1, {"gpu": 1}), 2), 7)},
    leaving=True,
)


def test_a_worker_record_survives_packing() -> None:
    assert WorkerRecord.unpack(RECORD.pack()) == RECORD
    assert WorkerRecord.unpack(WorkerRecord("w", 1).pack()) == WorkerRecord("w", 1)


@pytest.mark.parametrize(
    "garbage",
    [
        {"capacity": None},
        {"capacity": {"memory_bytes": -1, "resources": {}}},
        {"capacity": {"memory_bytes": 1.5, "resources": {}}},
        {"capacity": {"memory_bytes": 1, "resources": {"a": "b"}}},
        {"capacity": {"memory_bytes": 1, "resources": {str(number): 1 for number in range(65)}}},
        {"offers": []},
        {"offers": {"m": None}},
        {"offers": {"m": {"needs": {"takes": {}, "workers": -1}, "revision": 0}}},
        {"offers": {"m": {"needs": {"takes": {}, "workers": 0}, "revision": "x"}}},
        {"leaving": 1},
    ],
)
def test_malformed_worker_records(garbage: dict[str, Any]) -> None:
    data = msgpack.packb([WIRE_VERSION, {**msgspec.to_builtins(RECORD), **garbage}])
    with pytest.raises(MalformedMessage):
        WorkerRecord.unpack(data)
