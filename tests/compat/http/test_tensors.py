"""Tensors of every datatype over HTTP: as JSON, binary and raw, with both stock clients and without."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio

from tests.support.models import zoo as model_zoo
from tests.support.models.http import serving, write
from tests.support.servers.weir_server import Server
from weir.schemas.core.tensors import DATATYPES

LENGTH = "inference-header-content-length"
JSON_DATATYPES = [name for name in DATATYPES if name not in ("FP16", "BF16")]
STRINGS = ["", "plain", "é☃𝄞", "a\0b\0", 'quo"te\\\n\t\x01\x7f', "\u2028" * 3]


def write_models(root: Path) -> None:
    for datatype in model_zoo.ONNX_TYPES:
        model_zoo.write_identity(root, f"same_{datatype}", datatype)
    write(root, "same_BF16", "identity", {"IN": ("BF16", [-1])}, {"IN_OUT": ("BF16", [-1])}, 8)
    pair: tuple[model_zoo.Tensors, model_zoo.Tensors] = (
        {"A": ("INT32", [-1]), "B": ("BYTES", [-1])},
        {"A_OUT": ("INT32", [-1]), "B_OUT": ("BYTES", [-1])},
    )
    write(root, "pair", "identity", *pair, 0)
    write(root, "blobs", "identity", {"IN": ("BYTES", [1])}, {"IN_OUT": ("BYTES", [1])}, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("tensors"), write_models) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_place}", timeout=30) as client:
        client.headers.pop("accept-encoding")
        yield client


@pytest.fixture(scope="module")
def stock(server: Server) -> Iterator[tritonclient.http.InferenceServerClient]:
    with server.http() as client:
        yield client


def values(datatype: str) -> np.ndarray:
    """One row with the ends of a datatype's range, and what lies between."""
    if datatype == "BYTES":
        return np.array([[text.encode() for text in STRINGS]], np.object_)
    if datatype == "BOOL":
        return np.array([[True, False, True]])
    if datatype == "BF16":
        return np.array([[0, 1, -2.5, 3.3895314e38, np.inf, np.nan]], ml_dtypes.bfloat16)
    dtype = DATATYPES[datatype].numpy
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return np.array([[0, -0.0, 0.1, limits.max, limits.min, limits.tiny, np.inf, -np.inf, np.nan]], dtype)
    bounds = np.iinfo(dtype)
    return np.array([[0, 1, bounds.max, bounds.min]], dtype)


def output(datatype: str) -> str:
    return "IN_OUT" if datatype == "BF16" else "OUT"


def packed(array: np.ndarray, datatype: str) -> bytes:
    """The content as it travels."""
    if datatype == "BYTES":
        # The stock client makes text of what came as JSON.
        raw = [element.encode() if isinstance(element, str) else element for element in array.ravel()]
        return b"".join(struct.pack("<I", len(element)) + element for element in raw)
    return array.tobytes()


def assert_same(got: Any, array: np.ndarray, datatype: str) -> None:
    assert got is not None
    assert got.shape == array.shape
    assert packed(got, datatype) == packed(array, datatype) or np.array_equal(got, array, equal_nan=True)


def stock_input(module: Any, array: np.ndarray, datatype: str, binary: bool) -> Any:
    made = module.InferInput("IN", list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


FORMS = [(d, b) for d in DATATYPES for b in (True, False) if b or d in JSON_DATATYPES]
BOTH_WAYS = [(d, b, out) for d, b in FORMS for out in (True, False) if out or d in JSON_DATATYPES]


@pytest.mark.parametrize(("datatype", "binary", "binary_out"), BOTH_WAYS)
def test_the_stock_client(
    stock: tritonclient.http.InferenceServerClient, datatype: str, binary: bool, binary_out: bool
) -> None:
    array = values(datatype)
    name = output(datatype)
    for rows in (array, np.repeat(array, 3, 0), array[:, :0]):
        result = stock.infer(
            f"same_{datatype}",
            [stock_input(tritonclient.http, rows, datatype, binary)],
            outputs=[tritonclient.http.InferRequestedOutput(name, binary_data=binary_out)],
        )
        if rows.size or binary_out:
            assert_same(result.as_numpy(name), rows, datatype)
        assert result.get_output(name)["shape"] == list(rows.shape)
        assert result.get_output(name)["datatype"] == datatype


def test_the_stock_client_with_asyncio(server: Server) -> None:
    async def ask() -> None:
        aio = tritonclient.http.aio
        async with aio.InferenceServerClient(server.http_place) as client:
            for datatype, binary in FORMS:
                array = values(datatype)
                given = [stock_input(aio, array, datatype, binary)]
                result = await client.infer(f"same_{datatype}", given)
                assert_same(result.as_numpy(output(datatype)), array, datatype)
                if datatype in JSON_DATATYPES:
                    wanted = [aio.InferRequestedOutput(output(datatype), binary_data=False)]
                    result = await client.infer(f"same_{datatype}", given, outputs=wanted)
                    assert_same(result.as_numpy(output(datatype)), array, datatype)

    asyncio.run(ask())


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
def test_json_without_a_client(http: httpx.Client, datatype: str) -> None:
    array = values(datatype)
    data: Any = STRINGS if datatype == "BYTES" else array.ravel().tolist()
    row = {"name": "IN", "shape": list(array.shape), "datatype": datatype, "data": data}
    answer = http.post(f"/v2/models/same_{datatype}/infer", content=json.dumps({"inputs": [row]}))
    assert answer.headers["content-type"] == "application/json"
    (reply,) = answer.json()["outputs"]
    assert (reply["name"], reply["datatype"], reply["shape"]) == ("OUT", datatype, list(array.shape))
    assert set(reply) == {"name", "datatype", "shape", "data"}
    assert json.dumps(reply["data"]) == json.dumps(data)
    row["data"] = [[[item] for item in data]]  # only the order of elements matters
    answer = http.post(f"/v2/models/same_{datatype}/infer", content=json.dumps({"inputs": [row]}))
    assert json.dumps(answer.json()["outputs"][0]["data"]) == json.dumps(data)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_binary_without_a_client(http: httpx.Client, datatype: str) -> None:
    array = values(datatype)
    content = packed(array, datatype)
    parameters = {"binary_data_size": len(content)}
    row = {"name": "IN", "shape": list(array.shape), "datatype": datatype, "parameters": parameters}
    header = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    answer = http.post(
        f"/v2/models/same_{datatype}/infer", content=header + content, headers={LENGTH: str(len(header))}
    )
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[LENGTH])
    (reply,) = json.loads(answer.content[:length])["outputs"]
    assert reply["parameters"] == parameters
    assert "data" not in reply
    assert answer.content[length:] == content


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_raw(http: httpx.Client, datatype: str) -> None:
    content = packed(values(datatype), datatype)
    answer = http.post(f"/v2/models/same_{datatype}/infer", content=content, headers={LENGTH: "0"})
    length = int(answer.headers[LENGTH])
    (reply,) = json.loads(answer.content[:length])["outputs"]
    assert reply["shape"] == [1, values(datatype).size]
    assert answer.content[length:] == content


@pytest.mark.parametrize("blob", [b"plain", "é☃".encode(), b"a\0b\0", b"\xff\xfe\x00", b"{}", b"\1" * 300_000])
def test_a_raw_blob(http: httpx.Client, blob: bytes) -> None:
    answer = http.post("/v2/models/blobs/infer", content=blob, headers={LENGTH: "0"})
    assert answer.content.endswith(struct.pack("<I", len(blob)) + blob)


def test_strings_of_any_bytes_travel_as_binary(stock: tritonclient.http.InferenceServerClient) -> None:
    array = np.array([[b"\xff\xfe", b"\0", b"", bytes(range(256)), b"x" * 100_000]], np.object_)
    made = tritonclient.http.InferInput("IN", [5], "BYTES")
    made.set_data_from_numpy(array[0])
    number = tritonclient.http.InferInput("A", [1], "INT32")
    number.set_data_from_numpy(np.ones(1, np.int32))
    made._name = "B"
    result = stock.infer("pair", [number, made])
    assert result.as_numpy("B_OUT").tolist() == array[0].tolist()


# Mixtures, on a model with two inputs and two outputs

A = np.array([5, 6], np.int32)
B = [b"x", b"yz"]
B_CONTENT = packed(np.array(B, np.object_), "BYTES")


def mixed(binary_a: bool, binary_b: bool, **more: Any) -> tuple[bytes, dict[str, str]]:
    a: dict[str, Any] = {"name": "A", "shape": [2], "datatype": "INT32"}
    b: dict[str, Any] = {"name": "B", "shape": [2], "datatype": "BYTES"}
    content = b""
    for row, binary, data, raw in ((a, binary_a, A.tolist(), A.tobytes()), (b, binary_b, ["x", "yz"], B_CONTENT)):
        if binary:
            row["parameters"] = {"binary_data_size": len(raw)}
            content += raw
        else:
            row["data"] = data
    header = json.dumps({"inputs": [a, b], **more}).encode()
    return header + content, {LENGTH: str(len(header))}


def split(answer: httpx.Response) -> tuple[dict[str, dict[str, Any]], bytes]:
    """(the outputs by name, what follows the JSON)."""
    assert answer.status_code == 200, answer.text
    length = int(answer.headers.get(LENGTH, len(answer.content)))
    assert answer.headers["content-type"] == (
        "application/json" if length == len(answer.content) else "application/octet-stream"
    )
    document = json.loads(answer.content[:length])
    return {row["name"]: row for row in document["outputs"]}, answer.content[length:]


@pytest.mark.parametrize("binary_a", [True, False])
@pytest.mark.parametrize("binary_b", [True, False])
def test_inputs_of_both_kinds(http: httpx.Client, binary_a: bool, binary_b: bool) -> None:
    content, headers = mixed(binary_a, binary_b)
    outputs, rest = split(http.post("/v2/models/pair/infer", content=content, headers=headers))
    assert rest == b""
    assert (outputs["A_OUT"]["data"], outputs["B_OUT"]["data"]) == ([5, 6], ["x", "yz"])


BINARY = {"binary_data": True}
ALL_BINARY = {"parameters": {"binary_data_output": True}}


@pytest.mark.parametrize(
    ("asked", "json_outputs", "rest"),
    [
        ({}, {"A_OUT", "B_OUT"}, b""),
        (ALL_BINARY, set(), A.tobytes() + B_CONTENT),
        ({**ALL_BINARY, "outputs": []}, set(), A.tobytes() + B_CONTENT),
        # What is listed decides for itself.
        ({**ALL_BINARY, "outputs": [{"name": "A_OUT"}]}, {"A_OUT"}, b""),
        ({"outputs": [{"name": "A_OUT", "parameters": BINARY}, {"name": "B_OUT"}]}, {"B_OUT"}, A.tobytes()),
        ({"outputs": [{"name": "B_OUT", "parameters": BINARY}, {"name": "A_OUT"}]}, {"A_OUT"}, B_CONTENT),
        ({"outputs": [{"name": "B_OUT", "parameters": {"binary_data": False}}]}, {"B_OUT"}, b""),
        (
            {"outputs": [{"name": "B_OUT", "parameters": BINARY}, {"name": "A_OUT", "parameters": BINARY}]},
            set(),
            A.tobytes() + B_CONTENT,
        ),
    ],
)
def test_outputs_of_both_kinds(http: httpx.Client, asked: dict[str, Any], json_outputs: set[str], rest: bytes) -> None:
    content, headers = mixed(True, False, **asked)
    outputs, reply = split(http.post("/v2/models/pair/infer", content=content, headers=headers))
    assert {name for name, row in outputs.items() if "data" in row} == json_outputs
    assert reply == rest


def test_empty_binary_outputs_make_no_binary_answer(http: httpx.Client) -> None:
    rows = [{"name": n, "shape": [0], "datatype": d, "data": []} for n, d in (("A", "INT32"), ("B", "BYTES"))]
    outputs, rest = split(http.post("/v2/models/pair/infer", content=json.dumps({"inputs": rows, **ALL_BINARY})))
    assert rest == b""
    assert outputs["A_OUT"]["parameters"] == outputs["B_OUT"]["parameters"] == {"binary_data_size": 0}
    assert outputs["A_OUT"]["shape"] == [0]


def test_integers_beyond_their_width_are_cut(http: httpx.Client) -> None:
    row = {"name": "IN", "shape": [1, 3], "datatype": "INT32", "data": [2**31, 2**32 + 1, -(2**31) - 1]}
    answer = http.post("/v2/models/same_INT32/infer", content=json.dumps({"inputs": [row]}))
    assert answer.json()["outputs"][0]["data"] == [-(2**31), 1, 2**31 - 1]


def test_literals_that_json_lacks(http: httpx.Client) -> None:
    text = '{"inputs":[{"name":"IN","shape":[1,4],"datatype":"FP32","data":[NaN,Infinity,-Infinity,Inf]}]}'
    answer = http.post("/v2/models/same_FP32/infer", content=text)
    assert b'"data":[NaN,Infinity,-Infinity,Infinity]' in answer.content


def test_what_a_body_says_of_the_model_is_ignored(http: httpx.Client) -> None:
    content, headers = mixed(False, False, model_name="other", model_version="7", more=[1])
    answer = http.post("/v2/models/pair/versions/1/infer", content=content, headers=headers)
    assert (answer.json()["model_name"], answer.json()["model_version"]) == ("pair", "1")
    assert "id" not in answer.json()


@pytest.mark.parametrize("id_", ["x", "é☃", "a\0b", "x" * 1000])
def test_an_id_comes_back(http: httpx.Client, id_: str) -> None:
    content, headers = mixed(True, True, id=id_)
    assert http.post("/v2/models/pair/infer", content=content, headers=headers).json()["id"] == id_
