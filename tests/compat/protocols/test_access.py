"""Restricted APIs and forwarded headers, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models import zoo as model_zoo
from tests.support.models.http import serving, write_told
from tests.support.servers.gateway import OwnGateway, own_gateway
from tests.support.servers.weir_server import Server

KEY = {"admin-key": "se=cr:et"}
GRPC_KEY = {"triton-grpc-protocol-admin-key": "se=cr:et"}
HTTP_REFUSAL = "This API is restricted, expecting header 'admin-key'"
GRPC_REFUSAL = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
ANY = {"ANY": np.ones((1, 1), np.float32)}
BODY = {"inputs": [{"name": "ANY", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}


def write_models(root: Path) -> None:
    write_told(root)
    model_zoo.write_identity(root, "same", "FP32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("access"), write_models) as started:
        yield started


@pytest.fixture(scope="module")
def locked(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnGateway]:
    """Wants a key for all but health, over HTTP, and for inference and metadata, over gRPC."""
    rules = {
        "http_restricted_api": [
            "metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging:admin-key=se=cr:et"
        ],
        "grpc_restricted_protocol": ["inference,metadata:admin-key=se=cr:et"],
    }
    with own_gateway(tmp_path_factory.mktemp("locked"), server, **rules) as started:
        yield started


@pytest.fixture(scope="module")
def forwarding(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnGateway]:
    """Forwards headers that begin with `my-`, and some reserved ones."""
    pattern = "^my-|^priority$|^triton_"
    rules = {"http_header_forward_pattern": pattern, "grpc_header_forward_pattern": pattern}
    with own_gateway(tmp_path_factory.mktemp("forwarding"), server, **rules) as started:
        yield started


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("GET", "/v2?x=1"),
        ("GET", "/v2/models/told"),
        ("GET", "/v2/models/nowhere"),
        ("GET", "/v2/models/told/config"),
        ("GET", "/v2/models/told/stats"),
        ("GET", "/v2/models/stats"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/trace/setting"),
        ("GET", "/v2/models/told/trace/setting"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/told/load"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/cudasharedmemory/region/r/register"),
        ("POST", "/v2/models/told/infer"),
        ("POST", "/v2/models/told/versions/1/infer?x"),
        ("GET", "/v2/models/told/infer"),
        ("POST", "/v2/models/to%6cd/infer"),
        ("GET", "/v2%0a"),
        ("GET", "/v2/models/told/config%0a"),
        ("GET", "/%762/models/told"),
        ("GET", "/v2/models/to%2Fld/config"),
        ("POST", "/v2/models/told/generate%0a"),
        ("POST", "/v2/models/told/generate"),
        ("POST", "/v2/models/told/generate_stream"),
    ],
)
def test_without_the_key_nothing_is_told_over_http(locked: OwnGateway, method: str, path: str) -> None:
    for headers in ({}, {"admin-key": "other"}, {"admin-key": ""}):
        answer = httpx.request(method, f"http://{locked.http_place}{path}", headers=headers, content=b"{}")
        assert (answer.status_code, answer.json()) == (403, {"error": HTTP_REFUSAL})


def test_what_is_open_over_http(locked: OwnGateway) -> None:
    assert locked.is_ready()
    assert locked.is_ready("told")
    assert locked.get("/v2/nothing")[0] == 404
    assert locked.get("/v2%2Fmodels/told")[0] == 404, "an encoded slash is part of a name"


def test_the_key_opens_http(locked: OwnGateway) -> None:
    with httpx.Client(base_url=f"http://{locked.http_place}", headers=KEY) as client:
        assert client.get("/v2").status_code == 200
        assert client.get("/v2/models/told/config").status_code == 200
        assert client.post("/v2/models/told/infer", json=BODY).status_code == 200
        assert client.post("/v2/models/told/generate", json={"ANY": 1}).status_code == 200
        assert client.post("/v2/models/nowhere/infer", json=BODY).status_code == 404


def test_the_stock_http_client(locked: OwnGateway) -> None:
    with locked.http() as client:
        values = np.ones((1, 3), np.float32)
        for _ in range(3):  # the same header each time, as it is when requests are prepared
            with pytest.raises(InferenceServerException, match=HTTP_REFUSAL) as refusal:
                client.infer("same", http_inputs({"IN": values}))
            assert refusal.value.status() == "403"
            result = client.infer("same", http_inputs({"IN": values}), headers=dict(KEY))  # it adds its own
            assert (result.as_numpy("OUT") == values).all()


def test_the_stock_grpc_client(locked: OwnGateway) -> None:
    with locked.grpc() as client:
        assert client.is_server_live()
        assert client.get_model_config("told").config.name == "told"
        values = np.ones((1, 3), np.float32)
        for wrong in (None, {"triton-grpc-protocol-admin-key": "x"}, KEY):
            with pytest.raises(InferenceServerException) as refusal:
                client.get_server_metadata(headers=wrong)
            assert (refusal.value.status(), refusal.value.message()) == ("StatusCode.UNAVAILABLE", GRPC_REFUSAL)
            with pytest.raises(InferenceServerException) as refusal:
                client.infer("same", grpc_inputs({"IN": values}), headers=wrong)
            assert refusal.value.message() == GRPC_REFUSAL
            result = client.infer("same", grpc_inputs({"IN": values}), headers=GRPC_KEY)
            assert (result.as_numpy("OUT") == values).all()
        assert client.get_server_metadata(headers=GRPC_KEY).name == "triton"


def reply(result: Any) -> dict[str, Any]:
    return dict(json.loads(result.as_numpy("TOLD")[0, 0])["parameters"])


def test_headers_become_parameters_over_http(forwarding: OwnGateway) -> None:
    with forwarding.http() as client:
        for number in ("1", "2"):
            headers = {"My-Header": number, "other": "x"}
            asked = client.infer("told", http_inputs(ANY), headers=headers, parameters={"own": 5})
            assert reply(asked) == {"My-Header": number, "own": 5}
        assert reply(client.infer("told", http_inputs(ANY))) == {}


def test_headers_become_parameters_of_generate(forwarding: OwnGateway) -> None:
    url = f"http://{forwarding.http_place}/v2/models/told/generate"
    answer = httpx.post(url, json={"ANY": 1, "own": 5}, headers={"My-Header": "é☃".encode()})
    assert json.loads(answer.json()["TOLD"])["parameters"] == {"My-Header": "é☃", "own": 5}


def test_headers_become_parameters_over_grpc(forwarding: OwnGateway) -> None:
    with forwarding.grpc() as client:
        for number in ("1", "2"):
            headers = {"my-header": number, "other": "x"}
            asked = client.infer("told", grpc_inputs(ANY), headers=headers, parameters={"own": 5})
            assert reply(asked) == {"my-header": number, "own": 5}
        assert reply(client.infer("told", grpc_inputs(ANY))) == {}


def test_reserved_headers_are_refused(forwarding: OwnGateway) -> None:
    text = "Header '{}' is reserved for Triton usage and cannot be forwarded."
    with forwarding.http() as http, forwarding.grpc() as grpc:
        for name in ("priority", "triton_x"):
            with pytest.raises(InferenceServerException) as refusal:
                http.infer("told", http_inputs(ANY), headers={name: "1"})
            assert (refusal.value.status(), refusal.value.message()) == ("400", text.format(name))
            with pytest.raises(InferenceServerException) as refusal:
                grpc.infer("told", grpc_inputs(ANY), headers={name: "1"})
            assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert refusal.value.message() == text.format(name)
            assert grpc.is_server_live(headers={name: "1"})
    answer = httpx.post(
        f"http://{forwarding.http_place}/v2/models/told/generate", json={"ANY": 1}, headers={"priority": "1"}
    )
    assert (answer.status_code, answer.json()) == (400, {"error": text.format("priority")})


def test_headers_come_last_of_what_is_parsed(forwarding: OwnGateway) -> None:
    url = f"http://{forwarding.http_place}/v2/models/told/infer"
    answer = httpx.post(url, json={**BODY, "outputs": [{}]}, headers={"priority": "1"})
    assert "Unable to parse 'name'" in answer.json()["error"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"http_restricted_api": ["nothing:a=b"]}, "--http-restricted-api: unknown category 'nothing'"),
        ({"grpc_restricted_protocol": ["health"]}, "--grpc-restricted-protocol must have the form"),
        ({"http_header_forward_pattern": "("}, "--http-header-forward-pattern is no regular expression"),
    ],
)
def test_a_rule_that_is_none_keeps_the_gateway_from_starting(
    server: Server, tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    with own_gateway(tmp_path, server, **settings) as gateway:
        assert text in gateway.told.get("error", ""), gateway.log()


def test_a_gateway_without_http(server: Server, tmp_path: Path) -> None:
    with own_gateway(tmp_path, server, allow_http=False) as gateway:
        assert "http_port" not in gateway.told
        with gateway.grpc() as client:
            assert client.is_server_ready()


def test_gateways_that_share_a_port(server: Server, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with own_gateway(tmp_path / "first", server, reuse_http_port=True) as first:
        shared = {"http_port": first.port, "reuse_http_port": True}
        with own_gateway(tmp_path / "second", server, **shared) as second:
            assert second.port == first.port
            assert all(second.is_ready("same") for _ in range(10))
