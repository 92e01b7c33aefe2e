"""Triton's responses to invalid requests over HTTP: one test per row, with status and whole text.

Requests are sent over raw HTTP, and with the stock client if it can send them. Texts were compared with a running
Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support.models import zoo as model_zoo
from tests.support.models.http import make_optional, serving, write
from tests.support.rejections.http import BODIES, NO_SOURCE, UNKNOWN, body, one, parse
from tests.support.servers.weir_server import Server

INFER = "/v2/models/pair/infer"


def write_models(root: Path) -> None:
    pair: tuple[model_zoo.Tensors, model_zoo.Tensors] = (
        {"A": ("INT32", [4]), "B": ("INT32", [4])},
        {"A_OUT": ("INT32", [4]), "B_OUT": ("INT32", [4])},
    )
    write(root, "pair", "identity", *pair, 8)
    make_optional(write(root, "optional", "identity", *pair, 8), "B")
    grid: model_zoo.Tensors = {"X": ("FP32", [-1, -1])}
    write(root, "grid", "identity", grid, {"X_OUT": ("FP32", [-1, -1])})
    model_zoo.write_identity(root, "strings", "BYTES")
    model_zoo.write_identity(root, "halves", "FP16")
    model_zoo.write_faulty(root)
    model_zoo.write_versions(root, "versions", "version_policy { specific { versions: [1, 3] } }")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("errors"), write_models) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_place}", timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def stock(server: Server) -> Iterator[triton.InferenceServerClient]:
    with server.http() as client:
        yield client


@pytest.mark.parametrize("case", BODIES)
def test_a_bad_body(http: httpx.Client, case: str) -> None:
    content, status, text = BODIES[case]
    answer = http.post(INFER, content=content)
    assert (answer.status_code, answer.json()) == (status, {"error": text})
    assert answer.headers["content-type"] == "application/json"


def infer(model: str, *inputs: dict[str, Any], **more: Any) -> tuple[str, bytes]:
    return f"/v2/models/{model}/infer", body(*inputs, **more)


VERSION = "failed to get model version from specified version string '99999999999999999999' (details: stol), "

REQUESTS: dict[str, tuple[tuple[str, bytes], int, str]] = {
    "unknown model": (infer("nowhere"), 404, "Request for unknown model: 'nowhere' is not found"),
    "unknown model before bad JSON": (
        ("/v2/models/nowhere/infer", b"{"),
        404,
        "Request for unknown model: 'nowhere' is not found",
    ),
    "unknown version": (
        ("/v2/models/versions/versions/9/infer", b""),
        404,
        "Request for unknown model: 'versions' version 9 is not found",
    ),
    "version beyond int64": (
        ("/v2/models/pair/versions/99999999999999999999/infer", b""),
        400,
        VERSION + "version should be an integral value > 0",
    ),
    "version that is no number": (("/v2/models/pair/versions/x/infer", b""), 404, "Not Found"),
    "trailing slash": (("/v2/models/pair/infer/", b"{}"), 404, "Not Found"),
    "too many inputs, some optional": (
        infer("optional"),
        400,
        UNKNOWN
        + "expected number of inputs between 1 and 2 but got 0 inputs for model 'optional'. Got input(s) [], but "
        "missing required input(s) ['A']. Please provide all required input(s).",
    ),
    "wrong shape without batching": (
        infer("grid", one("X", datatype="FP32", shape=[4])),
        400,
        UNKNOWN + "unexpected shape for input 'X' for model 'grid'. Expected [-1,-1], got [4]. ",
    ),
    "too few strings": (
        infer("strings", one("IN", datatype="BYTES", shape=[1, 2], data=["a"])),
        400,
        UNKNOWN + "expected 2 string elements for inference input 'IN' for model 'strings', got 1",
    ),
    "too many strings": (
        infer("strings", one("IN", datatype="BYTES", shape=[1, 1], data=["a", "b"])),
        400,
        UNKNOWN + "unexpected number of string elements 2 for inference input 'IN' for model 'strings', expecting 1",
    ),
    "numbers for strings": (
        infer("strings", one("IN", datatype="BYTES", shape=[1, 1], data=[1])),
        500,
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    ),
    "classes of strings": (
        infer(
            "strings",
            one("IN", datatype="BYTES", shape=[1, 1], data=["a"]),
            outputs=[{"name": "OUT", "parameters": {"classification": 1}}],
        ),
        400,
        "class result not available for output due to unsupported type 'BYTES'",
    ),
    "an error of the model": (
        infer("faulty", one("WHAT", datatype="BYTES", shape=[1, 1], data=["error"])),
        404,
        "as you asked",
    ),
    "cancelled by the model": (
        infer("faulty", one("WHAT", datatype="BYTES", shape=[1, 1], data=["cancelled"])),
        400,
        "given up",
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_bad_request(http: httpx.Client, case: str) -> None:
    (path, content), status, text = REQUESTS[case]
    answer = http.post(path, content=content)
    assert (answer.status_code, answer.json()) == (status, {"error": text})
    assert answer.headers["content-type"] == "application/json"


def test_a_model_that_raises(http: httpx.Client) -> None:
    path, content = infer("faulty", one("WHAT", datatype="BYTES", shape=[1, 1], data=["raise"]))
    answer = http.post(path, content=content)
    assert answer.status_code == 500
    start = "Failed to process the request(s) for model 'faulty_0', message: ValueError: asked to raise"
    assert answer.json()["error"].startswith(start)


def binary(*sizes: int, shape: tuple[int, ...] = (1, 4)) -> bytes:
    return body(
        *(
            one(name, data=None, shape=list(shape), parameters={"binary_data_size": size})
            for name, size in zip("AB", sizes, strict=True)
        )
    )


HEADER = "inference-header-content-length"
GOOD = binary(16, 16)

BINARIES: dict[str, tuple[bytes, bytes, str | None, str]] = {
    "too short": (
        GOOD,
        bytes(28),
        None,
        "unexpected size for input 'B', expecting 4 additional bytes for model 'pair'",
    ),
    "too long": (GOOD, bytes(33), None, "unexpected additional input data for model 'pair'"),
    "not the shape's size": (
        binary(12, 16),
        bytes(28),
        None,
        UNKNOWN + "input byte size mismatch for input 'A' for model 'pair'. Expected 16, got 12",
    ),
    "header longer than the body": (
        GOOD,
        bytes(32),
        "9999",
        f"inference header size should be in range (0, {len(GOOD) + 32}), got: 9999",
    ),
    "negative header": (
        GOOD,
        bytes(32),
        "-1",
        f"inference header size should be in range (0, {len(GOOD) + 32}), got: -1",
    ),
    "no number": (GOOD, bytes(32), "ten", "Unable to parse Inference-Header-Content-Length, got: ten"),
    "raw for two inputs": (
        b"",
        bytes(32),
        "0",
        UNKNOWN + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'pair' model "
        "configuration",
    ),
}


@pytest.mark.parametrize("case", BINARIES)
def test_a_bad_binary_request(http: httpx.Client, case: str) -> None:
    header, content, length, text = BINARIES[case]
    answer = http.post(INFER, content=header + content, headers={HEADER: length or str(len(header))})
    assert (answer.status_code, answer.json()) == (400, {"error": text})


STRINGS = [
    (
        b"\1\0",
        UNKNOWN + "incomplete string length indicator for inference input 'IN' for model 'strings', expecting 4 bytes "
        "but only 2 bytes available. Please make sure the string length indicator is in one buffer.",
    ),
    (
        b"\5\0\0\0ab",
        "incomplete string data for inference input 'IN', expecting string of length 5 but only 2 bytes available",
    ),
]


@pytest.mark.parametrize(("content", "text"), STRINGS)
def test_bad_strings(http: httpx.Client, content: bytes, text: str) -> None:
    row = one("IN", datatype="BYTES", shape=[1, 1], data=None, parameters={"binary_data_size": len(content)})
    answer = http.post("/v2/models/strings/infer", content=body(row) + content, headers={HEADER: str(len(body(row)))})
    assert (answer.status_code, answer.json()) == (400, {"error": text})


RAW = [
    (
        "grid",
        bytes(16),
        "The shape of the raw input 'X' can not be deduced because there are more than one variable-sized dimension",
    ),
    ("strings", b"a", "For BYTE datatype raw input 'IN', the model must have input shape [1]"),
]


@pytest.mark.parametrize(("model", "content", "text"), RAW)
def test_a_raw_request_that_tells_too_little(http: httpx.Client, model: str, content: bytes, text: str) -> None:
    answer = http.post(f"/v2/models/{model}/infer", content=content, headers={HEADER: "0"})
    assert (answer.status_code, answer.json()) == (400, {"error": UNKNOWN + text})


def test_an_output_of_fp16_as_json(http: httpx.Client) -> None:
    header = body(one("IN", datatype="FP16", shape=[1, 2], data=None, parameters={"binary_data_size": 4}))
    answer = http.post("/v2/models/halves/infer", content=header + bytes(4), headers={HEADER: str(len(header))})
    text = "sending FP16 data via JSON is not supported. Please use the binary data format for output"
    assert (answer.status_code, answer.json()) == (400, {"error": text})


def test_what_is_checked_first(http: httpx.Client) -> None:
    unknown = http.post("/v2/models/nowhere/infer", content=b"{", headers={"content-encoding": "br"})
    assert unknown.status_code == 404
    encoding = http.post(INFER, content=b"{", headers={"content-encoding": "br", HEADER: "x"})
    assert encoding.json() == {"error": "Unsupported compression type"}
    length = http.post(INFER, content=b"{", headers={HEADER: "x"})
    assert length.json() == {"error": "Unable to parse Inference-Header-Content-Length, got: x"}
    id_ = http.post(INFER, content=b'{"id": 1, "parameters": {"triton_x": 1}, "inputs": [{}]}')
    assert id_.json() == {"error": parse("id", "string")}
    parameters = http.post(INFER, content=b'{"parameters": {"x": []}, "inputs": [{}]}')
    assert "parameter 'x' has invalid type" in parameters.json()["error"]
    inputs = http.post(INFER, content=b'{"inputs": [{}], "outputs": [{}]}')
    assert inputs.json() == {"error": NO_SOURCE + "no field is set"}
    good = body(one(), one("B"), outputs=[{}])
    leftover = http.post(INFER, content=good + b"x", headers={HEADER: str(len(good))})
    assert leftover.json() == {"error": "unexpected additional input data for model 'pair'"}
    output = http.post(INFER, content=body(one(), outputs=[{"name": "Z"}]))
    assert output.json() == {"error": "unexpected inference output 'Z' for model 'pair'"}


def test_the_root_tells_where_the_api_is_described(http: httpx.Client) -> None:
    answer = http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    for path in ("/docs", "/openapi.json", "/v2"):
        assert f"\n{path} " in answer.text
        assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/", 404),
        ("POST", "/", 405),
        ("GET", "/v3", 404),
        ("GET", "/v2/models/pair/", 404),
        ("GET", "/v2/models/pair/ready/", 404),
        ("GET", "/v2/health/live/", 404),
        ("GET", "/v2/models/pair/nothing", 404),
        ("GET", "/v2/models/pair/versions/x", 404),
        ("GET", "/v2/models/pair/versions", 404),
        ("POST", "/v2/health/live", 405),
        ("POST", "/v2/models/pair/ready", 405),
        ("PUT", "/v2/health/ready", 405),
        ("GET", INFER, 405),
        ("DELETE", INFER, 405),
        ("GET", "/v2/models/pair/generate", 405),
        ("PUT", "/v2/models/pair/generate_stream", 405),
        ("GET", "/v2/models/pair/versions/1/infer", 405),
    ],
)
def test_a_path_or_a_verb_that_is_not_there(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    text = {404: "Not Found", 405: "Method Not Allowed"}[status]
    assert (answer.status_code, answer.json()) == (status, {"error": text})


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/pair/versions/01/ready", 200),
        (f"/v2/models/pair/versions/{'0' * 5000}1/ready", 200),
        ("/v2/models/versions/versions/1/ready", 200),
        ("/v2/models/versions/versions/2/ready", 400),
        ("/v2/models/nowhere/ready", 400),
    ],
)
def test_readiness_of_versions(http: httpx.Client, path: str, status: int) -> None:
    answer = http.get(path)
    assert answer.status_code == status
    assert answer.content == (b"" if status == 200 else b'{"error":"Model version not ready"}')


@pytest.mark.parametrize("digits", [20, 5000])  # int() raises for the latter
def test_a_version_that_can_not_be(http: httpx.Client, digits: int) -> None:
    for path in ("", "/ready", "/config"):
        answer = http.get(f"/v2/models/pair/versions/{'9' * digits}{path}")
        text = f"{VERSION.replace('9' * 20, '9' * digits)}version should be an integral value > 0"
        assert (answer.status_code, answer.json()["error"]) == (400, text)


# The stock client


def inputs(*arrays: np.ndarray, names: str = "AB", datatype: str = "INT32") -> list[triton.InferInput]:
    made = []
    for name, array in zip(names, arrays, strict=False):
        made.append(triton.InferInput(name, list(array.shape), datatype))
        made[-1].set_data_from_numpy(array)
    return made


ROW = np.arange(4, dtype=np.int32).reshape(1, 4)

STOCK: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown model": (
        {"model_name": "nowhere", "inputs": inputs(ROW, ROW)},
        "404",
        "Request for unknown model: 'nowhere' is not found",
    ),
    "unknown version": (
        {"model_name": "pair", "model_version": "9", "inputs": inputs(ROW, ROW)},
        "404",
        "Request for unknown model: 'pair' version 9 is not found",
    ),
    "too few inputs": ({"model_name": "pair", "inputs": inputs(ROW)}, "400", BODIES["too few inputs"][2]),
    "unknown input": (
        {"model_name": "pair", "inputs": inputs(ROW, ROW, names="CB")},
        "400",
        "unexpected inference input 'C' for model 'pair'",
    ),
    "wrong shape": (
        {"model_name": "pair", "inputs": inputs(ROW[:, :2], ROW)},
        "400",
        BODIES["wrong shape"][2],
    ),
    "batches that differ": (
        {"model_name": "pair", "inputs": inputs(np.repeat(ROW, 2, 0), ROW)},
        "400",
        BODIES["batches that differ"][2],
    ),
    "batch over the limit": (
        {"model_name": "pair", "inputs": inputs(np.repeat(ROW, 9, 0), np.repeat(ROW, 9, 0))},
        "400",
        BODIES["batch over the limit"][2],
    ),
    "unknown output": (
        {"model_name": "pair", "inputs": inputs(ROW, ROW), "outputs": [triton.InferRequestedOutput("Z")]},
        "400",
        BODIES["unknown output"][2],
    ),
    "named request": (
        {"model_name": "pair", "inputs": inputs(ROW), "request_id": "mine"},
        "400",
        BODIES["named request"][2],
    ),
}


@pytest.mark.parametrize("case", STOCK)
def test_what_the_stock_client_is_told(stock: triton.InferenceServerClient, case: str) -> None:
    arguments, status, text = STOCK[case]
    with pytest.raises(InferenceServerException) as refusal:
        stock.infer(**arguments)
    assert (refusal.value.status(), refusal.value.message()) == (status, text)


def test_the_stock_client_asks_for_what_is_not_there(stock: triton.InferenceServerClient) -> None:
    assert not stock.is_model_ready("nowhere")
    assert not stock.is_model_ready("versions", "2")
    assert stock.is_model_ready("versions", "3")
    for ask in (stock.get_model_metadata, stock.get_model_config):
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nowhere' is not found"):
            ask("nowhere")
