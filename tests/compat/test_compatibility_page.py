"""Checks the statements of `docs/compatibility.md` on endpoints, methods and metrics against a running server."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from docs.compatibility_rows import ABSENT, ENDPOINTS, METHODS, METRICS, Row
from docs.metrics import families
from tests.support.models.zoo import write_python_model, write_small_zoo, write_streamer
from tests.support.servers.weir_server import Server

MODEL = "identity_FP32"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("compatibility")
    write_small_zoo(folder / "models")
    caching = "response_cache { enable: true }"  # families of caches are there where a model has one
    write_python_model(
        folder / "models", "caching", "identity", {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}, more=caching
    )
    # The histogram of first responses is there where a model is decoupled.
    write_streamer(folder / "models", "streamer", "")
    latencies = ("histogram_latencies=true", "summary_latencies=true")
    with Server(
        folder,
        folder / "models",
        "--cache-config=local,size=1000000",
        *(f"--metrics-config={setting}" for setting in latencies),
    ) as started:
        yield started


def paths(template: str) -> list[str]:
    """The URL with and without its optional part."""
    filled = template.replace("{m}", MODEL).replace("{v}", "1").replace("{r}", "region")
    without = re.sub(r"\[[^]]*\]", "", filled)
    whole = filled.replace("[", "").replace("]", "")
    return [without] if whole == without else [without, whole]


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: row.name)
def test_an_endpoint_is_there_or_not_as_the_page_says(server: Server, row: Row) -> None:
    method, _, template = row.name.partition(" ")
    for path in paths(template):
        connection = http.client.HTTPConnection(server.http_place, timeout=20)
        try:
            connection.request(method, path, b"{}" if method == "POST" else None)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        is_there = response.status != 405 and body != b'{"error":"Not Found"}'
        assert is_there == (row.state != ABSENT), (path, response.status, body)


def test_every_method_of_the_service_has_a_row() -> None:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert [row.name for row in METHODS] == [method.name for method in service.methods]


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
def test_a_method_is_there_or_not_as_the_page_says(server: Server, row: Row) -> None:
    with grpc.insecure_channel(server.grpc_place) as channel:
        ask = channel.stream_stream(f"/inference.GRPCInferenceService/{row.name}")
        try:
            answers = list(ask(iter([b""]), timeout=20))
        except grpc.RpcError as error:
            is_there = "unknown method" not in error.details()
        else:
            is_there = len(answers) == 1
    assert is_there == (row.state != ABSENT)


@pytest.fixture(scope="module")
def scrape(server: Server) -> set[str]:
    connection = http.client.HTTPConnection(server.metrics_place, timeout=20)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    return set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))


@pytest.mark.parametrize("row", METRICS, ids=lambda row: row.name)
def test_a_metric_is_there_or_not_as_the_page_says(scrape: set[str], row: Row) -> None:
    assert (row.name in scrape) == (row.state != ABSENT)


def test_every_metric_of_triton_that_is_there_has_a_row(scrape: set[str]) -> None:
    assert {name for name in scrape if name.startswith("nv_")} <= {row.name for row in METRICS}


def test_the_page_explains_every_row_that_is_not_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("different", "absent"):
            assert cells[2], f"no explanation: {line}"


def test_every_metric_of_weir_s_own_is_in_the_reference(scrape: set[str]) -> None:
    exported = {name for name in scrape if name.startswith("weir_")}
    assert exported
    assert exported - set(families()) == set()
