"""What copies of live requests cost the live ones: `python -m benchmarks.shadow_traffic` prints a table.

The model `mlp` (3 KB) in two versions, all requests on version 1. Copies on version 2 are off, on for a share of the
requests, and compared, turn by turn on one server; latencies are those that the clients of the live requests see, and
ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.load import apply_load
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import Server, free_ports, port_options, running, weir_command
from benchmarks.compare.targets import Protocol

_MODEL = "mlp"


class Mode(NamedTuple):
    name: str
    share: float = 0.0
    compare: bool = False


MODES = (
    Mode("off"),
    Mode("20 %", 20),
    Mode("20 %, compared", 20, True),
    Mode("100 %", 100),
    Mode("100 %, compared", 100, True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of a turn")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    payload = Payload.of(Protocol.HTTP, NETWORKS[_MODEL], NETWORKS[_MODEL].sample(1))
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports()
        version = NETWORKS[_MODEL].write(Path(folder, "repository"), "onnxruntime")
        shutil.copytree(version, version.with_name("2"))
        config = version.parent / "config.pbtxt"
        config.write_text(f"{config.read_text()}version_policy {{ all {{ }} }}\n")
        command = [*weir_command(Path(folder)), *port_options(ports)]
        with running("weir", command, Path(folder), ports, None) as server:
            _ask(server, "PUT", "traffic", {"weights": {"1": 100}})
            apply_load(server.address(Protocol.HTTP), payload, 8, 1)
            print("| in flight | copies | p50 ms | p99 ms | requests/s | copies/s | p50 ratio | p99 ratio |")
            print("|---|---|---|---|---|---|---|---|")
            for in_flight in options.in_flight:
                _measure(server, payload, in_flight, options.rounds, options.seconds)
            print(f"\ncompared, of version 2: {_ask(server, 'GET', 'traffic/shadow', None)['versions']}")


def _measure(server: Server, payload: Payload, in_flight: int, rounds: int, seconds: int) -> None:
    found: dict[str, list[tuple[float, float, float, float]]] = {mode.name: [] for mode in MODES}
    for turn in range(rounds):
        for mode in MODES if turn % 2 == 0 else reversed(MODES):
            if mode.share:
                document = {"version": 2, "share": mode.share, "compare": mode.compare}
                _ask(server, "PUT", "traffic/shadow", document)
            else:
                _ask(server, "DELETE", "traffic/shadow", None)
            copied = _copies(server)
            load = apply_load(server.address(Protocol.HTTP), payload, in_flight, seconds)
            time.sleep(0.6)  # counters arrive within 0.5 s
            copied = (_copies(server) - copied) / load.seconds
            found[mode.name].append((load.p50_ms, load.p99_ms, load.answered / load.seconds, copied))
    for name, rows in found.items():
        figures = [statistics.median(row[column] for row in rows) for column in range(4)]
        ratios = [
            statistics.median(row[column] / off[column] for row, off in zip(rows, found["off"], strict=True))
            for column in range(2)
        ]
        shown = [f"{figures[0]:.2f}", f"{figures[1]:.2f}", *(f"{figure:.0f}" for figure in figures[2:])]
        print(f"| {in_flight} | {name} | {' | '.join(shown)} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def _ask(server: Server, method: str, path: str, document: Any) -> Any:
    body = None if document is None else json.dumps(document).encode()
    url = f"http://{server.address(Protocol.HTTP)}/v2/models/{_MODEL}/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=20) as response:
        return json.loads(response.read())


def _copies(server: Server) -> float:
    start = f'weir_version_requests_total{{model="{_MODEL}",version="2",arm="shadow"}} '
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[2]}/metrics", timeout=20) as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith(start)]
    return float(lines[0].removeprefix(start)) if lines else 0.0


if __name__ == "__main__":
    main()
