"""Which models go with an ensemble."""

from repository.dependencies import composing_models, in_namespaces, left_over
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


def test_steps_ask_the_models_of_their_own_namespace_where_there_are_any():
    known = {"/a::x", "/b::x", "y"}
    e = ensemble("e", "x", "y")
    assert in_namespaces(e, "", known.__contains__) is e
    assert in_namespaces(e, "/c", known.__contains__) is e
    settled = in_namespaces(e, "/a", known.__contains__)
    assert composing_models(settled) == ["/a::x", "y"]
    assert composing_models(in_namespaces(settled, "/b", known.__contains__)) == ["/b::x", "y"]
    assert in_namespaces(settled, "", known.__contains__) == e, "what a file says of namespaces counts for nothing"
    assert left_over(settled, [settled], ["x"]) == ["y"]
    model = ModelConfig(name="m", backend="python")
    assert in_namespaces(model, "/a", known.__contains__) is model
