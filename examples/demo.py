"""`make demo`: serve real networks, let them recognise files, hear speech and read a picture, show how they behave.

Everything goes through the stock `tritonclient`, by the clients of this folder.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tritonclient import http as triton_http

from examples import read_picture, vad_streams
from examples.demo_repository import DEMO_FOLDER, build_demo_repository
from examples.demo_server import DemoServer, running_server
from examples.load import counts, measure
from examples.recognise_files import FEATURES, MODEL, features, files, recognised_files

IN_FLIGHT = (1, 8, 32)


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
        console.print(recognised_files(server.http, server.grpc, files()))
        console.print(speech_heard(server))
        console.print(picture_read(server, arguments.folder / "picture.png"))
        console.print(latencies(server, arguments.seconds))
    console.print(f"Stopped cleanly. The server's log: {log}")


def speech_heard(server: DemoServer) -> Table:
    """Which of several streams have speech in them, and that chunks of different streams run together."""
    sounds = vad_streams.synthesised()
    before = counts(server, vad_streams.MODEL)
    began = time.perf_counter()
    heard = asyncio.run(vad_streams.listen(server.grpc, sounds))
    table = vad_streams.streams_table(heard, time.perf_counter() - began)
    chunks, batches = (
        after - earlier for after, earlier in zip(counts(server, vad_streams.MODEL), before, strict=True)
    )
    table.caption = f"{chunks / batches:.1f} streams in a batch, on average"
    table.caption_justify = "left"
    return table


def picture_read(server: DemoServer, path: Path) -> Table:
    """What text stands in a picture that is rendered here, and left at `path` to be looked at."""
    picture = read_picture.rendered(read_picture.LINES)
    path.write_bytes(picture)
    with triton_http.InferenceServerClient(server.http) as client:
        return read_picture.lines_table(str(path), read_picture.read(client, picture))


def latencies(server: DemoServer, seconds: float) -> Table:
    """How both models behave with 1, 8 and 32 requests in flight."""
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


if __name__ == "__main__":
    main()
