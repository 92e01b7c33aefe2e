"""`make demo`: serve a real network and a Python model, classify real files over HTTP and gRPC, show how it behaves.

Everything goes through the stock `tritonclient`: each file is sent to model `file_features` (Python), and what comes back
to model `magika` (ONNX Runtime), which is asked for its best label (Triton's classification extension).
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http

from examples.demo_repository import DEMO_FOLDER, build_demo_repository
from examples.demo_server import DemoServer, running_server
from examples.load import measure

MODEL, FEATURES = "magika", "file_features"
IN_FLIGHT = (1, 8, 32)

_CHECKOUT = Path(__file__).parent.parent
_OF_THE_CHECKOUT = (
    "README.md",
    "Makefile",
    "LICENSE",
    "pyproject.toml",
    "calls/inference.py",
    "examples/models/magika/config.pbtxt",
    ".ci/run",
)
_OF_PYTHON = (
    "json/decoder.py",
    "json/__pycache__/decoder.*.pyc",
    "ensurepip/_bundled/pip-*.whl",
    "idlelib/Icons/idle_48.png",
    "idlelib/Icons/idle_48.gif",
    "idlelib/help.html",
    "lib-dynload/math.*.so",
)


class Recognised(NamedTuple):
    """A file's label, the network's certainty of it, and the milliseconds that both models took together."""

    label: str
    score: float
    ms: float

    def cells(self) -> tuple[str, str, str]:
        """The same as text."""
        return self.label, f"{self.score:.3f}", f"{self.ms:.1f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="examples.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEMO_FOLDER, help="where the repository is made")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    repository = build_demo_repository(arguments.folder / "models")
    console.print(f"Model repository: {repository}\nStarting weir serve ...")
    log = arguments.folder / "server.log"
    with running_server(repository, ["--http-port=0", "--grpc-port=0", "--metrics-port=0"], log) as server:
        console.print(server.block)
        console.print(recognised_files(server))
        console.print(latencies(server, arguments.seconds))
    console.print(f"Stopped cleanly. The server's log: {log}")


def recognised_files(server: DemoServer) -> Table:
    """What the network says of each file, asked over both protocols."""
    table = Table(
        title="Files recognised, each asked over HTTP and over gRPC", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for column in ("file", "bytes", "protocol", "label", "score", "ms"):
        table.add_column(column, justify="right" if column in ("bytes", "score", "ms") else "left")
    with (
        triton_http.InferenceServerClient(server.http) as http,
        triton_grpc.InferenceServerClient(server.grpc) as grpc,
    ):
        for name, path in files():
            content = path.read_bytes()
            over_http = recognise(triton_http, http, content)
            over_grpc = recognise(triton_grpc, grpc, content)
            table.add_row(name, str(len(content)), "HTTP", *over_http.cells())
            table.add_row("", "", "gRPC", *over_grpc.cells())
    return table


def recognise(triton: ModuleType, client: object, content: bytes) -> Recognised:
    """Sends a file's content through both models; `triton` is the client's module (`tritonclient.http` or `.grpc`)."""
    began = time.perf_counter()
    row = features(triton, client, content)
    image = triton.InferInput("bytes", list(row.shape), "INT32")
    image.set_data_from_numpy(row)
    best = triton.InferRequestedOutput("target_label", class_count=1)
    answer = client.infer(MODEL, [image], outputs=[best]).as_numpy("target_label")  # type: ignore[attr-defined]
    ms = (time.perf_counter() - began) * 1000
    score, _, label = answer.reshape(-1)[0].decode().split(":")
    return Recognised(label, float(score), ms)


def features(triton: ModuleType, client: object, content: bytes) -> np.ndarray:
    """What model `file_features` makes of a file's content: int32 [1, 2048]."""
    file = triton.InferInput("FILE", [1, 1], "BYTES")
    file.set_data_from_numpy(np.array([[content]], np.object_))
    row: np.ndarray = client.infer(FEATURES, [file]).as_numpy("bytes")  # type: ignore[attr-defined]
    return row


def latencies(server: DemoServer, seconds: float) -> Table:
    """How both models behave with 1, 8 and 32 requests in flight."""
    table = Table(title="Latency and batch sizes over HTTP", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("model", "in flight", "requests/s", "p50 ms", "p99 ms", "mean batch size"):
        table.add_column(column, justify="left" if column == "model" else "right")
    content = (_CHECKOUT / "README.md").read_bytes()
    with triton_http.InferenceServerClient(server.http) as client:
        row = features(triton_http, client, content)
    file = triton_http.InferInput("FILE", [1, 1], "BYTES")
    file.set_data_from_numpy(np.array([[content]], np.object_))
    image = triton_http.InferInput("bytes", list(row.shape), "INT32")
    image.set_data_from_numpy(row)
    for model, tensor in ((FEATURES, file), (MODEL, image)):
        for in_flight in IN_FLIGHT:
            figures = measure(server, model, [tensor], in_flight, seconds)
            table.add_row(
                model,
                str(figures.in_flight),
                f"{figures.requests_per_second:.0f}",
                f"{figures.p50_ms:.2f}",
                f"{figures.p99_ms:.2f}",
                f"{figures.batch_size:.2f}",
            )
    return table


def files() -> Iterator[tuple[str, Path]]:
    """(name to show, path) of real files: of this checkout, and of the Python that runs, where it has them."""
    for name in _OF_THE_CHECKOUT:
        if (_CHECKOUT / name).is_file():
            yield name, _CHECKOUT / name
    library = Path(sysconfig.get_path("stdlib"))
    for pattern in _OF_PYTHON:
        for path in sorted(library.glob(pattern))[:1]:
            yield f"{library.name}/{path.relative_to(library)}", path
    yield Path(sys.executable).name, Path(sys.executable).resolve()


if __name__ == "__main__":
    main()
