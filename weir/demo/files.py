"""Recognises the kinds of files through models `file_features` (Python) and `magika` (ONNX Runtime).

Each file is sent to `file_features`, and its output to `magika`, which returns its best label (Triton's classification
extension); all of it over HTTP and over gRPC, with the stock `tritonclient`.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from tritonclient import grpc as triton_grpc
from tritonclient import http as triton_http

MODEL, FEATURES = "magika", "file_features"

_ROOT = Path(__file__).parents[2]
_OF_WEIR = (
    "README.md",
    "Makefile",
    "LICENSE",
    "pyproject.toml",
    "weir/calls/dispatch.py",
    "weir/demo/models/magika/config.pbtxt",
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


def recognised_files(http_url: str, grpc_url: str, chosen: Iterable[tuple[str, Path]]) -> Table:
    """What the network says of each file, asked over both protocols."""
    table = Table(
        title="Files recognised, each asked over HTTP and over gRPC", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for column in ("file", "bytes", "protocol", "label", "score", "ms"):
        table.add_column(column, justify="right" if column in ("bytes", "score", "ms") else "left")
    with (
        triton_http.InferenceServerClient(http_url) as http,
        triton_grpc.InferenceServerClient(grpc_url) as grpc,
    ):
        for name, path in chosen:
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


def files() -> Iterator[tuple[str, Path]]:
    """(name to show, path) of real files: of Weir (more in a checkout), and of the Python that runs."""
    for name in _OF_WEIR:
        if (_ROOT / name).is_file():
            yield name, _ROOT / name
    library = Path(sysconfig.get_path("stdlib"))
    for pattern in _OF_PYTHON:
        for path in sorted(library.glob(pattern))[:1]:
            yield f"{library.name}/{path.relative_to(library)}", path
    yield Path(sys.executable).name, Path(sys.executable).resolve()
