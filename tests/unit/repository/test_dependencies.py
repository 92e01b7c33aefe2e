"""Which models go with an ensemble."""

from repository.dependencies import composing_models, left_over
from schemas.model_config import ModelConfig


def ensemble(name: str, *steps: str) -> ModelConfig:
    rows = [{"model_name": step, "input_map": {"A": "A"}, "output_map": {"B": "B"}} for step in steps]
    return ModelConfig.model_validate({"name": name, "platform": "ensemble", "ensemble_scheduling": {"step": rows}})


def test_composing_models_come_once_each_in_order():
    assert composing_models(ensemble("e", "b", "a", "b")) == ["b", "a"]
    assert composing_models(ModelConfig(name="m", backend="python")) == []


def test_only_what_nobody_else_wants_goes_with_an_ensemble():
    e, other = ensemble("e", "a", "b", "c"), ensemble("other", "b")
    assert left_over(e, [e], []) == ["a", "b", "c"]
    assert left_over(e, [e, other], ["c"]) == ["a"]
