"""The whole machine: `python -m benchmarks.machine` prints requests/s, CPU and latency by the number of processes.

Each shape is one `weir serve`, with so many gateways, schedulers and workers (`2x1x2`), and processors for workers alone
if it names them (`2x1x2/4`). All have the model `identity_fp32` (64 bytes in and out), with as many partitions as there
are schedulers. All are up at once, and take turns under the same load; a ratio is taken within a round, to the first
shape. The check of the responses, the load generators and the accounting of CPU are those of `benchmarks.compare`.

The target is 100 000 requests/s where 16 processors are at hand, four of them for the clients.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster.clients import table
from benchmarks.compare.measurement import Measurement, check_answers, measure
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.servers import Server, free_ports, port_options, running
from benchmarks.compare.targets import Protocol, Workload
from weir.runtime.processors import processor_count

TARGET_PER_S = 100_000
TARGET_PROCESSORS = 16
NETWORK = NETWORKS["identity_fp32"]
ROLES = ("gateway", "scheduler", "worker", "nats-server")


class Shape(NamedTuple):
    """So many processes of each role, numbers or "auto", and so many processors for workers alone, as options say them."""

    gateways: str
    schedulers: str
    workers: str
    reserved: str = "0"

    @classmethod
    def of(cls, text: str) -> Shape:
        """`auto`, or `2x1x2`, or with reserved processors `2x1x2/4`. Raises ValueError for another text."""
        counts, slash, reserved = text.partition("/")
        found = cls(*(["auto"] * 3 if counts == "auto" else counts.split("x", 2)), *([reserved] if slash else []))
        if len(found) < len(cls._fields) or not all(word == "auto" or word.isdecimal() for word in found):
            raise ValueError(text)
        return found

    @property
    def options(self) -> list[str]:
        """The options of `weir serve`."""
        names = ("--gateways", "--schedulers", "--workers", "--worker-processors")
        return [f"{name}={value}" for name, value in zip(names, self, strict=True)]

    @property
    def partitions(self) -> int:
        """Those of the model: one for each scheduler, as far as the shape says how many."""
        return int(self.schedulers) if self.schedulers.isdecimal() else 1


@contextlib.contextmanager
def served(shape: str, folder: Path, further: Sequence[str]) -> Iterator[Server]:
    """A server of this shape, from when it is ready until it is stopped."""
    repository = folder / "repository"
    config = NETWORK.write(repository, "onnxruntime").parent / "config.pbtxt"
    partitions = f'parameters {{ key: "weir_partitions" value {{ string_value: "{Shape.of(shape).partitions}" }} }}\n'
    config.write_text(config.read_text() + partitions)
    ports = free_ports()
    command = [sys.executable, "-P", "-m", "weir", "serve", f"--model-repository={repository}"]
    command += [
        f"--data-dir={folder / 'data'}",
        "--exit-timeout-secs=5",
        *port_options(ports),
        *Shape.of(shape).options,
    ]
    with running(shape, [*command, *further], folder, ports, None) as server:
        yield server


def rows_of(shapes: Sequence[str], in_flight: int, measured: Sequence[Measurement]) -> list[tuple[object, ...]]:
    """A row of the table for each shape, of medians over the rounds."""
    rows = []
    for shape in shapes:
        own = [one for one in measured if one.server == shape]
        first = {one.round: one for one in measured if one.server == shapes[0]}
        rate = statistics.median(one.requests_per_s for one in own)
        ratios = [
            statistics.median(one.requests_per_s / first[one.round].requests_per_s for one in own),
            statistics.median(one.cpu_ms / first[one.round].cpu_ms for one in own),
        ]
        by_role = [statistics.median(one.cpu_us_by_role.get(role, 0.0) for one in own) for role in ROLES]
        cpu_us = statistics.median(one.cpu_ms for one in own) * 1e3
        latencies = [statistics.median(getattr(one, name) for one in own) for name in ("p50_ms", "p99_ms")]
        rows.append(
            (
                shape,
                in_flight,
                f"{rate:.0f}",
                f"{ratios[0]:.2f}",
                f"{cpu_us:.1f}",
                f"{ratios[1]:.2f}",
                *(f"{us:.1f}" for us in by_role),
                *(f"{ms:.2f}" for ms in latencies),
            )
        )
    return rows


def main() -> None:
    """Measure and print the tables."""
    processors = processor_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1x1x1,2x1x2" if processors < 8 else "1x1x1,2x1x2,4x1x4,4x2x4,4x2x4/auto")
    parser.add_argument("--in-flight", default="8,64,256", help="how many requests, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of a turn")
    parser.add_argument("--protocol", choices=[one.value for one in Protocol], default=Protocol.HTTP.value)
    parser.add_argument("--threads", type=int, default=max(1, processors // 4), help="of the load generator")
    parser.add_argument("further", nargs="*", help="options of weir serve, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    shapes = options.shapes.split(",")
    best_per_s = 0.0
    rows: list[tuple[object, ...]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="machine-")))
        servers = []
        for shape in shapes:
            own = folder / shape.replace("/", "-")
            own.mkdir()
            servers.append(stack.enter_context(served(shape, own, options.further)))
        workloads = [
            Workload(NETWORK.name, int(text), Protocol(options.protocol)) for text in options.in_flight.split(",")
        ]
        for workload in workloads:
            for server in servers:
                check_answers(server, NETWORK, workload.protocol)
                measure(server, NETWORK, workload, 0, 1, options.threads)
            measured = [
                measure(server, NETWORK, workload, number, options.seconds, options.threads)
                for number in range(options.rounds)
                for server in (servers if number % 2 == 0 else reversed(servers))
            ]
            rows += rows_of(shapes, workload.in_flight, measured)
            best_per_s = max([best_per_s, *(float(str(row[2])) for row in rows)])
    head = ("shape", "in flight", "requests/s", "ratio", "CPU us", "ratio", *ROLES, "p50 ms", "p99 ms")
    print(f"{processors} processors, {options.threads} threads of clients among them, {options.protocol}")
    print(table(head, rows))
    if processors >= TARGET_PROCESSORS:
        print(
            f"best {best_per_s:.0f}/s of {TARGET_PER_S}/s: {'reached' if best_per_s >= TARGET_PER_S else 'not reached'}"
        )
    else:
        print(f"the target of {TARGET_PER_S}/s is for {TARGET_PROCESSORS} processors")


if __name__ == "__main__":
    main()
