"""The bounds of a model's queue on disk."""

from __future__ import annotations

import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import QueueBounds, queue_bounds, queue_bounds_problem

DEFAULT = QueueBounds(max_messages=10, max_bytes=1000, max_age_s=1.5)


def config(**parameters: str) -> ModelConfig:
    declared = {f"weir_queue_{name}": {"string_value": value} for name, value in parameters.items()}
    return ModelConfig.model_validate({"name": "m", "parameters": declared})


def test_undeclared_bounds_have_the_default() -> None:
    assert queue_bounds(None, DEFAULT) is queue_bounds(config(), DEFAULT) is DEFAULT
    assert queue_bounds(config(max_messages="3"), DEFAULT) == QueueBounds(3, 1000, 1.5)
    assert queue_bounds(config(max_bytes="5", max_age_secs="60"), DEFAULT) == QueueBounds(10, 5, 60.0)
    assert (DEFAULT.max_age_ms, queue_bounds(config(max_age_secs="60"), DEFAULT).max_age_ms) == (1500, 60_000)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "\u0664", "9" * 16, "9" * 5000, " 1"])
def test_an_invalid_bound_is_named_and_ignored(text: str) -> None:
    for name in ("max_messages", "max_bytes", "max_age_secs"):
        declared = config(**{name: text})
        problem = queue_bounds_problem(declared)
        assert problem is not None
        assert problem[0] == f"weir_queue_{name}"
        assert queue_bounds(declared, DEFAULT) == DEFAULT
    assert queue_bounds_problem(config(max_messages="1")) is None
