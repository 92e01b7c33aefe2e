"""Each command that asks a gateway shows its key, over each protocol, and says what to do where the server denies."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import click
import grpc
import numpy as np
import pytest
import typer

from weir.commands.app import app, main
from weir.perf.clients.nats import NatsClient
from weir.perf.clients.session import SampleRequest
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor

COMMANDS = {
    "infer": "infer m",
    "perf": "perf m",
    "history": "history m",
    "rollback": "rollback m",
    "traffic set": "traffic set m 1=90 2=10",
    "traffic show": "traffic show m",
    "traffic clear": "traffic clear m",
    "traffic ramp": "traffic ramp m 2 --over=1m",
    "traffic shadow": "traffic shadow m 2 --share=20",
    "traffic report": "traffic report m",
    "batch submit": "batch submit --model=m --input=a.jsonl --output=out",
    "batch list": "batch list",
    "batch status": "batch status batch-0123456789abcdef",
    "batch watch": "batch watch batch-0123456789abcdef",
    "batch pause": "batch pause batch-0123456789abcdef",
    "batch resume": "batch resume batch-0123456789abcdef",
    "batch cancel": "batch cancel batch-0123456789abcdef",
    "batch retry": "batch retry batch-0123456789abcdef",
}
"""A command line of each command that asks a gateway."""


class Denying:
    """An HTTP server that answers each request with `status`; `shown` are the Authorization headers it has received."""

    def __init__(self) -> None:
        self.status = 401
        self.shown: list[str | None] = []
        own = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                own.shown.append(self.headers["Authorization"])
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = json.dumps({"error": "not for you"}).encode()
                self.send_response(own.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self.url = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def denying() -> Iterator[Denying]:
    server = Denying()
    yield server
    server.server.shutdown()
    server.thread.join()
    server.server.server_close()


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("WEIR_API_KEY", raising=False)
    (tmp_path / "key").write_text("weir_hush\n")
    return f"@{tmp_path}/key"


def failed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails prints to stderr."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code in (1, 2)
    return capsys.readouterr().err


def test_each_command_that_asks_a_gateway_is_here_and_takes_a_key() -> None:
    def walk(command: click.Command, name: str) -> Iterator[tuple[str, set[str]]]:
        for word, one in getattr(command, "commands", {}).items():
            yield from walk(one, f"{name} {word}".strip())
        if not hasattr(command, "commands"):
            yield name, {option for parameter in command.params for option in parameter.opts}

    found = dict(walk(typer.main.get_command(app), ""))
    asking = {name for name, options in found.items() if "--url" in options}
    assert asking == COMMANDS.keys()
    assert [name for name in asking if "--api-key" not in found[name]] == []


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("status", [401, 403])
def test_a_command_shows_its_key_and_says_what_to_do(
    name: str, status: int, denying: Denying, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    denying.status = status
    words = [*COMMANDS[name].split(), f"--url={denying.url}"]
    error = failed(words, capsys)
    assert "not for you. Show a key that may do this: give --api-key @FILE, or set the variable WEIR_API_KEY." in error
    error = failed([*words, f"--api-key={key_file}"], capsys)
    assert "Show another key" in error
    assert "weir_hush" not in error
    assert denying.shown == [None, "Bearer weir_hush"]


def test_the_variable_holds_the_key_or_names_its_file(
    denying: Denying, key_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("weir_of-variable", key_file):
        monkeypatch.setenv("WEIR_API_KEY", value)
        failed(["history", "m", f"--url={denying.url}"], capsys)
    assert denying.shown == ["Bearer weir_of-variable", "Bearer weir_hush"]


@pytest.mark.usefixtures("key_file")
def test_a_key_on_the_command_line_is_refused(denying: Denying, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("infer", "perf", "batch list"):
        error = failed([*COMMANDS[name].split(), f"--url={denying.url}", "--api-key=weir_hush"], capsys)
        assert "--api-key takes @FILE" in error
        assert "weir_hush" not in error
    assert denying.shown == []


def test_a_load_test_shows_its_key_over_grpc(key_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str | bytes | None] = []

    def deny(request: bytes, context: grpc.ServicerContext) -> bytes:
        shown.append(dict(context.invocation_metadata()).get("authorization"))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "not for you")

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(deny)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        words = ["perf", "m", "--protocol=grpc", f"--url=127.0.0.1:{port}", f"--api-key={key_file}"]
        assert "not for you. Show another key" in failed(words, capsys)
    finally:
        server.stop(None).wait()
    assert shown
    assert set(shown) == {"Bearer weir_hush"}


def test_a_load_test_shows_its_key_over_nats() -> None:
    class Bus:
        max_payload_bytes = 1 << 20

    client = NatsClient(Bus(), "m", "", 1.0, {"Authorization": "Bearer weir_hush"})  # type: ignore[arg-type]
    one = Tensor.from_numpy("IN", np.zeros(1, np.float32), "FP32")
    client.load([SampleRequest(InferRequest("m", inputs=[one]))])
    assert b"\r\nAuthorization: Bearer weir_hush\r\n" in client.message(0, None)[1]
