"""Amazon SageMaker's and Google Vertex AI's protocols, as a running Triton 2.51 answers them.

Requests are sent as these services send them; bodies are written and read by the stock client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.support.models.zoo import write_faulty, write_identity, write_versions
from tests.support.servers.weir_server import Server

ENVIRONMENT = {
    "AIP_PREDICT_ROUTE": "/v1/endpoints/1/deployedModels/2:predict",
    "AIP_HEALTH_ROUTE": "/v1/endpoints/1/deployedModels/2",
    "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "identity",
}
SAGEMAKER_TYPE = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_TYPE = "application/vnd.vertex-ai-triton.binary+json;json-header-size="


class Place(NamedTuple):
    """One port: its client, its routes, and the content type of binary requests."""

    name: str
    http: httpx.Client
    health: str
    predict: str
    media_type: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("platforms")
    (models := folder / "models").mkdir()
    write_identity(models, "identity", "FP32")
    write_versions(models, "versions", "version_policy { all { } }")
    write_faulty(models)
    options = ("--allow-sagemaker", "--sagemaker-port=0", "--allow-vertex-ai", "--vertex-ai-port=0")
    restricted = "--http-restricted-api=model-repository:key=secret"
    with Server(
        folder, models, *options, "--vertex-ai-default-model=identity", restricted, environment=ENVIRONMENT
    ) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def places(server: Server) -> Iterator[dict[str, Place]]:
    with (
        httpx.Client(base_url=server.printed_value("SageMaker"), timeout=20) as sagemaker,
        httpx.Client(base_url=server.printed_value("Vertex AI"), timeout=20) as vertex_ai,
    ):
        yield {
            "sagemaker": Place("SageMaker", sagemaker, "/ping", "/invocations", SAGEMAKER_TYPE),
            "vertex": Place(
                "Vertex AI",
                vertex_ai,
                ENVIRONMENT["AIP_HEALTH_ROUTE"],
                ENVIRONMENT["AIP_PREDICT_ROUTE"],
                VERTEX_TYPE,
            ),
        }


@pytest.fixture(params=["sagemaker", "vertex"])
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]


def written(value: float = 1.0, binary: bool = False, name: str = "IN") -> tuple[bytes, int]:
    """A request body of the stock client, and the length of its JSON header."""
    tensor = triton.InferInput(name, [1, 2], "FP32")
    tensor.set_data_from_numpy(np.full((1, 2), value, np.float32), binary_data=binary)
    wanted = triton.InferRequestedOutput("OUT", binary_data=binary)
    body, length = triton.InferenceServerClient.generate_request_body([tensor], outputs=[wanted])
    return body, len(body) if length is None else length


def read(response: httpx.Response, header_length: int | None = None) -> Any:
    assert response.status_code == 200, response.text
    result = triton.InferenceServerClient.parse_response_body(response.content, header_length=header_length)
    return result.as_numpy("OUT").tolist()


def test_health(place: Place) -> None:
    answered = place.http.get(place.health)
    assert (answered.status_code, answered.content) == (200, b"")
    assert place.http.post(place.health).status_code == 405


@pytest.mark.parametrize("path", ["/nope", "/v2", "/v2/health/ready", "/metrics", "/"])
def test_other_paths_are_400(place: Place, path: str) -> None:
    answered = place.http.get(path)
    assert answered.status_code == 400
    assert answered.json() == {"error": f"{place.name} requests for GET {path} are not served"}


def test_json(place: Place) -> None:
    body, _ = written()
    for content_type in ("application/json", "application/octet-stream"):
        answered = place.http.post(place.predict, content=body, headers={"content-type": content_type})
        assert read(answered) == [[1.0, 1.0]]
        assert answered.headers["content-type"] == "application/json"


def test_binary(place: Place) -> None:
    body, length = written(2.0, binary=True)
    answered = place.http.post(place.predict, content=body, headers={"content-type": f"{place.media_type}{length}"})
    if place.name == "SageMaker":
        assert answered.headers["content-type"].startswith(SAGEMAKER_TYPE)
        assert "inference-header-content-length" not in answered.headers
        header_length = int(answered.headers["content-type"].removeprefix(SAGEMAKER_TYPE))
    else:
        assert answered.headers["content-type"] == "application/octet-stream"
        header_length = int(answered.headers["inference-header-content-length"])
    assert read(answered, header_length) == [[2.0, 2.0]]


def test_raw_binary(place: Place) -> None:
    headers = {"content-type": f"{place.media_type}0"}
    content = np.array([1, 2], np.float32).tobytes()
    answered = place.http.post(place.predict, content=content, headers=headers)
    assert answered.status_code == 200
    assert answered.content.endswith(content)


def test_a_large_binary_request(place: Place) -> None:
    value = np.random.default_rng(0).random((8, 50_000), np.float32)
    tensor = triton.InferInput("IN", list(value.shape), "FP32")
    tensor.set_data_from_numpy(value)
    body, length = triton.InferenceServerClient.generate_request_body([tensor])
    answered = place.http.post(place.predict, content=body, headers={"content-type": f"{place.media_type}{length}"})
    assert answered.status_code == 200
    assert answered.content.endswith(value.tobytes())


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("99999", "inference header size should be in range (0, {size}), got: 99999"),
        ("-4", "inference header size should be in range (0, {size}), got: -4"),
        ("many", "Unable to parse inference header size, got: many"),
    ],
)
def test_content_types_with_a_wrong_length(place: Place, suffix: str, text: str) -> None:
    body, _ = written(binary=True)
    answered = place.http.post(place.predict, content=body, headers={"content-type": f"{place.media_type}{suffix}"})
    assert answered.status_code == 400
    assert answered.json() == {"error": text.format(size=len(body))}
    assert read(place.http.post(place.predict, content=written()[0])) == [[1.0, 1.0]]  # on the same connection


def test_errors_are_those_of_the_infer_route(place: Place) -> None:
    unknown = place.http.post(place.predict, content=written(name="X")[0])
    assert unknown.status_code == 400
    assert unknown.json() == {"error": "unexpected inference input 'X' for model 'identity'"}
    nothing = place.http.post(place.predict, content=b"{}")
    assert nothing.status_code == 500
    assert place.http.get(place.predict).status_code == 405
    assert place.http.put(place.predict, content=written()[0]).status_code == 405


def test_responses_are_never_compressed(place: Place) -> None:
    answered = place.http.post(place.predict, content=written()[0], headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in answered.headers


def redirect(places: dict[str, Place], to: str, content: bytes = b"", **headers: str) -> httpx.Response:
    place = places["vertex"]
    headers = {"X-Vertex-Ai-Triton-Redirect": to, **headers}
    return place.http.post(place.predict, content=content, headers=headers)


def test_redirects_to_what_is_read(places: dict[str, Place]) -> None:
    assert redirect(places, "v2").json()["name"] == "triton"
    assert redirect(places, "v2/health/ready").status_code == 200
    assert redirect(places, "v2/models/versions/config").json()["name"] == "versions"
    assert redirect(places, "v2/models/versions/versions/2/ready").status_code == 200
    assert redirect(places, "v2/models/stats").json()["model_stats"]
    assert 'nv_inference_request_success{model="identity",version="1"}' in redirect(places, "metrics").text
    unknown = redirect(places, "v2/models/nope")
    assert (unknown.status_code, unknown.json()) == (404, {"error": "Request for unknown model: 'nope' is not found"})


def test_a_redirect_to_another_model_and_version(places: dict[str, Place]) -> None:
    tensor = triton.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([1], np.float32))
    body, length = triton.InferenceServerClient.generate_request_body([tensor])
    content_type = f"{VERTEX_TYPE}{length}"
    answered = redirect(places, "v2/models/versions/versions/2/infer", body, **{"content-type": content_type})
    assert read(answered, int(answered.headers["inference-header-content-length"])) == [3.0]


def test_redirects_that_lead_nowhere(places: dict[str, Place]) -> None:
    for to in ("nope", "v2/logging", "v2/jobs", ""):
        answered = redirect(places, to)
        assert answered.status_code == 400
        assert "X-Vertex-Ai-Triton-Redirect" in answered.json()["error"]


def test_restrictions_hold_behind_a_redirect(places: dict[str, Place]) -> None:
    refused = redirect(places, "v2/repository/index")
    assert (refused.status_code, refused.json()) == (
        403,
        {"error": "This API is restricted, expecting header 'key'"},
    )
    assert {row["name"] for row in redirect(places, "v2/repository/index", key="secret").json()} >= {"identity"}


def test_a_foreign_page_changes_nothing(places: dict[str, Place]) -> None:
    answered = redirect(places, "v2/repository/index", key="secret", origin="https://evil.example")
    assert answered.status_code == 403
    assert "another site" in json.loads(answered.content)["error"]


def test_the_environment_of_vertex_ai_starts_its_frontend_alone(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "lone", "FP32")
    environment = {**ENVIRONMENT, "AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "0"}
    with Server(tmp_path, tmp_path / "models", environment=environment) as started:
        assert started.printed_value("HTTP") == started.printed_value("gRPC") == "off"
        url = started.printed_value("Vertex AI") + ENVIRONMENT["AIP_PREDICT_ROUTE"]
        assert read(httpx.post(url, content=written()[0])) == [[1.0, 1.0]]
