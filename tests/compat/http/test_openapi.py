"""`/openapi.json` of a running server: what it says of each model is what the server takes and returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest

from tests.support.models import zoo
from tests.support.models.http import serving
from tests.support.servers.weir_server import Server

NAMES = ("docs", "openapi.json", "v2")
"""Models with the names of other paths."""


def write_models(root: Path) -> None:
    zoo.write_add_sub(root)
    zoo.write_classes(root)
    zoo.write_shapes(root)
    for name in NAMES:
        zoo.write_identity(root, name, "FP32")
    zoo.write_streamer(root, "streamer", "")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("openapi"), write_models) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_place}", timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get("/openapi.json").json())


def described(document: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of the request and of the response."""
    operation = document["paths"][path]["post"]
    bodies = operation["requestBody"], operation["responses"]["200"]
    request, response = (body["content"]["application/json"]["schema"] for body in bodies)
    return request, response


def fits(value: Any, schema: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def infer_request(*inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **more}


def test_it_is_a_valid_document(http: httpx.Client, document: dict[str, Any]) -> None:
    openapi_spec_validator.validate(document)
    response = http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert document["x-models-left-out"] == 0
    index = http.post("/v2/repository/index").json()
    assert {tag["name"] for tag in document["tags"]} == {row["name"] for row in index}


ROW = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (
            "add_sub",
            infer_request(tensor("A", "INT32", [1, 4], [1, 2, 3, 4]), tensor("B", "INT32", [1, 4], [[1, 2, 3, 4]])),
        ),
        ("classes", infer_request(tensor("IN", "FP32", [2, 5], ROW * 2), id="7")),
        (
            "classes",
            infer_request(
                tensor("IN", "FP32", [1, 5], ROW), outputs=[{"name": "OUT", "parameters": {"classification": 2}}]
            ),
        ),
        ("grid", infer_request(tensor("IN", "FP32", [2, 3], [1.0] * 6), parameters={"priority": 1, "mine": "x"})),
        ("reshaped", infer_request(tensor("IN", "FP32", [1, 2, 3], [1.0] * 6))),
    ],
)
def test_requests_and_responses_are_as_described(
    http: httpx.Client, document: dict[str, Any], model: str, body: dict[str, Any]
) -> None:
    request, response = described(document, f"/v2/models/{model}/infer")
    jsonschema.validate(body, request, jsonschema.Draft202012Validator)
    answer = http.post(f"/v2/models/{model}/infer", json=body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), response, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "body",
    [
        infer_request(tensor("OTHER", "FP32", [1, 5], ROW)),
        infer_request(tensor("IN", "INT32", [1, 5], [1, 2, 3, 4, 5])),
        infer_request(tensor("IN", "FP32", [1, 4], ROW[:4])),
        infer_request(tensor("IN", "FP32", [5], ROW)),
        infer_request(tensor("IN", "FP32", [9, 5], ROW * 9)),
        infer_request(tensor("IN", "FP32", [0, 5], [])),
        infer_request(),
        infer_request(tensor("IN", "FP32", [1, 5], ROW), outputs=[{"name": "IN"}]),
        {"id": "1"},
        [],
    ],
)
def test_what_is_not_as_described_is_rejected_with_a_described_status(
    http: httpx.Client, document: dict[str, Any], body: Any
) -> None:
    path = "/v2/models/classes/infer"
    assert not fits(body, described(document, path)[0])
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 500), answer.text
    assert str(answer.status_code) in document["paths"][path]["post"]["responses"]
    assert fits(answer.json(), document["components"]["schemas"]["Error"])


@pytest.mark.parametrize("values", [ROW, [[1.0]], ["1"], ROW[:4]])
def test_generate_is_as_described(http: httpx.Client, document: dict[str, Any], values: list[Any]) -> None:
    request, response = described(document, "/v2/models/classes/generate")
    answer = http.post("/v2/models/classes/generate", json={"IN": values})
    assert fits({"IN": values}, request) or answer.status_code != 200
    if values == ROW:
        assert (answer.status_code, fits({"IN": values}, request)) == (200, True)
        jsonschema.validate(answer.json(), response, jsonschema.Draft202012Validator)


def test_each_example_is_as_described_and_runs(http: httpx.Client, document: dict[str, Any]) -> None:
    """The small models of this server have examples for each of their operations."""
    tried = set()
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        if "example" in content and "/streamer/" not in path:  # that model reads a program from its input
            jsonschema.validate(content["example"], content["schema"], jsonschema.Draft202012Validator)
            answer = http.post(path, json=content["example"])
            assert answer.status_code == 200, (path, answer.text)
            tried.add(path)
    own = [path for path in document["paths"] if path.startswith("/v2/models/") and "{" not in path]
    assert tried == {path for path in own if path != "/v2/models/stats" and "/streamer/" not in path}


def test_labels_and_decoupled_models_are_described(document: dict[str, Any]) -> None:
    response = described(document, "/v2/models/classes/infer")[1]
    assert f"{len(zoo.LABELS)} labels: {zoo.LABELS[0]}" in response["properties"]["outputs"]["items"]["description"]
    assert "/v2/models/streamer/generate_stream" in document["paths"]
    assert "/v2/models/streamer/infer" not in document["paths"]


@pytest.mark.parametrize("model", NAMES)
def test_models_may_have_the_names_of_paths(http: httpx.Client, document: dict[str, Any], model: str) -> None:
    assert http.get(f"/v2/models/{model}").json()["name"] == model
    request, _ = described(document, f"/v2/models/{model}/infer")
    name = request["properties"]["inputs"]["items"]["properties"]["name"]["const"]
    body = infer_request(tensor(name, "FP32", [1, 1], [2.0]))
    assert http.post(f"/v2/models/{model}/infer", json=body).json()["outputs"][0]["data"] == [2.0]


def test_a_client_that_has_the_document_does_not_get_it_again(http: httpx.Client) -> None:
    first = http.get("/openapi.json")
    for condition in (first.headers["etag"], f'"x", W/{first.headers["etag"]}', "*"):
        again = http.get("/openapi.json", headers={"If-None-Match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert http.get("/openapi.json", headers={"If-None-Match": '"x"'}).status_code == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that restricts metadata and configurations, and loads models on request."""
    options = (
        "--model-control-mode=explicit",
        "--http-restricted-api=metadata:key=secret",
        "--http-restricted-api=model-config:other=secret",
    )
    with (
        serving(tmp_path_factory.mktemp("guarded"), zoo.write_classes, options=options) as started,
        httpx.Client(base_url=f"http://{started.http_place}", timeout=30) as client,
    ):
        yield client


def test_it_follows_loads_and_unloads(guarded: httpx.Client) -> None:
    key = {"key": "secret"}
    before = guarded.get("/openapi.json", headers=key)
    assert "/v2/models/classes/infer" not in before.json()["paths"]
    assert guarded.post("/v2/repository/models/classes/load").status_code == 200
    after = guarded.get("/openapi.json", headers={**key, "If-None-Match": before.headers["etag"]})
    assert "/v2/models/classes/infer" in after.json()["paths"]
    assert guarded.post("/v2/repository/models/classes/unload").status_code == 200
    assert guarded.get("/openapi.json", headers=key).headers["etag"] == before.headers["etag"]


def test_it_keeps_restrictions(guarded: httpx.Client) -> None:
    assert guarded.post("/v2/repository/models/classes/load").status_code == 200
    refused = guarded.get("/openapi.json")
    assert (refused.status_code, list(refused.json())) == (403, ["error"])
    admitted = guarded.get("/openapi.json", headers={"key": "secret"})
    assert "/v2/models/classes/infer" in admitted.json()["paths"]
    assert f"labels: {zoo.LABELS[0]}" not in admitted.text
    for path in ("/docs", "/docs/start.js"):
        assert guarded.get(path).status_code == 403
        assert guarded.get(path, headers={"key": "secret"}).status_code in (200, 404)  # 404 where it is not built


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with serving(tmp_path, lambda root: None, options=("--allow-openapi=false",)) as started:
        answers = [httpx.get(f"http://{started.http_place}{path}") for path in ("/openapi.json", "/docs")]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(404, {"error": "Not Found"})] * 2
