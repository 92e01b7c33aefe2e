"""What `weir infer` prints of the responses of a server, whatever they hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from weir.commands.infer.run import InferOptions, run
from weir.errors import StartError

CONFIG = {
    "name": "m",
    "input": [{"name": "x", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
}


class FakeServer:
    """A server with one model: `response` is (status, headers, body) of what is not its configuration."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = dict(CONFIG)
        self.response: tuple[int, dict[str, str], bytes] = (200, {}, b"{}")
        self.received: list[tuple[str, Any]] = []
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path.endswith("/config"):
            return 200, {}, json.dumps(self.config).encode()
        self.received.append((path, json.loads(body)))
        return self.response

    def responds(self, *outputs: dict[str, Any], **more: Any) -> None:
        self.response = 200, {}, json.dumps({"model_name": "m", "outputs": outputs, **more}).encode()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    state = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = state.answer(
                self.path, self.rfile.read(int(self.headers.get("Content-Length", 0)))
            )
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        state.url = f"127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()


def infer(fake: FakeServer, version: str = "", as_json: bool = False) -> None:
    run(InferOptions("m", version, ("x=1",), "", 20.0, as_json), fake.url, None)


def output(datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": "y", "datatype": datatype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (output("FP32", [1, 2], [0.5, 1 / 3]), "y  FP32  [1, 2]  [[0.5, 0.333333]]"),
        (output("BYTES", [2], ["é", 'a "b"']), 'y  BYTES  [2]  ["é", "a \\"b\\""]'),
        (output("BYTES", [1], ["\x1b[31m\n"]), 'y  BYTES  [1]  ["\\u001b[31m\\n"]'),
        (output("INT32", [40], list(range(40))), "y  INT32  [40]  [0, 1, 2, 3, ..., 36, 37, 38, 39]"),
        (output("INT32", [0], []), "y  INT32  [0]  []"),
    ],
)
def test_values_are_shown_on_one_line(
    row: dict[str, Any], shown: str, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.responds(row, model_version="3")
    infer(fake)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["request", "  x  INT32  [1]  [1]"]
    assert lines[2].startswith("response of m, version 3, after ")
    assert lines[3:] == [f"  {shown}"]


def test_long_text_is_cut(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.responds(output("BYTES", [1], ["a" * 5000]))
    infer(fake)
    assert capsys.readouterr().out.endswith("aaa… (5004 characters)\n")
    infer(fake, as_json=True)
    assert json.loads(capsys.readouterr().out)["outputs"][0]["data"] == ["a" * 5000]


@pytest.mark.parametrize(
    ("datatype", "array"), [("FP16", np.array([0.5, 2], np.float16)), ("BF16", np.array([0x3F00, 0x4000], np.uint16))]
)
def test_binary_outputs_are_shown_as_numbers(
    datatype: str, array: np.ndarray, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name": "y", "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": array.nbytes}}
    header = json.dumps({"model_name": "m", "model_version": "1", "outputs": [row]}).encode()
    fake.response = 200, {"Inference-Header-Content-Length": str(len(header))}, header + array.tobytes()
    infer(fake)
    assert f"  y  {datatype}  [2]  [0.5, 2]\n" in capsys.readouterr().out
    infer(fake, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["outputs"] == [{"name": "y", "datatype": datatype, "shape": [2], "data": [0.5, 2.0]}]


def test_a_version_is_asked_for(fake: FakeServer) -> None:
    fake.responds(output("FP32", [1], [1.0]))
    infer(fake, version="4")
    ((path, document),) = fake.received
    assert path == "/v2/models/m/versions/4/infer"
    assert document["inputs"] == [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]


def test_a_sequence_model_gets_a_whole_sequence(fake: FakeServer) -> None:
    fake.config["sequence_batching"] = {}
    fake.responds(output("FP32", [1], [1.0]))
    infer(fake)
    assert fake.received[0][1]["parameters"] == {"sequence_id": 1, "sequence_start": True, "sequence_end": True}


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps({"model_name": "m", "model_version": "1", **members}).encode() + b"\n\n"


def test_a_stream_ends_with_the_error_in_it(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.config["model_transaction_policy"] = {"decoupled": True}
    fake.response = 200, {}, event(y=1.5) + event(y=[1, 2]) + b'data: {"error": "it broke"}\n\n'
    with pytest.raises(StartError, match="it broke"):
        infer(fake)
    assert fake.received == [("/v2/models/m/generate_stream", {"x": [1]})]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("  y")] == ["  y  FP32  1.5", "  y  FP32  [1, 2]"]


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (400, b'{"error": "wrong shape"}', "wrong shape"),
        (400, b'data: {"error": "wrong shape"}\n\n', "wrong shape"),
        (503, b'{"error": "no worker"}', "no worker"),
        (200, b"<html>", "not one of the KServe protocol"),
        (200, b'{"outputs": [{"name": "y"}]}', "not one of the KServe protocol"),
        (200, b"[]", "not one of the KServe protocol"),
    ],
)
def test_a_failure_has_the_reason(status: int, body: bytes, text: str, fake: FakeServer) -> None:
    fake.response = status, {}, body
    with pytest.raises(StartError, match=text):
        infer(fake)
