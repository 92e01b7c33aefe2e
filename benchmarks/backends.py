"""Cost of serving beside the bare engine: `python -m benchmarks.backends` prints a table.

Each network runs in two ways in turn: by its engine in a bare loop over one prepared batch, and by the server, which
receives single requests over HTTP with binary tensors, many in flight, and forms the batches. The bare loop and the
worker are bound to the same core; gateway, scheduler, nats-server and client have the other cores. The ratio therefore
shows how much of its core the worker leaves to the engine, as long as the other processes keep up (column "worker
busy").

`served / bare` is the ratio of items per second (an item is a row of the batch), each the best quartile of its turns.
On a shared machine the CPU ratio is more reliable: CPU seconds per item in the bare loop divided by those in the
worker, again each the best quartile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import psutil
from tritonclient import http as triton_http

from benchmarks import torch_networks
from benchmarks.compare import loops
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import ProcessTree
from benchmarks.compare.targets import Protocol
from weir import Server
from weir.demo.networks import package_folder
from weir.demo.ocr_graph import as_reader
from weir.demo.silero_graph import CONTEXT, SAMPLES, STATE, as_sequence_model
from weir.schemas.core.tensors import name_of_numpy

Arrays = Mapping[str, np.ndarray]

Engine = Callable[[Arrays], Sequence[np.ndarray]]
"""Runs a batch and returns the outputs, in the order of `Network.outputs`."""


@dataclass(frozen=True)
class Network:
    """One row of the table.

    `write_model` writes the model's file, or files, into the folder of its version, and `open_engine` opens what lies there
    without a server. `sample` makes the inputs of one request, with as many rows as a request has. `outputs` are what is
    asked for. The server makes batches of up to `batch` rows, and the bare loop runs as many.
    """

    name: str
    backend: str
    batch: int
    outputs: tuple[str, ...]
    write_model: Callable[[Path], None]
    open_engine: Callable[[Path, Sequence[str]], Engine]
    sample: Callable[[np.random.Generator], dict[str, np.ndarray]]
    more_config: str = ""

    @property
    def request(self) -> dict[str, np.ndarray]:
        """The inputs of one request, the same at each call."""
        return self.sample(np.random.default_rng(7))

    @property
    def rows(self) -> int:
        """How many rows a request has."""
        return len(next(iter(self.request.values())))

    @property
    def full_batch(self) -> dict[str, np.ndarray]:
        """As many requests as make a batch, in one."""
        return {name: np.concatenate([array] * (self.batch // self.rows)) for name, array in self.request.items()}

    def write(self, repository: Path) -> Path:
        """Adds it to a repository, with one instance and dynamic batching; returns the folder of its version."""
        version = repository / self.name / "1"
        version.mkdir(parents=True)
        self.write_model(version)
        inputs = "".join(
            f'input {{ name: "{name}" data_type: TYPE_{name_of_numpy(array.dtype)} dims: {list(array.shape[1:])} }}\n'
            for name, array in self.request.items()
        )
        outputs = zip(self.outputs, self.open_engine(version, self.outputs)(self.request), strict=True)
        outputs_text = "".join(
            f'output {{ name: "{name}" data_type: TYPE_{name_of_numpy(array.dtype)} dims: {list(array.shape[1:])} }}\n'
            for name, array in outputs
        )
        (version.parent / "config.pbtxt").write_text(
            f'name: "{self.name}"\nbackend: "{self.backend}"\nmax_batch_size: {self.batch}\n{inputs}{outputs_text}'
            f"dynamic_batching {{ }}\ninstance_group {{ count: 1 kind: KIND_CPU }}\n{self.more_config}"
        )
        return version

    def payload(self) -> Payload:
        """One request as bytes."""
        tensors = []
        for name, array in self.request.items():
            tensors.append(triton_http.InferInput(name, list(array.shape), name_of_numpy(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        wanted = [triton_http.InferRequestedOutput(name) for name in self.outputs]
        body, length = triton_http.InferenceServerClient.generate_request_body(tensors, outputs=wanted)
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}
        return Payload(Protocol.HTTP, f"/v2/models/{self.name}/infer", headers, body)


def open_onnx(version: Path, outputs: Sequence[str]) -> Engine:
    """ONNX Runtime with one thread, which is Weir's default."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(version / "model.onnx", options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(list(outputs), dict(inputs))


def _write_magika(version: Path) -> None:
    shutil.copyfile(package_folder("magika") / "models/standard_v3_3/model.onnx", version / "model.onnx")


def _write_silero(version: Path) -> None:
    network = onnx.load(package_folder("silero_vad") / "data/silero_vad_op18_ifless.onnx")
    onnx.save(as_sequence_model(network), version / "model.onnx")


def _write_reader(version: Path) -> None:
    network = onnx.load(package_folder("rapidocr_onnxruntime") / "models/ch_PP-OCRv4_rec_infer.onnx")
    onnx.save(as_reader(network), version / "model.onnx")


def _bytes(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"bytes": random.integers(0, 257, (1, 2048), dtype=np.int32)}


def _chunks(rows: int) -> Callable[[np.random.Generator], dict[str, np.ndarray]]:
    """Chunks of as many streams; what Weir would keep as implicit state comes with the request."""
    return lambda random: {
        "AUDIO": random.standard_normal((rows, SAMPLES), np.float32) * np.float32(0.1),
        "START": np.zeros((rows, 1), np.bool_),
        "STATE_IN": np.zeros((rows, *STATE), np.float32),
        "CONTEXT_IN": np.zeros((rows, CONTEXT), np.float32),
    }


def _line(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": random.standard_normal((1, 3, 48, 320), np.float32)}


NETWORKS = {
    network.name: network
    for network in (
        Network("magika", "onnxruntime", 16, ("target_label",), _write_magika, open_onnx, _bytes),
        Network("silero_vad", "onnxruntime", 32, ("PROB",), _write_silero, open_onnx, _chunks(32)),
        Network("silero_vad_single", "onnxruntime", 32, ("PROB",), _write_silero, open_onnx, _chunks(1)),
        Network("ocr_rec", "onnxruntime", 8, ("CHARACTER", "CERTAINTY"), _write_reader, open_onnx, _line),
        Network(*torch_networks.ENCODER),
        Network(*torch_networks.CONVOLUTIONS),
    )
}
"""The rows. `silero_vad` has 32 streams in a request, `silero_vad_single` one, of which the server makes batches of 32."""


class Turn(NamedTuple):
    """What came of one turn: items a second, and CPU microseconds an item in the process that runs the engine.

    Of the server also CPU of all its processes, its mean batch in rows, and the share of its core that the worker used.
    """

    items_per_s: float
    engine_cpu_us: float
    all_cpu_us: float = 0.0
    batch: float = 0.0
    busy: float = 0.0


class BareLoop:
    """The engine in a process of its own, on one core; it waits for its turns."""

    def __init__(self, network: Network, version: Path, core: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_serve_turns, args=(network.name, version, core, theirs), daemon=True)
        self._process.start()

    def turn(self, seconds: float) -> Turn:
        self._end.send(seconds)
        return Turn(*self._end.recv())

    def close(self) -> None:
        self._end.close()
        self._process.join()


def _serve_turns(name: str, version: Path, core: int, end: Connection) -> None:
    os.sched_setaffinity(0, {core})
    network = NETWORKS[name]
    run, batch = network.open_engine(version, network.outputs), network.full_batch
    run(batch)
    while True:
        try:
            seconds = end.recv()
        except EOFError:
            return
        began, cpu, items = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < began + seconds:
            run(batch)
            items += network.batch
        lasted, cpu = time.perf_counter() - began, time.process_time() - cpu
        end.send((items / lasted, cpu / items * 1e6))


class Served:
    """The server with one network, asked by a process of its own."""

    def __init__(self, network: Network, server: Server, core: int, in_flight: int) -> None:
        self._network = network
        self._server = server
        self._payload = network.payload()
        self._in_flight = in_flight
        self._processes = ProcessTree(server.pid)
        self._bind(core)
        self._client = multiprocessing.get_context("spawn").Pool(1, _bind_here, (_others(core),))

    def turn(self, seconds: float) -> Turn:
        counted, cpu, began = self._counts(), self._processes.cpu_s_by_role(), time.perf_counter()
        ask = (self._server.http_address, self._payload, self._in_flight, seconds)
        answered, refused, lasted = self._client.apply(_ask, ask)
        # The worker is read before it has run what was in flight at the end; these requests are a fraction of a batch's.
        busy = self._processes.cpu_s_by_role()["worker"] - cpu["worker"]
        busy /= time.perf_counter() - began
        self._processes.wait_until_quiet()
        by_role = self._processes.cpu_s_by_role()
        by_role.subtract(cpu)
        items, runs = (now - before for now, before in zip(self._counts(), counted, strict=True))
        if refused or not answered:
            raise SystemExit(f"{self._network.name}: {answered} answered, {refused} refused")
        return Turn(
            answered * self._network.rows / lasted,
            by_role["worker"] / items * 1e6,
            by_role.total() / items * 1e6,
            items / runs,
            busy,
        )

    def check(self, expected: Sequence[np.ndarray]) -> None:
        """Raises SystemExit unless the server answers what the engine does."""
        answer = self._server.infer(self._network.name, self._network.request, self._network.outputs)
        for name, array in zip(self._network.outputs, expected, strict=True):
            if not np.allclose(answer[name], array, rtol=1e-3, atol=1e-4):
                raise SystemExit(f"{self._network.name}: the server's {name} is another than the engine's")

    def close(self) -> None:
        self._client.terminate()
        self._client.join()

    def _bind(self, core: int) -> None:
        root = psutil.Process(self._server.pid)
        for process in (root, *root.children(recursive=True)):
            cores = {core} if "worker" in " ".join(process.cmdline()).split() else _others(core)
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)

    def _counts(self) -> tuple[int, int]:
        url = f"{self._server.http_url}/v2/models/{self._network.name}/stats"
        with urllib.request.urlopen(url, timeout=10) as response:
            stats: dict[str, Any] = json.load(response)["model_stats"][0]
        return int(stats["inference_count"]), int(stats["execution_count"])


def _bind_here(cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)


def _ask(address: str, payload: Payload, in_flight: int, seconds: float) -> tuple[int, int, float]:
    window = loops.run(address, payload, in_flight, seconds)
    return window.succeeded, window.failed, window.seconds


def _others(core: int) -> set[int]:
    return (os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)) - {core} or {core}


def measure(network: Network, rounds: int, seconds: float) -> str:
    """The network's row of the table."""
    core = max(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp())
    try:
        version = network.write(folder)
        expected = network.open_engine(version, network.outputs)(network.request)
        in_flight = max(12, 3 * network.batch // network.rows)
        bare = BareLoop(network, version, core)
        with Server(folder) as server:
            served = Served(network, server, core, in_flight)
            served.check(expected)
            turns: dict[str, list[Turn]] = {"bare": [], "served": []}
            both: list[tuple[str, Callable[[float], Turn]]] = [("bare", bare.turn), ("served", served.turn)]
            for _, turn in both:
                turn(1.0)
            for number in range(rounds):
                for name, turn in both if number % 2 == 0 else reversed(both):
                    turns[name].append(turn(seconds))
            served.close()
        bare.close()
    finally:
        shutil.rmtree(folder)
    rate = {name: _best([turn.items_per_s for turn in found], 75) for name, found in turns.items()}
    cost = {name: _best([turn.engine_cpu_us for turn in found], 25) for name, found in turns.items()}
    every, batch, busy = (
        float(np.median([getattr(turn, field) for turn in turns["served"]]))
        for field in ("all_cpu_us", "batch", "busy")
    )
    return (
        f"| {network.name} | {network.backend} | {network.rows} | {in_flight} | {batch:.1f} of {network.batch} | "
        f"{rate['bare']:.0f} | {rate['served']:.0f} | **{rate['served'] / rate['bare']:.2f}** | "
        f"{cost['bare']:.0f} | {cost['served']:.0f} | **{cost['bare'] / cost['served']:.2f}** | {every:.0f} | {busy:.2f} |"
    )


def _best(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile))


def main() -> None:
    """Measures the networks one after the other and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of the server and of the bare loop")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a turn is")
    parser.add_argument("--networks", default=",".join(NETWORKS), help=f"some of {', '.join(NETWORKS)}")
    options = parser.parse_args()
    print(
        "| network | backend | rows a request | in flight | batch | bare items/s | served items/s | served / bare | "
        "bare CPU us an item | worker CPU us an item | bare / worker CPU | all CPU us an item | worker busy |"
    )
    print("|" + "---|" * 13)
    for name in options.networks.split(","):
        print(measure(NETWORKS[name], options.rounds, options.seconds), flush=True)
    print(f"\nload average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
