"""Serves real networks, has them recognise files, hear speech and read a picture, measures them, and kills the worker.

Everything goes through the stock `tritonclient`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tritonclient import http as triton_http

from weir.demo import pictures, sound
from weir.demo.files import FEATURES, MODEL, features, files, recognised_files
from weir.demo.load import Call, LoadFigures, counts, kill_worker, measure
from weir.demo.networks import RAPIDOCR, SILERO, Network, installed_networks, missing_text
from weir.demo.repository import build_demo_repositories
from weir.demo.server import DemoServer, running_server

_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
IN_FLIGHT = (1, 8, 32)
KILLED_IN_FLIGHT = 8
"""Requests that are under way when the worker is killed."""


def show(folder: Path, seconds: float, options: Sequence[str] = ()) -> None:
    """Serve the models at hand from `folder`, call them, kill the worker, and print what clients get and how fast.

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
        console.print(batching(server, networks, seconds))
        console.print(worker_killed(server, seconds))
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


def batching(server: DemoServer, networks: Sequence[Network], seconds: float) -> Table:
    """A table of the rates of two models with 1, 8 and 32 requests in flight, and the sizes of the batches."""
    content = triton_http.InferInput("FILE", [1, 1], "BYTES")
    content.set_data_from_numpy(np.array([[Path(__file__).read_bytes()]], np.object_))
    chunk = triton_http.InferInput("AUDIO", [1, sound.CHUNK], "FP32")
    chunk.set_data_from_numpy(np.zeros((1, sound.CHUNK), np.float32))
    calls = [Call(FEATURES, [content])]
    if SILERO in networks:
        calls.append(Call(sound.MODEL, [chunk], in_sequences=True))
    return batching_table(
        {call.model: [measure(server, call, in_flight, seconds) for in_flight in IN_FLIGHT] for call in calls}
    )


def batching_table(measured: Mapping[str, Sequence[LoadFigures]]) -> Table:
    """A line for each model and number of requests in flight; gains are by the rate of the model's first line."""
    table = Table(title="What batches give, over HTTP", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("model", "in flight", "mean batch size", "requests/s", "gain", "p50 ms", "p99 ms"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model, levels in measured.items():
        for figures in levels:
            table.add_row(
                model,
                str(figures.in_flight),
                f"{figures.batch_size:.2f}",
                f"{figures.requests_per_second:.0f}",
                f"× {figures.requests_per_second / levels[0].requests_per_second:.1f}",
                f"{figures.p50_ms:.2f}",
                f"{figures.p99_ms:.2f}",
            )
    table.caption = f"On CPUs a network that keeps a core busy with one row, as {MODEL}, gains nothing."
    table.caption_justify = "left"
    return table


def worker_killed(server: DemoServer, seconds: float) -> str:
    """Kills the worker under load, and says what the clients noticed."""
    with triton_http.InferenceServerClient(server.http) as client:
        row = features(triton_http, client, Path(__file__).read_bytes())
    image = triton_http.InferInput("bytes", list(row.shape), "INT32")
    image.set_data_from_numpy(row)
    figures = kill_worker(server, Call(MODEL, [image]), KILLED_IN_FLIGHT, seconds)
    return (
        f"kill -9 of the worker (process {figures.pid}) with {KILLED_IN_FLIGHT} requests to {MODEL} in flight: "
        f"{figures.failed} of {figures.requests} failed.\n"
        f"The slowest took {figures.longest_s:.1f} s: its worker died, and weir serve started another one.\n"
    )
