"""Which request of Weir's own API a request of SageMaker or Vertex AI stands for, and its content type."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weir.gateway.platforms.frontend import Target, default_model, read_header_length
from weir.gateway.platforms.sagemaker import SageMaker, SageMakerOptions
from weir.gateway.platforms.vertex_ai import VertexAi, read_routes
from weir.schemas.core.errors import ErrorCode, WeirError, overloaded


def catalog(*names: str, is_warming_up: bool = False) -> Any:
    return SimpleNamespace(
        served=lambda: [SimpleNamespace(name=name) for name in names],
        warmup_error=lambda _name: overloaded("not ready yet") if is_warming_up else None,
    )


def redirected(to: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"x-vertex-ai-triton-redirect", to.encode())]


VERTEX = VertexAi("/predict", "/health", "m", catalog("a", "b"))


@pytest.mark.parametrize(
    ("method", "path", "target"),
    [
        ("GET", "/health", ("GET", "/v2/health/ready")),
        ("POST", "/health", ("POST", "/v2/health/ready")),
        ("POST", "/predict", ("POST", "/v2/models/m/infer")),
        ("GET", "/predict", ("GET", "/v2/models/m/infer")),
        ("GET", "/health/", None),
        ("GET", "/v2", None),
        ("POST", "/v2/models/m/infer", None),
    ],
)
def test_vertex_ai_has_the_two_routes_of_its_environment(
    method: str, path: str, target: tuple[str, str] | None
) -> None:
    assert VERTEX.target(method, path, []) == (None if target is None else Target(*target))


@pytest.mark.parametrize(
    ("redirect", "method"),
    [
        ("v2", "GET"),
        ("metrics", "GET"),
        ("v2/health/live", "GET"),
        ("v2/health/ready", "GET"),
        ("v2/models/stats", "GET"),
        ("v2/models/a", "GET"),
        ("v2/models/a/ready", "GET"),
        ("v2/models/a/versions/2/config", "GET"),
        ("v2/models/a/versions/2/stats", "GET"),
        ("v2/systemsharedmemory/status", "GET"),
        ("v2/cudasharedmemory/region/r/status", "GET"),
        ("v2/systemsharedmemory/region/r/register", "POST"),
        ("v2/cudasharedmemory/unregister", "POST"),
        ("v2/models/a/infer", "POST"),
        ("v2/models/a/versions/2/infer", "POST"),
        ("v2/models/a/generate", "POST"),
        ("v2/repository/index", "POST"),
        ("v2/repository/models/a/load", "POST"),
        ("v2/repository/models/a/unload", "POST"),
    ],
)
def test_a_redirect_reaches_the_calls_that_triton_redirects(redirect: str, method: str) -> None:
    assert VERTEX.target("POST", "/predict", redirected(redirect)) == Target(method, f"/{redirect}")


@pytest.mark.parametrize(
    "redirect",
    [
        "",
        "/v2",
        "nope",
        "v2/logging",
        "v2/trace/setting",
        "v2/models/a/trace/setting",
        "v2/jobs",
        "v2/models/a?x",
        "v2/",
    ],
)
def test_other_redirects_are_rejected(redirect: str) -> None:
    with pytest.raises(WeirError, match="X-Vertex-Ai-Triton-Redirect") as caught:
        VERTEX.target("POST", "/predict", redirected(redirect))
    assert caught.value.http_status == 400


def test_a_redirect_of_another_verb_is_not_allowed() -> None:
    target = VERTEX.target("GET", "/predict", redirected("v2"))
    assert target is not None
    assert (target.method, target.path.rpartition("/")[2]) == ("GET", "infer")  # a GET of an infer route is 405


def test_without_a_default_model_there_must_be_one_model() -> None:
    assert default_model(catalog("only"), "", "X") == "only"
    assert default_model(catalog("a", "b"), "b", "X") == "b"
    with pytest.raises(WeirError, match="single model if default model is not specified: 2 are served, and X names"):
        default_model(catalog("a", "b"), "", "X")
    with pytest.raises(WeirError) as caught:
        default_model(catalog(is_warming_up=True), "", "X")
    assert caught.value.code is ErrorCode.UNAVAILABLE


def test_the_default_model_may_have_a_namespace() -> None:
    path = "/v2/models/%2Fmodels%3A%3Am/infer"
    vertex_ai = VertexAi("/predict", "/health", "/models::m", catalog())
    assert vertex_ai.target("POST", "/predict", []) == Target("POST", path)
    sagemaker = SageMaker(SageMakerOptions.of({"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "/models::m"}), catalog())
    assert sagemaker.target("POST", "/invocations", []) == Target("POST", path)


def test_vertex_ai_needs_its_routes() -> None:
    assert read_routes({"AIP_PREDICT_ROUTE": "/p", "AIP_HEALTH_ROUTE": "/h"}) == ("/p", "/h")
    with pytest.raises(ValueError, match="AIP_PREDICT_ROUTE is not defined for Vertex AI endpoint"):
        read_routes({})
    with pytest.raises(ValueError, match="AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint"):
        read_routes({"AIP_PREDICT_ROUTE": "/p", "AIP_HEALTH_ROUTE": ""})


@pytest.mark.parametrize(
    ("environment", "ping", "invocations"),
    [
        ({}, "ready", "/v2/models/only/infer"),
        (
            {
                "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m",
                "SAGEMAKER_TRITON_PING_MODE": "live",
                "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream",
            },
            "live",
            "/v2/models/m/generate_stream",
        ),
    ],
)
def test_sagemaker_has_two_routes(environment: dict[str, str], ping: str, invocations: str) -> None:
    sagemaker = SageMaker(SageMakerOptions.of(environment), catalog("only"))
    assert sagemaker.target("GET", "/ping", []) == Target("GET", f"/v2/health/{ping}")
    assert sagemaker.target("POST", "/invocations", []) == Target("POST", invocations)
    assert sagemaker.target("GET", "/ping/", []) is None
    assert sagemaker.target("POST", "/v2/models/only/infer", []) is None


@pytest.mark.parametrize("name", ["SAGEMAKER_TRITON_PING_MODE", "SAGEMAKER_TRITON_INFERENCE_TYPE"])
def test_sagemaker_s_settings_have_few_values(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 'bad', expected one of"):
        SageMakerOptions.of({name: "bad"})


MEDIA_TYPE = "application/vnd.x.binary+json;json-header-size="


@pytest.mark.parametrize(
    ("content_type", "length"),
    [
        ("", None),
        ("application/json", None),
        ("application/octet-stream", None),
        (MEDIA_TYPE + "12", "12"),
        (MEDIA_TYPE + "0", "0"),
        (MEDIA_TYPE + "-4", "-4"),
    ],
)
def test_the_length_of_the_json_header_is_in_the_content_type(content_type: str, length: str | None) -> None:
    assert read_header_length(content_type, MEDIA_TYPE) == length


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        (f"x {MEDIA_TYPE}12", f"expect MIME type for binary data starts with '{MEDIA_TYPE}', got: x {MEDIA_TYPE}12"),
        (MEDIA_TYPE, "Unable to parse inference header size, got: "),
        (f"{MEDIA_TYPE}twelve", "Unable to parse inference header size, got: twelve"),
    ],
)
def test_a_malformed_content_type_is_rejected(content_type: str, text: str) -> None:
    with pytest.raises(WeirError) as caught:
        read_header_length(content_type, MEDIA_TYPE)
    assert (caught.value.http_status, caught.value.message) == (400, text)
