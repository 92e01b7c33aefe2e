"""The OpenAPI document: valid for any configuration, made in slices, and made again only for models that changed."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import openapi_spec_validator
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weir.calls.catalog import ServedModel
from weir.gateway.http.openapi import description
from weir.gateway.http.openapi.description import ApiDescription
from weir.gateway.http.openapi.models import MAX_DIMENSIONS, MAX_LABELS, model_paths
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.tensors import DATATYPES

MODEL_NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TENSORS = st.lists(
    st.fixed_dictionaries(
        {
            "name": TEXTS,
            "data_type": st.sampled_from([datatype.config_name for datatype in DATATYPES.values()]),
            "dims": st.lists(st.one_of(st.just(-1), st.integers(1, 1000)), min_size=1, max_size=4),
        }
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda tensor: tensor["name"],
)


async def _nothing(_request: Request) -> Response:
    return Response()


ROUTES = [Route("/v2/models/{model}/infer", _nothing, methods=["POST"]), Route("/openapi.json", _nothing)]


def served(name: str, batch: int = 4, labels: dict[str, list[str]] | None = None, **fields: Any) -> ServedModel:
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]}
    config = {"backend": "python", "input": [tensor], "output": [{**tensor, "name": "y"}], "max_batch_size": batch}
    return ServedModel(name, ModelConfig.model_validate({"name": name, **config, **fields}), [1], labels or {})


def made(*models: ServedModel, shows_config: bool = True) -> dict[str, Any]:
    found = asyncio.run(ApiDescription(ROUTES, lambda: list(models), shows_config).current())
    return dict(json.loads(found.body))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=MODEL_NAMES,
    inputs=TENSORS,
    outputs=TENSORS,
    batch=st.sampled_from([0, 1, 8]),
    is_decoupled=st.booleans(),
    labels=st.lists(TEXTS, max_size=30),
)
def test_the_document_of_any_model_is_valid(
    name: str,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    batch: int,
    is_decoupled: bool,
    labels: list[str],
) -> None:
    fields = {"input": inputs, "output": outputs, "model_transaction_policy": {"decoupled": is_decoupled}}
    document = made(served(name, batch, {outputs[0]["name"]: labels}, **fields))
    openapi_spec_validator.validate(document)
    verbs = ["generate_stream"] if is_decoupled else ["infer", "generate"]
    prefix = f"/v2/models/{quote(name, safe='')}/"
    assert {path for path in document["paths"] if path.startswith(prefix)} == {prefix + verb for verb in verbs}


def tensor_of(document: dict[str, Any], path: str = "/v2/models/m/infer") -> dict[str, Any]:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return dict(body["properties"]["inputs"]["items"])


def test_a_tensor_has_its_name_datatype_and_shape() -> None:
    properties = tensor_of(made(served("m")))["properties"]
    assert properties["name"] == {"const": "x"}
    assert properties["datatype"] == {"const": "FP32"}
    batch, fixed, variable = properties["shape"]["prefixItems"]
    assert batch == {"type": "integer", "minimum": 1, "maximum": 4}
    assert (fixed, variable) == ({"const": 3}, {"type": "integer", "minimum": 0})


def test_labels_are_listed_up_to_a_limit() -> None:
    labels = [f"class {number}" for number in range(MAX_LABELS + 1)]
    text = json.dumps(made(served("m", labels={"y": labels})), ensure_ascii=False)
    assert f"; {MAX_LABELS + 1} labels: class 0, class 1" in text
    assert f"class {MAX_LABELS - 1}, …" in text
    assert labels[-1] not in text


def test_what_a_restricted_configuration_contains_is_left_out() -> None:
    document = made(served("m", labels={"y": ["zebra"]}), shows_config=False)
    assert "zebra" not in json.dumps(document)
    assert tensor_of(document)["properties"]["shape"]["prefixItems"][0] == {"type": "integer", "minimum": 1}


def test_a_model_with_too_many_dimensions_has_no_paths_of_its_own() -> None:
    many = [{"name": "x", "data_type": "TYPE_FP32", "dims": [1] * MAX_DIMENSIONS}]
    document = made(served("m"), served("huge", input=many))
    assert "/v2/models/m/infer" in document["paths"]
    assert "/v2/models/huge/infer" not in document["paths"]
    assert document["x-models-left-out"] == 1


def test_the_document_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MAX_MODELS_BYTES", 50_000)
    document = made(*(served(f"m{number:03}") for number in range(100)))
    openapi_spec_validator.validate(document)
    assert 0 < document["x-models-left-out"] < 100
    assert len(json.dumps(document)) < 100_000


def test_the_event_loop_goes_on_while_hundreds_of_models_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "SLICE_S", 0.0)
    models = [served(f"m{number}") for number in range(200)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def describe() -> None:
        counting = asyncio.create_task(count())
        await ApiDescription(ROUTES, lambda: models).current()
        counting.cancel()

    asyncio.run(describe())
    assert turns >= len(models)


def test_only_models_that_changed_are_described_again(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []

    def count(one: ServedModel, shows_config: bool) -> dict[str, Any]:
        described.append(one.name)
        return model_paths(one, shows_config)

    monkeypatch.setattr(description, "model_paths", count)
    models = [served("a"), served("b")]

    async def describe() -> None:
        api = ApiDescription(ROUTES, lambda: list(models))
        first, again = await asyncio.gather(api.current(), api.current())
        assert first is again
        models[1] = served("b")
        same = await api.current()
        assert (same.etag, same.body) == (first.etag, first.body)
        models[1] = served("b", batch=8)
        changed = await api.current()
        assert changed.etag != first.etag
        models.pop()
        assert b"/v2/models/b/" not in (await api.current()).body

    asyncio.run(describe())
    assert described == ["a", "b", "b", "b"]
