"""What a request costs by the size of its body: `python -m benchmarks.body_sizes` prints tables and draws a plot.

The model returns its input, so all of the cost is the server's: `size` bytes of FP32 come in, and as many go out. Each cell
of a round is one window of closed-loop load by wrk (HTTP) or h2load (gRPC); the cells take turns, and a cell is the median
of its rounds. CPU is the time of all processes of the server, by request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import onnx

from benchmarks.compare.load import apply_load
from benchmarks.compare.measurement import check_answers
from benchmarks.compare.networks import Graph, Network
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import Server, free_ports, port_options, running, weir_command
from benchmarks.compare.targets import Protocol

_BYTES_PER_S = 16 << 20
"""A window is longer by a second for so many bytes in flight. Requests in flight at its end cost, and are not counted, so
they must be a small share."""

SIZES = (64, 1024, 3136, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 1 << 20)
IN_FLIGHT = (1, 8, 64, 256)
_NAME = "identity"


class Cell(NamedTuple):
    """One kind of load: `size` bytes each way, `in_flight` requests at any time."""

    protocol: Protocol
    size: int
    in_flight: int


def _identity() -> onnx.ModelProto:
    return Graph().model("float[b,n] X", "float[b,n] Y", "X")


def _network(size: int) -> Network:
    return Network(_NAME, _identity, (-1,), (-1,), length=size // 4)


def _measure(server: Server, cell: Cell, seconds: int) -> float:
    """Microseconds of CPU a request. Raises SystemExit where a request failed."""
    network = _network(cell.size)
    payload = Payload.of(cell.protocol, network, network.sample(1))
    processes = server.processes()
    processes.wait_until_quiet()
    before_s, counted = processes.cpu_s(), server.counters(_NAME)
    seconds += cell.size * cell.in_flight // _BYTES_PER_S
    load = apply_load(server.address(cell.protocol), payload, cell.in_flight, seconds)
    processes.wait_until_quiet()
    cpu_s, answered = processes.cpu_s() - before_s, (server.counters(_NAME) - counted).answered
    if load.refused or answered < load.answered:
        raise SystemExit(f"{cell}: {load.answered} responses, {load.refused} refused, {answered:.0f} counted")
    return cpu_s * 1e6 / answered


def measure(cells: Sequence[Cell], rounds: int, seconds: int) -> dict[Cell, float]:
    """The median of each cell, after a check of the responses."""
    with tempfile.TemporaryDirectory(prefix="body-sizes-") as name:
        folder = Path(name)
        _network(64).write(folder / "repository", "onnxruntime")
        ports = free_ports()
        with running("weir", [*weir_command(folder), *port_options(ports)], folder, ports, None) as server:
            for protocol in dict.fromkeys(cell.protocol for cell in cells):
                for size in sorted({cell.size for cell in cells if cell.size <= 1 << 16}):
                    check_answers(server, _network(size), protocol)
            found: dict[Cell, list[float]] = {cell: [] for cell in cells}
            for _ in range(rounds):
                for cell in cells:
                    found[cell].append(_measure(server, cell, seconds))
    return {cell: statistics.median(each) for cell, each in found.items()}


def table(protocol: Protocol, results: dict[Cell, float]) -> str:
    """A row for each size, a column for each number of requests in flight."""
    in_flight = list(dict.fromkeys(cell.in_flight for cell in results))
    rows = [f"| {protocol}, bytes | " + " | ".join(f"{each} in flight" for each in in_flight) + " |"]
    rows.append("|---" * (len(in_flight) + 1) + "|")
    for size in dict.fromkeys(cell.size for cell in results):
        figures = (results.get(Cell(protocol, size, each)) for each in in_flight)
        rows.append(f"| {size} | " + " | ".join("" if us is None else f"{us:.0f}" for us in figures) + " |")
    return "\n".join(rows)


def draw(results: dict[Cell, float], path: Path) -> None:
    """Draws microseconds of CPU over bytes as an SVG, a line for each number of requests in flight."""
    import matplotlib

    matplotlib.use("svg")
    # Without these two each run would write another file for the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "body sizes"
    from matplotlib import pyplot

    protocols = list(dict.fromkeys(cell.protocol for cell in results))
    figure, axes = pyplot.subplots(
        1, len(protocols), figsize=(5 * len(protocols), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, protocol in zip(axes[0], protocols, strict=True):
        for in_flight in dict.fromkeys(cell.in_flight for cell in results):
            points = sorted(
                (cell.size, us)
                for cell, us in results.items()
                if cell.protocol is protocol and cell.in_flight == in_flight
            )
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=f"{in_flight} in flight")
        axis.set(title=str(protocol), xlabel="bytes in and out of a request")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("CPU of all processes, µs a request")
    axes[0][0].legend()
    figure.savefig(path, metadata={"Date": None})


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=_numbers, default=SIZES, help="of a body in bytes, separated by commas")
    parser.add_argument("--in-flight", type=_numbers, default=IN_FLIGHT)
    parser.add_argument("--protocols", type=partial(str.split, sep=","), default=[str(each) for each in Protocol])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=1, help="of load in each window")
    parser.add_argument("--picture", type=Path, help="the SVG to draw (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="the file for the figures; those of an earlier run there are kept")
    options = parser.parse_args()
    cells = [
        Cell(Protocol(protocol), size, in_flight)
        for protocol in options.protocols
        for size in options.sizes
        for in_flight in options.in_flight
    ]
    results = measure(cells, options.rounds, options.seconds)
    if options.json is not None:
        if options.json.exists():
            kept = json.loads(options.json.read_text())
            results = {Cell(Protocol(p), size, n): us for p, size, n, us in kept} | results
        options.json.write_text(json.dumps([[*cell, us] for cell, us in results.items()]))
    for protocol in dict.fromkeys(cell.protocol for cell in results):
        print(table(protocol, results), end="\n\n")
    if options.picture is not None:
        draw(results, options.picture)


if __name__ == "__main__":
    main()
