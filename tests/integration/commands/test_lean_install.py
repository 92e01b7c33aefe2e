"""What `pip install 'weir-serve[cpu]'` installs serves a model, with the console; what needs an extra names it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support.lean import lean_environment
from tests.support.models.zoo import write_identity, write_python_model
from tests.support.servers.forked_commands import COMMAND
from tests.support.servers.weir_server import Server, clean_environment


class Lean:
    """A server without packages of extras, and commands that lack them too."""

    def __init__(self, server: Server, folder: Path, environment: dict[str, str]) -> None:
        self.server = server
        self.folder = folder
        self.environment = environment

    def run(self, *words: str, terminal: int | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE if terminal is None else terminal,
            text=True,
        )


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lean]:
    folder = tmp_path_factory.mktemp("lean")
    write_identity(folder / "models", "identity", "FP32")
    tensors = {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}
    write_python_model(folder / "models", "faulty", "faulty", *tensors, 4)
    environment = lean_environment(folder)
    with Server(folder, folder / "models", "--console-port=0", environment=environment) as server:
        (client := folder / "client").mkdir()
        yield Lean(server, client, {**clean_environment(client), **environment})


def test_a_model_is_served_over_http_and_grpc_with_metrics(lean: Lean) -> None:
    client = lean.server.grpc()
    tensor = triton.InferInput("IN", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    assert client.infer("identity", [tensor]).as_numpy("OUT").tolist() == [[1, 2]]
    client.close()
    done = lean.run("infer", "identity", f"--url={lean.server.http_place}", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["outputs"][0]["name"] == "OUT"
    assert "nv_inference_request_success" in lean.server.metrics_page()


IN_A_PROGRAM = """
import sys, weir
with weir.Server(model_repository=sys.argv[1]) as server:
    print(server.infer("identity", {"IN": ([[1.5]], "FP32")})["OUT"].tolist(), server.metadata("identity")["versions"])
"""


def test_a_program_starts_a_server_and_asks_it(lean: Lean) -> None:
    words = [sys.executable, "-P", "-c", IN_A_PROGRAM, str(lean.folder.parent / "models")]
    done = subprocess.run(words, cwd=lean.folder, env=lean.environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[[1.5]] ['1']\n"), done.stderr


def test_the_console_is_served(lean: Lean) -> None:
    with urllib.request.urlopen(lean.server.printed_value("console")) as page:
        assert b"<title>" in page.read()


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("top", "--once"),
        ("dead", "list"),
        ("doctor", "--json"),
        ("backends", "--json"),
        ("perf", "identity"),
    ],
)
def test_commands_work(words: tuple[str, ...], lean: Lean) -> None:
    chosen = [f"--nats={lean.server.nats_url}"] if words[0] in ("status", "top", "dead") else []
    if words[0] == "perf":
        chosen = [f"--url={lean.server.http_place}", "--shape=IN:4", "--concurrency=1:2", "--measure=0.2"]
        chosen += ["--warmup=0.1", "--max-windows=1"]
    done = lean.run(*words, *chosen)
    assert done.returncode == 0 or words[0] == "doctor", done.stderr
    assert done.stdout or words[0] == "dead"
    if words[0] == "perf":
        assert "(the plot needs the extra tools: pip install 'weir-serve[tools]')" in done.stdout
    if words[0] == "doctor":
        extras = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "extras")
        assert extras["state"] == "note"
        assert "cloud (models from S3, Google Cloud Storage and Azure Blob Storage)" in extras["finding"]
        assert "pip install 'weir-serve[access,cloud,nkeys,parquet,tools,tracing]'" in extras["remedy"]


def test_a_screen_that_needs_an_extra_names_it(lean: Lean) -> None:
    master, terminal = pty.openpty()
    try:
        done = lean.run("top", f"--nats={lean.server.nats_url}", terminal=terminal)
        os.close(terminal)
        shown = os.read(master, 4096).decode()
    finally:
        os.close(master)
    assert done.returncode == 1
    assert "the live table needs the extra tools: pip install 'weir-serve[tools]'" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (
            ("serve", "s3://bucket/models"),
            1,
            "error: model repository s3://bucket/models needs the extra cloud: pip install 'weir-serve[cloud]'",
        ),
        (
            ("serve", "models", "--trace-config=mode=opentelemetry"),
            1,
            "error: --trace-config mode=opentelemetry needs the extra tracing: pip install 'weir-serve[tracing]'",
        ),
        (
            ("status", "--nats-nkey=seed"),
            2,
            "--nats-nkey needs the extra nkeys: pip install 'weir-serve[nkeys]'",
        ),
    ],
)
def test_an_option_that_needs_an_extra_names_it(words: tuple[str, ...], status: int, text: str, lean: Lean) -> None:
    (lean.folder / "models").mkdir(exist_ok=True)
    place = f"--nats={lean.server.nats_url.partition('//')[0]}//{lean.server.nats_url.rpartition('@')[2]}"
    more = [place] if words[0] == "status" else ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    more += [] if words[0] == "status" else [f"--data-dir={lean.folder / 'data'}"]
    done = lean.run(*words, *more)
    assert done.returncode == status, done.stderr
    assert text in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
