"""Serves real networks, has them recognise files, hear speech and read a picture, and shows latencies and batch sizes.

Everything goes through the stock `tritonclient`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tritonclient import http as triton_http

from weir.demo import pictures, sound
from weir.demo.files import FEATURES, MODEL, features, files, recognised_files
from weir.demo.load import counts, measure
from weir.demo.networks import RAPIDOCR, SILERO, installed_networks, missing_text
from weir.demo.repository import build_demo_repositories
from weir.demo.server import DemoServer, running_server

_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
IN_FLIGHT = (1, 8, 32)


def show(folder: Path, seconds: float, options: Sequence[str] = ()) -> None:
    """Serve the models at hand from `folder`, call them, and print what they return and how fast.

    Each measurement takes `seconds`; `options` are further options of `weir serve`. Raises StartError if the server can't
    start.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    networks = installed_networks()
    repositories = build_demo_repositories(folder, networks)
    console.print(f"Model repositories: {', '.join(map(str, repositories))}\nStarting weir serve ...")
    log = folder / "server.log"
    with running_server(repositories, [*_FREE_PORTS, *options], log) as server:
        console.print(server.block)
        console.print(recognised_files(server.http, server.grpc, files()))
        if SILERO in networks:
            console.print(speech_heard(server))
        if RAPIDOCR in networks:
            console.print(picture_read(server, folder / "picture.png"))
        console.print(latencies(server, seconds))
    print(missing_text(networks), end="")
    console.print(f"Stopped cleanly. The server's log: {log}")


def speech_heard(server: DemoServer) -> Table:
    """A table of the streams with speech in them, with the mean number of streams in a batch."""
    sounds = sound.synthesised()
    before = counts(server, sound.MODEL)
    began = time.perf_counter()
    heard = asyncio.run(sound.listen(server.grpc, sounds))
    table = sound.streams_table(heard, time.perf_counter() - began)
    chunks, batches = (after - earlier for after, earlier in zip(counts(server, sound.MODEL), before, strict=True))
    table.caption = f"{chunks / batches:.1f} streams in a batch, on average"
    table.caption_justify = "left"
    return table


def picture_read(server: DemoServer, path: Path) -> Table:
    """A table of the text in a picture that is rendered to `path`."""
    picture = pictures.rendered(pictures.LINES)
    path.write_bytes(picture)
    with triton_http.InferenceServerClient(server.http) as client:
        return pictures.lines_table(str(path), pictures.read(client, picture))


def latencies(server: DemoServer, seconds: float) -> Table:
    """A table of both models of files with 1, 8 and 32 requests in flight."""
    table = Table(title="Latency and batch sizes over HTTP", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("model", "in flight", "requests/s", "p50 ms", "p99 ms", "mean batch size"):
        table.add_column(column, justify="left" if column == "model" else "right")
    content = Path(__file__).read_bytes()
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
