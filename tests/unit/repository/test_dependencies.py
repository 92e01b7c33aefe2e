"""Which models go with an ensemble."""

from weir.repository.dependencies import composing_models, resolve_namespaces, unneeded_models
from weir.schemas.config.model_config import ModelConfig


def ensemble(name: str, *steps: str) -> ModelConfig:
    rows = [{"model_name": step, "input_map": {"A": "A"}, "output_map": {"B": "B"}} for step in steps]
    return ModelConfig.model_validate({"name": name, "platform": "ensemble", "ensemble_scheduling": {"step": rows}})


def test_composing_models_come_once_each_in_order():
    assert composing_models(ensemble("e", "b", "a", "b")) == ["b", "a"]
    assert composing_models(ModelConfig(name="m", backend="python")) == []


def test_only_unneeded_models_are_unloaded_with_an_ensemble():
    e, other = ensemble("e", "a", "b", "c"), ensemble("other", "b")
    assert unneeded_models(e, [e], []) == ["a", "b", "c"]
    assert unneeded_models(e, [e, other], ["c"]) == ["a"]


def test_steps_prefer_models_of_their_own_namespace():
    known = {"/a::x", "/b::x", "y"}
    e = ensemble("e", "x", "y")
    assert resolve_namespaces(e, "", known.__contains__) is e
    assert resolve_namespaces(e, "/c", known.__contains__) is e
    settled = resolve_namespaces(e, "/a", known.__contains__)
    assert composing_models(settled) == ["/a::x", "y"]
    assert composing_models(resolve_namespaces(settled, "/b", known.__contains__)) == ["/b::x", "y"]
    assert resolve_namespaces(settled, "", known.__contains__) == e, "what a file says of namespaces counts for nothing"
    assert unneeded_models(settled, [settled], ["x"]) == ["y"]
    model = ModelConfig(name="m", backend="python")
    assert resolve_namespaces(model, "/a", known.__contains__) is model
