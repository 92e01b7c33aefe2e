"""Traffic rules: their texts, their JSON, and the parameters of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.config.model_config import ModelConfig, ModelParameter
from weir.schemas.config.parameters import ParameterError
from weir.schemas.config.traffic import MAX_ARMS, TrafficRule, read_rule, read_weights, rule_of, weights_text


@pytest.mark.parametrize("text", ["1=90 2=10", "1=90,2=10", " 2=10 ,  1=90 "])
def test_weights_are_read(text: str) -> None:
    assert TrafficRule(read_weights(text)).weights == {1: 90.0, 2: 10.0}


@given(st.dictionaries(st.integers(1, 2**63 - 1), st.floats(0.001, 1e9), min_size=1, max_size=MAX_ARMS))
def test_weights_are_read_as_they_are_written(weights: dict[int, float]) -> None:
    assert read_weights(weights_text(weights)) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1", "'1' is not VERSION=WEIGHT, as 1=90"),
        ("v1=5", "'v1=5' is not VERSION=WEIGHT, as 1=90"),
        ("0=5", "'0=5' is not VERSION=WEIGHT, as 1=90"),
        ("1=5 1=6", "version 1 has two weights"),
        ("1=much", "'much' is not a weight of version 1: expected a number"),
    ],
)
def test_invalid_weights_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}$"):
        read_weights(text)


@pytest.mark.parametrize(
    ("weights", "sticky", "problem"),
    [
        ({}, "", "at least one version must have a weight above 0"),
        ({1: 0.0}, "", "at least one version must have a weight above 0"),
        ({1: -1.0}, "", "the weight of version 1 must be a number from 0 to 1000000000, got -1.0"),
        ({1: float("nan")}, "", "the weight of version 1 must be a number from 0 to 1000000000, got nan"),
        ({1: float("inf")}, "", "the weight of version 1 must be a number from 0 to 1000000000, got inf"),
        (dict.fromkeys(range(1, 18), 1.0), "", "17 versions have weights; at most 16 may"),
        ({1: 1.0}, "user", "sticky must be header:NAME or parameter:NAME, got 'user'"),
        ({1: 1.0}, "header:", "sticky must be header:NAME or parameter:NAME, got 'header:'"),
        ({1: 1.0}, "header:a b", "sticky must be header:NAME or parameter:NAME, got 'header:a b'"),
    ],
)
def test_an_invalid_rule_is_rejected(weights: dict[int, float], sticky: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}$"):
        TrafficRule(weights, sticky)


def test_a_document_is_read() -> None:
    rule = read_rule({"weights": {"1": 3, "2": 1.0}, "sticky": "header:X-User"})
    assert rule == TrafficRule({1: 3.0, 2: 1.0}, "header:x-user")
    assert (rule.header, rule.parameter, rule.shares) == ("x-user", "", {1: 0.75, 2: 0.25})


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"weights": []},
        {"weights": {"1": "90"}},
        {"weights": {"1": True}},
        {"weights": {"one": 1}},
        {"weights": {"1": 10**400}},
        {"weights": {"1": 1}, "sticky": 5},
        {"weights": {"1": 1}, "stickyness": "header:a"},
    ],
)
def test_a_malformed_document_is_rejected(document: Any) -> None:
    with pytest.raises(ValueError, match=r"weight|sticky|version|JSON"):
        read_rule(document)


def config(**parameters: str) -> ModelConfig:
    found = {name: ModelParameter(string_value=value) for name, value in parameters.items()}
    return ModelConfig(name="m", parameters=found)


def test_the_parameters_of_a_configuration_are_a_rule() -> None:
    assert rule_of(config()) is None
    assert rule_of(config(weir_traffic="1=90 2=10")) == TrafficRule({1: 90, 2: 10})
    both = config(weir_traffic="1=90 2=10", weir_traffic_sticky="parameter:user")
    assert rule_of(both) == TrafficRule({1: 90, 2: 10}, "parameter:user")


@pytest.mark.parametrize(
    ("parameters", "at"),
    [
        ({"weir_traffic": ""}, "weir_traffic"),
        ({"weir_traffic": "1:90"}, "weir_traffic"),
        ({"weir_traffic": "1=1", "weir_traffic_sticky": "x"}, "weir_traffic_sticky"),
        ({"weir_traffic_sticky": "header:a"}, "weir_traffic_sticky"),
    ],
)
def test_invalid_parameters_are_rejected(parameters: dict[str, str], at: str) -> None:
    with pytest.raises(ParameterError) as caught:
        rule_of(config(**parameters))
    assert caught.value.parameter == at
