"""Access: the meaning of options, the group of each call, and the headers that become parameters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.gateway.access import CATEGORIES, OPEN, Access, add_parameters
from weir.schemas.core.errors import ErrorCode, WeirError

KEY = [(b"host", b"x"), (b"key", b"se=cr:et")]


def refused_paths(category: str, paths: list[str]) -> set[str]:
    access = Access(http_restricted=[f"{category}:key=value"])
    return {path for path in paths if access.http_rejection(path, [])}


PATHS = {
    "health": ["/v2/health/live", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/1/ready"],
    "metadata": ["/v2", "/openapi.json", "/docs", "/docs/start.js", "/v2/models/m", "/v2/models/m/versions/1"],
    "inference": [
        f"/v2/models/m{version}/{name}"
        for version in ("", "/versions/1")
        for name in ("infer", "generate", "generate_stream")
    ]
    + ["/v2/jobs", "/v2/jobs/x", "/v2/jobs/x/result", "/v2/jobs/x/cancel"],
    "shared-memory": [
        f"/v2/{kind}sharedmemory{rest}"
        for kind in ("system", "cuda")
        for rest in ("/status", "/region/r/status", "/region/r/register", "/unregister", "/region/r/unregister")
    ],
    "model-config": ["/v2/models/m/config", "/v2/models/m/versions/1/config"],
    "model-repository": [
        "/v2/repository/index",
        "/v2/repository/models/m/load",
        "/v2/repository/models/m/unload",
        "/v2/repository/r/models/m/load",
    ],
    "statistics": ["/v2/models/stats", "/v2/models/m/stats", "/v2/models/m/versions/1/stats"],
    "trace": ["/v2/trace/setting", "/v2/models/m/trace/setting"],
    "logging": ["/v2/logging"],
}


def test_there_are_paths_of_each_category() -> None:
    assert tuple(PATHS) == CATEGORIES


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_path_belongs_to_one_category(category: str) -> None:
    every = [path for paths in PATHS.values() for path in paths]
    assert refused_paths(category, [*every, "/", "/v3", "/v2/", "/v2/models/m/x"]) == set(PATHS[category])


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_newline_opens_nothing(category: str) -> None:
    access = Access(http_restricted=[f"{category}:key=value"])
    for path in PATHS[category]:
        assert access.http_rejection(path + "\n", [])
        assert access.http_rejection(path.replace("models/m", "models/m\n").replace("/r/", "/r\n/"), [])


METHODS = {
    "health": ["ServerLive", "ServerReady", "ModelReady"],
    "metadata": ["ServerMetadata", "ModelMetadata"],
    "inference": ["ModelInfer", "ModelStreamInfer"],
    "shared-memory": [
        f"{kind}SharedMemory{action}" for kind in ("System", "Cuda") for action in ("Status", "Register", "Unregister")
    ],
    "model-config": ["ModelConfig"],
    "model-repository": ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"],
    "statistics": ["ModelStatistics"],
    "trace": ["TraceSetting"],
    "logging": ["LogSettings"],
}


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_method_belongs_to_one_category(category: str) -> None:
    access = Access(grpc_restricted=[f"{category}:key=value"])
    every = [method for methods in METHODS.values() for method in methods]
    refused = [m for m in every if access.grpc_rejection(f"/inference.GRPCInferenceService/{m}".encode(), [])]
    assert refused == METHODS[category]
    assert len(every) == 20


def test_the_health_service_is_of_the_health_category() -> None:
    assert Access(grpc_restricted=["health:k=v"]).grpc_rejection(b"/grpc.health.v1.Health/Check", [])


def test_a_key_opens_what_is_restricted() -> None:
    access = Access(http_restricted=["inference, metadata:key=se=cr:et"], grpc_restricted=["health:key=se=cr:et"])
    assert access.http_rejection("/v2", KEY) == ""
    assert access.http_rejection("/v2", []) == "This API is restricted, expecting header 'key'"
    assert access.http_rejection("/v2", [(b"key", b"other")]) == "This API is restricted, expecting header 'key'"
    assert access.http_rejection("/v2", [(b"key", b"other"), *KEY])  # the first counts
    assert access.http_rejection("/v2/health/live", []) == ""
    assert access.rejects_inference([])
    assert not access.rejects_inference(KEY)
    path = b"/inference.GRPCInferenceService/ServerLive"
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    assert access.grpc_rejection(path, KEY) == text
    assert access.grpc_rejection(path, [(b"triton-grpc-protocol-key", b"se=cr:et")]) == ""


def test_nothing_is_restricted_by_itself() -> None:
    assert not OPEN.http_rejection("/v2", [])
    assert not OPEN.rejects_inference([])
    assert not OPEN.grpc_rejection(b"/inference.GRPCInferenceService/ServerLive", [])
    assert not OPEN.forwards_http
    assert OPEN.http_parameters(KEY) == {}


def test_the_case_of_a_key_does_not_matter_to_http() -> None:
    access = Access(http_restricted=["metadata:Admin-Key=v"])
    assert access.http_rejection("/v2", [(b"admin-key", b"v")]) == ""
    assert access.http_rejection("/v2", []) == "This API is restricted, expecting header 'Admin-Key'"


@pytest.mark.parametrize("text", ["", "health", "health:key", "health:=v", "health:k=", ":k=v", "x:k=v", "health,:k=v"])
def test_options_that_are_not_what_they_should_be(text: str) -> None:
    for options in ({"http_restricted": [text]}, {"grpc_restricted": [text]}):
        with pytest.raises(WeirError, match=r"restricted-(api|protocol)") as refusal:
            Access(**options)
        assert refusal.value.code == ErrorCode.INVALID_ARG


def test_a_category_has_one_key() -> None:
    with pytest.raises(WeirError, match="can not be specified in multiple config groups"):
        Access(http_restricted=["health:a=b", "metadata,health:c=d"])


@given(st.text(max_size=40))
def test_any_option_is_parsed_or_rejected(text: str) -> None:
    try:
        access = Access(http_restricted=[text])
    except WeirError:
        return
    assert set(access.http) <= set(CATEGORIES)


HEADERS = [(b"Host", b"here"), (b"X-Abc", b"1"), (b"x-def", b"\xc3\xa9"), (b"Y-x-", b"\xff")]


@pytest.mark.parametrize(
    ("pattern", "parameters"),
    [
        ("", {}),
        ("x-.*", {"X-Abc": "1", "x-def": "é", "Y-x-": "ÿ"}),
        ("^X-", {"X-Abc": "1", "x-def": "é"}),
        ("(?-i)^X-", {"X-Abc": "1"}),
        ("host|abc$", {"Host": "here", "X-Abc": "1"}),
        ("nothing", {}),
    ],
)
def test_which_headers_become_parameters(pattern: str, parameters: dict[str, str]) -> None:
    assert Access(http_forward_pattern=pattern).http_parameters(HEADERS) == parameters
    assert Access(grpc_forward_pattern=pattern).grpc_parameters(HEADERS) == parameters


@pytest.mark.parametrize("name", ["sequence_id", "priority", "Timeout", "triton_x", "Triton_Y", "binary_data_output"])
def test_reserved_names_are_not_forwarded(name: str) -> None:
    access = Access(http_forward_pattern=".*")
    with pytest.raises(WeirError) as refusal:
        access.http_parameters([(b"Host", b"x"), (name.encode(), b"1")])
    assert refusal.value.code == ErrorCode.INVALID_ARG
    assert refusal.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert Access(http_forward_pattern="host").http_parameters([(name.encode(), b"1")]) == {}


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(WeirError, match="--http-header-forward-pattern is no regular expression"):
        Access(http_forward_pattern="(")


def test_a_header_wins() -> None:
    assert add_parameters({"a": 1, "b": 2}, {"b": "header"}) == {"a": 1, "b": "header"}
    assert add_parameters(None, {"b": "header"}) == {"b": "header"}


def test_models_do_not_see_what_clients_prove_themselves_with() -> None:
    headers = [(b"Authorization", b"Bearer weir_1_2"), (b"X-Trace", b"1")]
    assert Access(http_forward_pattern=".*").http_parameters(headers) == {
        "Authorization": "Bearer weir_1_2",
        "X-Trace": "1",
    }
    assert Access(http_forward_pattern=".*", hides_credentials=True).http_parameters(headers) == {"X-Trace": "1"}
    assert Access(grpc_forward_pattern=".*", hides_credentials=True).grpc_parameters(headers) == {"X-Trace": "1"}
