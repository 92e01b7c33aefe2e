"""The generate extension over HTTP: texts and placement of errors, compared with a running Triton 2.51."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import zoo as model_zoo
from tests.support.models.http import make_optional, serving, write, write_told
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

SSE = "text/event-stream; charset=utf-8"


def write_models(root: Path) -> None:
    write_told(root)
    model_zoo.write_identity(root, "same", "FP32")
    inputs: model_zoo.Tensors = {"text_input": ("BYTES", [-1]), "COUNT": ("INT32", [1])}
    outputs: model_zoo.Tensors = {"text_output": ("BYTES", [-1]), "scores": ("FP32", [-1])}
    make_optional(write(root, "sentence", "sentence", inputs, outputs), "COUNT")
    decoupled = "model_transaction_policy { decoupled: true }"
    outputs = {"text_output": ("BYTES", [1]), "number": ("INT32", [1])}
    write(root, "repeat", "repeat", {**inputs, "text_input": ("BYTES", [1])}, outputs, 0, decoupled)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("generate"), write_models, "sentence", "told", "same") as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http_place}", timeout=30) as client:
        yield client


def ask(http: httpx.Client, document: Any, model: str = "sentence", **options: Any) -> tuple[int, Any]:
    """(status, document) of both routes, which must agree but for the form."""
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    one = http.post(f"/v2/models/{model}/generate", content=content, **options)
    stream = http.post(f"/v2/models/{model}/generate_stream", content=content, **options)
    assert one.headers["content-type"] == "application/json"
    assert stream.status_code == one.status_code
    if stream.headers["content-type"] == SSE:
        assert stream.content == b"data: %b\n\n" % one.content
    else:
        assert (stream.headers["content-type"], stream.content) == ("application/json", one.content)
        assert one.status_code >= 400
    return one.status_code, one.json()


def sentence(**outputs: Any) -> dict[str, Any]:
    return {"model_name": "sentence", "model_version": "1", **outputs}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"text_input": "hello"}, sentence(scores=0.0, text_output="hello")),
        ({"text_input": "hello", "id": "7"}, sentence(scores=0.0, text_output="hello", id="7")),
        ({"text_input": "a", "COUNT": 3}, sentence(scores=0.0, text_output=["a", "a", "a"])),
        ({"text_input": "a", "COUNT": [2]}, sentence(scores=0.0, text_output=["a", "a"])),
        ({"text_input": ["a", "b"]}, sentence(scores=[0.0, 1.0], text_output=["a", "b"])),
        ({"text_input": "a", "COUNT": 0}, sentence(scores=0.0, text_output=[])),
        ({"text_input": "é☃𝄞a\0b"}, sentence(scores=0.0, text_output="é☃𝄞a\0b")),
        ({"text_input": "a", "stream": True, "priority": -1, "triton_x": 1}, sentence(scores=0.0, text_output="a")),
        ({"parameters": {"text_input": "a", "x": 1}}, sentence(scores=0.0, text_output="a")),
    ],
)
def test_what_is_answered(http: httpx.Client, document: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ask(http, document) == (200, expected)


def test_what_the_model_is_told(http: httpx.Client) -> None:
    document = {"ANY": [1, 2], "id": "i", "x": 1.5, "sequence_id": 5, "parameters": {"y": "z", "big": 2**63}}
    status, answer = ask(http, document, "told")
    assert status == 200
    assert json.loads(answer["TOLD"]) == {
        "id": "i",
        "inputs": {"ANY": [2, 1]},
        "outputs": ["TOLD"],
        "parameters": {"id": "i", "x": 1.5, "sequence_id": 5, "y": "z", "big": float(2**63)},
    }
    # What the model adds to its answer stands beside the outputs.
    assert (answer["text"], answer["number"], answer["flag"]) == ("a", 7, True)


def test_what_is_not_finite(http: httpx.Client) -> None:
    answer = http.post("/v2/models/same/generate", content=b'{"IN": [NaN, -Infinity, 1]}')
    assert answer.content == b'{"OUT":[NaN,-Infinity,1.0],"model_name":"same","model_version":"1"}'
    answer = http.post("/v2/models/same/generate", content=b'{"IN": NaN}')
    assert answer.content == b'{"OUT":NaN,"model_name":"same","model_version":"1"}'


@pytest.mark.parametrize(
    ("document", "status", "text"),
    [
        (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"[]", 500, "attempt to get members for non-object"),
        ({"text_input": "a", "id": 7}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"text_input": 5}, 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (
            {"text_input": "a", "x": [1]},
            400,
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"text_input": "a", "parameters": 5},
            500,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        (
            {"text_input": "a", "parameters": {"x": None}},
            400,
            "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be either 'int', 'bool', or "
            "'string'.",
        ),
        (
            {"text_input": "a", "COUNT": [1, 2]},
            400,
            "The schema can not convert input 'COUNT' to tensor with proper shape",
        ),
        (
            {},
            400,
            "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 0 inputs for model "
            "'sentence'. Got input(s) [], but missing required input(s) ['text_input']. Please provide all required "
            "input(s).",
        ),
        ({"text_input": "error"}, 500, "as you asked"),
    ],
)
def test_what_is_refused(http: httpx.Client, document: Any, status: int, text: str) -> None:
    assert ask(http, document) == (status, {"error": text})


def test_an_error_of_the_model_comes_as_an_event(http: httpx.Client) -> None:
    answer = http.post("/v2/models/sentence/generate_stream", json={"text_input": "error"})
    assert (answer.status_code, answer.headers["content-type"]) == (500, SSE)
    assert answer.content == b'data: {"error":"as you asked"}\n\n'


def test_an_error_before_it_does_not(http: httpx.Client) -> None:
    answer = http.post("/v2/models/sentence/generate_stream", json={"text_input": 5})
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("nowhere", 404, "Request for unknown model: 'nowhere' is not found"),
        ("sentence/versions/9", 404, "Request for unknown model: 'sentence' version 9 is not found"),
        ("sentence/versions/x", 404, "Not Found"),
    ],
)
def test_models_that_are_not_there(http: httpx.Client, model: str, status: int, text: str) -> None:
    assert ask(http, b"{", model) == (status, {"error": text})


def test_a_version(http: httpx.Client) -> None:
    assert ask(http, {"text_input": "a"}, "sentence/versions/1")[0] == 200


def test_encodings(http: httpx.Client) -> None:
    zipped = gzip.compress(b'{"text_input": "a"}')
    refusal = (400, {"error": "Unsupported content-encoding, only 'identity' is supported."})
    assert ask(http, zipped, headers={"content-encoding": "gzip"}) == refusal
    assert ask(http, b"{", headers={"content-encoding": "br"}) == refusal
    assert ask(http, {"text_input": "a"}, headers={"content-encoding": "identity"})[0] == 200
    assert ask(http, b"{", "nowhere", headers={"content-encoding": "br"})[0] == 404
    answer = http.post("/v2/models/sentence/generate", json={"text_input": "a"}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in answer.headers


def test_one_connection_for_many(server: Server, http: httpx.Client) -> None:
    for number in range(20):
        with http.stream("POST", "/v2/models/sentence/generate_stream", json={"text_input": str(number)}) as answer:
            (line,) = [line for line in answer.iter_lines() if line]
        assert json.loads(line.removeprefix("data: "))["text_output"] == str(number)
    wait_until(lambda: server.in_flight() == 0)


# Decoupled models


WRONG_COUNT = {
    "error": "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
}


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"] == SSE
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_decoupled_model(http: httpx.Client, count: int) -> None:
    document = {"text_input": "a", "COUNT": count, "id": "7"}
    stream = http.post("/v2/models/repeat/generate_stream", json=document)
    expected = [
        {"id": "7", "model_name": "repeat", "model_version": "1", "number": number, "text_output": "a"}
        for number in range(count)
    ]
    assert (stream.status_code, events(stream)) == (200, expected)
    one = http.post("/v2/models/repeat/generate", json=document)
    assert (one.status_code, one.json()) == (200, expected[0] if count == 1 else WRONG_COUNT)


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_of_a_decoupled_model(http: httpx.Client, count: int) -> None:
    document = {"text_input": "error", "COUNT": count}
    stream = http.post("/v2/models/repeat/generate_stream", json=document)
    assert stream.status_code == (200 if count else 500)
    assert events(stream)[count:] == [{"error": "as you asked"}]
    one = http.post("/v2/models/repeat/generate", json=document)
    assert (one.status_code, one.json()) == ((200, WRONG_COUNT) if count else (500, {"error": "as you asked"}))


def test_a_decoupled_model_on_the_infer_route(http: httpx.Client) -> None:
    answer = http.post("/v2/models/repeat/infer", content=b"{")
    text = "HTTP end point doesn't support models with decoupled transaction policy"
    assert (answer.status_code, answer.json()) == (501, {"error": text})
