"""Cost of ensembles: `python -m benchmarks.ensemble` prints a table.

An ensemble of identity steps is compared with a client that calls the same steps one after another, over HTTP with
binary tensors, with one request in flight and with several. Small tensors (64 B) show the cost of a step: latency with
one in flight, CPU with several. Large ones (602 KB) show the cost of passing a tensor on: the ensemble passes a
reference, the client downloads and uploads every tensor. CPU is user and system time of all server processes, without
the client. A third case runs one step alone, as the base for the cost of a further step.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.compare.servers import ProcessTree
from weir.runtime.child_processes import dies_with_parent

SIZES = {"64 B": 16, "602 KB": 150_528}
"""FP32 elements of a tensor."""

STEPS = 3

_CONFIG = """
name: "{name}" backend: "{backend}" max_batch_size: 8
input {{ name: "IN" data_type: TYPE_FP32 dims: [-1] }} output {{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }}
instance_group {{ count: 1 kind: KIND_CPU }}
"""

_PYTHON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in inputs]
"""


def write_models(root: Path) -> None:
    """For each backend an identity, and an ensemble of `STEPS` of them."""
    for backend, name in (("onnxruntime", "onnx"), ("python", "python")):
        (folder := root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(_CONFIG.format(name=name, backend=backend))
        if backend == "python":
            (folder / "model.py").write_text(_PYTHON)
        else:
            values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["a", "b"]) for n in ("IN", "OUT")]
            graph = helper.make_graph([helper.make_node("Identity", ["IN"], ["OUT"])], "g", values[:1], values[1:])
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
            onnx.save(model, folder / "model.onnx")
        rows = []
        for step in range(STEPS):
            taken, written = "IN" if step == 0 else f"T{step}", "OUT" if step == STEPS - 1 else f"T{step + 1}"
            rows.append(
                f'step {{ model_name: "{name}" model_version: -1 input_map {{ key: "IN" value: "{taken}" }} '
                f'output_map {{ key: "OUT" value: "{written}" }} }}'
            )
        (root / f"{name}_ensemble" / "1").mkdir(parents=True)
        text = _CONFIG.format(name=f"{name}_ensemble", backend="").replace('backend: ""', 'platform: "ensemble"')
        text = text[: text.index("instance_group")] + f"ensemble_scheduling {{ {' '.join(rows)} }}"
        (root / f"{name}_ensemble" / "config.pbtxt").write_text(text)


class Client:
    """One connection; `infer` returns the bytes of OUT."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def infer(self, model: str, content: bytes) -> bytes:
        """Raises RuntimeError for anything but an answer."""
        shape = [1, len(content) // 4]
        tensor = {"name": "IN", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": len(content)}}
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header))}
        self._connection.request("POST", f"/v2/models/{model}/infer", header + content, headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(body[:300].decode())
        return body[int(answer.headers["Inference-Header-Content-Length"]) :]

    def ask_steps(self, model: str, content: bytes) -> bytes:
        """As the ensemble: each step's output is the next one's input."""
        for _ in range(STEPS):
            content = self.infer(model, content)
        return content


def measure(
    port: int,
    processes: ProcessTree,
    ask: Callable[[Client, bytes], bytes],
    elements: int,
    clients: int,
    seconds: float,
) -> tuple[float, float, float, dict[str, float]]:
    """(requests/s, median latency in ms, CPU ms a request, CPU ms a request by role)."""
    content = np.random.default_rng(1).random(elements, np.float32).tobytes()
    latencies_s: list[list[float]] = [[] for _ in range(clients)]
    stop_s = time.perf_counter() + seconds

    def run(mine: list[float]) -> None:
        client = Client(port)
        while (begun_s := time.perf_counter()) < stop_s:
            if ask(client, content) != content:
                raise RuntimeError("a wrong answer")
            mine.append(time.perf_counter() - begun_s)

    cpu = processes.cpu_s_by_role()
    threads = [threading.Thread(target=run, args=(mine,)) for mine in latencies_s]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    processes.wait_until_quiet()
    by_role = processes.cpu_s_by_role()
    by_role.subtract(cpu)
    every = [latency for mine in latencies_s for latency in mine]
    each = {role: cpu_s * 1e3 / len(every) for role, cpu_s in by_role.items()}
    return len(every) / seconds, float(np.median(every)) * 1e3, sum(each.values()), each


def main() -> None:
    """Starts a server, measures each case, and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--rounds", type=int, default=2, help="of which the one with the least CPU is told")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_models(folder / "models")
    ports = [_free_port() for _ in range(3)]
    command = [sys.executable, "-m", "weir", "serve", f"--model-repository={folder / 'models'}"]
    names = ("http", "grpc", "metrics")
    command += [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=dies_with_parent())
    try:
        _wait_ready(ports[0])
        _print_table(ports[0], ProcessTree(server.pid), options.seconds, options.rounds)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)


def _print_table(port: int, processes: ProcessTree, seconds: float, rounds: int) -> None:
    print("| steps | tensor | in flight | asked | requests/s | p50 ms | CPU ms a request | by role |")
    print("|---|---|---|---|---|---|---|---|")
    for model in ("onnx", "python"):
        cases: dict[str, Callable[[Client, bytes], bytes]] = {
            "one step": lambda client, content, model=model: client.infer(model, content),  # type: ignore[misc]
            f"{STEPS} steps by client": lambda client, content, model=model: client.ask_steps(model, content),  # type: ignore[misc]
            f"ensemble of {STEPS}": lambda client, content, model=model: client.infer(f"{model}_ensemble", content),  # type: ignore[misc]
        }
        for size, elements in SIZES.items():
            for clients in (1, 8):
                for asked, ask in cases.items():
                    measure(port, processes, ask, elements, clients, 0.5)
                    found = [measure(port, processes, ask, elements, clients, seconds) for _ in range(rounds)]
                    rate, p50_ms, cpu_ms, by_role = min(found, key=lambda row: row[2])
                    roles = ", ".join(f"{role} {ms:.2f}" for role, ms in sorted(by_role.items()) if ms >= 0.005)
                    row = f"| {model} | {size} | {clients} | {asked} | {rate:.0f} | {p50_ms:.2f} | {cpu_ms:.2f} | {roles} |"
                    print(row, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server is not ready")


if __name__ == "__main__":
    main()
