"""Whose answers are kept: those of one load, by one version, and of ensembles those of all their models' loads."""

from __future__ import annotations

from typing import Any

import pytest

from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import MAX_HASHED_BYTES, ResponseCache
from weir.calls.catalog import ServedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import PayloadRef, Tensor


class Models:
    """A catalog and a registry of one's own."""

    def __init__(self) -> None:
        self.served: dict[str, ServedModel] = {}
        self.cache = ResponseCache(None, "me", self, self, CacheConfig("local", 1 << 20))  # type: ignore[arg-type]

    def on_model_change(self, listener: Any) -> None:
        self.changed = listener

    def served_model(self, name: str) -> ServedModel | None:
        return self.served.get(name)

    def load(self, name: str, loads: dict[int, str], **config: Any) -> None:
        settings = ModelConfig(name=name).replace(response_cache={"enable": True}).replace(**config)
        self.served[name] = ServedModel(
            name, ModelConfig.model_validate(settings.model_dump()), sorted(loads), {}, loads
        )

    def ensemble(self, name: str, *steps: tuple[str, int]) -> None:
        rows = [{"model_name": model, "model_version": version} for model, version in steps]
        self.load(name, {1: "ensemble"}, ensemble_scheduling={"step": rows})

    def ask(self, name: str = "m", version: str = "") -> Any:
        return self.cache.look_up(
            self.served[name], InferRequest(name, version, inputs=[Tensor("A", "INT8", [1], b"x")])
        )

    def answer(self, question: Any, version: int = 1, data: Any = b"y") -> None:
        response = InferResponse("m", str(version), "1", [Tensor("OUT", "INT8", [1], data)])
        self.cache.store(question, version, response, lambda ref: bytes(ref.size))

    def is_known(self, name: str = "m", version: str = "") -> bool:
        question = self.ask(name, version)
        return question is not None and question.response is not None


@pytest.fixture
def models() -> Models:
    models = Models()
    models.load("m", {1: "a"})
    return models


def test_the_latest_version_shares_entries_with_its_number(models: Models) -> None:
    models.answer(models.ask())
    assert models.is_known(version="1")
    models.load("m", {1: "a", 2: "b"})
    assert not models.is_known()
    assert models.is_known(version="1")


def test_a_response_of_another_version_is_not_stored(models: Models) -> None:
    models.answer(models.ask(), version=2)
    assert not models.is_known()
    assert models.cache.counters.snapshot()[0]["cache_miss"][0] == 1


def test_a_response_that_comes_after_a_reload_is_not_stored(models: Models) -> None:
    question = models.ask()
    models.load("m", {1: "b"})
    models.answer(question)
    models.load("m", {1: "a"})
    assert not models.is_known()
    models.answer(models.ask())
    assert models.is_known()


def test_without_a_load_digest_nothing_is_stored(models: Models) -> None:
    models.load("m", {1: ""})
    assert models.ask() is None


def test_content_in_a_worker_s_memory_is_copied(models: Models) -> None:
    models.answer(models.ask(), data=PayloadRef("weir-x", 0, 1, 64, 5))
    assert models.ask().response.outputs[0].data == bytes(5)


def test_content_lost_with_its_worker_is_not_stored(models: Models) -> None:
    def gone(_ref: PayloadRef) -> bytes:
        raise ValueError

    response = InferResponse("m", "1", "1", [Tensor("OUT", "INT8", [1], PayloadRef("weir-x", 0, 1, 64, 5))])
    models.cache.store(models.ask(), 1, response, gone)
    assert not models.is_known()


def test_requests_with_inputs_in_shared_memory_are_not_looked_up(models: Models) -> None:
    request = InferRequest("m", inputs=[Tensor("A", "INT8", [5], PayloadRef("weir-x", 0, 1, 64, 5))])
    assert models.cache.look_up(models.served["m"], request) is None
    request = InferRequest("m", inputs=[Tensor("A", "INT8", [1], b"x")])
    request.regions = ("region",)
    assert models.cache.look_up(models.served["m"], request) is None


def test_entries_of_an_ensemble_depend_on_the_loads_of_its_models(models: Models) -> None:
    models.ensemble("inner", ("m", 1))
    models.ensemble("outer", ("inner", -1), ("m", -1))
    models.answer(models.ask("outer"))
    assert models.is_known("outer")
    models.load("m", {1: "b"})
    assert not models.is_known("outer")
    models.load("m", {1: "a"})
    assert models.is_known("outer")


@pytest.mark.parametrize(
    "config", [{"model_transaction_policy": {"decoupled": True}}, {"sequence_batching": {"direct": {}}}]
)
def test_an_ensemble_of_models_with_state_or_streams_is_not_cached(models: Models, config: dict[str, Any]) -> None:
    models.ensemble("outer", ("m", -1))
    models.load("m", {1: "a"}, response_cache=None, **config)
    assert models.ask("outer") is None
    del models.served["m"]
    assert models.ask("outer") is None
    models.ensemble("circle", ("circle", -1))
    assert models.ask("circle") is None


def test_an_unloaded_version_loses_its_counts(models: Models) -> None:
    models.load("n", {1: "a"})
    for name in ("m", "n"):
        models.answer(models.ask(name))
    models.load("m", {2: "a"})
    models.changed("m")
    models.changed("")
    assert [row["model"] for row in models.cache.counters.snapshot()] == ["n"]


def test_large_requests_are_not_looked_up(models: Models) -> None:
    model = models.served["m"]
    for size, is_asked in ((MAX_HASHED_BYTES, True), (MAX_HASHED_BYTES + 1, False)):
        request = InferRequest("m", inputs=[Tensor("A", "INT8", [size], bytes(size))])
        assert (models.cache.look_up(model, request) is not None) is is_asked
