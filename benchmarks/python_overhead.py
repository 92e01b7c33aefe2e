"""Cost of serving a Python model, Weir beside Triton: `python -m benchmarks.python_overhead`.

Both serve the same identity model over HTTP with binary tensors of 64 bytes and of 602 KB (an image of 224 x 224). The
model does nothing, so the figures are the cost of the path to it and back.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import typer
from tritonclient import http as triton_http

from benchmarks.compare.installation import TritonInstallation
from benchmarks.compare.load import apply_load
from benchmarks.compare.payload import Payload
from benchmarks.compare.servers import Server, free_ports, port_options, running
from benchmarks.compare.targets import Protocol

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT", pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy())]
            )
            for request in requests
        ]
"""

CONFIG = """
backend: "python"
max_batch_size: 64
input [ { name: "INPUT" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_UINT8 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""

SIZES = {"64 B": 64, "602 KB": 602_112}
_FOLDER = Path(__file__).resolve().parents[1] / ".bench"


class Window(NamedTuple):
    """One window of load. CPU is that of all processes of the server, user and system, per request."""

    cpu_ms: float
    requests_per_s: float
    p50_ms: float
    by_role_us: dict[str, float]


def compare(
    rounds: Annotated[int, typer.Option(min=1, help="How often each server's turn comes.")] = 3,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds of a turn.")] = 2,
    in_flight: Annotated[str, typer.Option(help="Requests in flight, separated by commas.")] = "1,8,64",
    batching: Annotated[bool, typer.Option(help="With dynamic batching.")] = False,
    triton: Annotated[Path, typer.Option(help="The environment that Triton is installed in.")] = _FOLDER / "triton",
) -> None:
    """Measure both, turn by turn, and print a table."""
    run = _FOLDER / "python"
    shutil.rmtree(run, ignore_errors=True)
    installation = TritonInstallation(triton)
    if not (triton / "bin" / "python").exists():
        installation.install()
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(_weir(_repository(run / "weir", batching))),
            stack.enter_context(_triton(_repository(run / "triton", batching), installation)),
        ]
        print(f"{'tensor':>7} {'in flight':>9} {'server':>7} {'CPU ms':>8} {'req/s':>8} {'p50 ms':>8}  CPU us by role")
        for label, size in SIZES.items():
            payload = _payload(size)
            for server in servers:
                apply_load(server.address(Protocol.HTTP), payload, 8, 1)
            for concurrency in map(int, in_flight.split(",")):
                windows: dict[str, list[Window]] = {server.name: [] for server in servers}
                for number in range(rounds):
                    for server in servers if number % 2 == 0 else reversed(servers):
                        windows[server.name].append(_window(server, payload, concurrency, seconds))
                for name, measured in windows.items():
                    print(_row(label, concurrency, name, measured), flush=True)


def _window(server: Server, payload: Payload, in_flight: int, seconds: int) -> Window:
    processes = server.processes()
    counted, before = server.counters("identity"), processes.cpu_s_by_role()
    load = apply_load(server.address(Protocol.HTTP), payload, in_flight, seconds)
    processes.wait_until_quiet()
    by_role = processes.cpu_s_by_role()
    by_role.subtract(before)
    answered = (server.counters("identity") - counted).answered
    if load.refused:
        raise SystemExit(f"{server.name} refused {load.refused} requests")
    roles = {role: cpu_s * 1e6 / answered for role, cpu_s in by_role.items()}
    return Window(by_role.total() * 1e3 / answered, load.answered / load.seconds, load.p50_ms, roles)


def _row(label: str, in_flight: int, name: str, windows: list[Window]) -> str:
    cpu_ms, per_s, p50_ms = (median(window[place] for window in windows) for place in range(3))  # type: ignore[type-var]
    roles = ", ".join(
        f"{role} {median(window.by_role_us[role] for window in windows):.0f}" for role in windows[0].by_role_us
    )
    return f"{label:>7} {in_flight:>9} {name:>7} {cpu_ms:>8.3f} {per_s:>8.0f} {p50_ms:>8.2f}  {roles}"


def _payload(size: int) -> Payload:
    tensor = triton_http.InferInput("INPUT", [1, size], "UINT8")
    tensor.set_data_from_numpy(np.arange(size, dtype=np.uint8).reshape(1, size))
    body, header_length = triton_http.InferenceServerClient.generate_request_body(
        [tensor], outputs=[triton_http.InferRequestedOutput("OUTPUT")]
    )
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(header_length)}
    return Payload(Protocol.HTTP, "/v2/models/identity/infer", headers, body)


def _repository(folder: Path, batching: bool) -> Path:
    version = folder / "repository" / "identity" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG + ("dynamic_batching {}\n" if batching else ""))
    return folder


@contextlib.contextmanager
def _weir(folder: Path) -> Iterator[Server]:
    ports = free_ports()
    command = [sys.executable, "-m", "weir", "serve", f"--model-repository={folder / 'repository'}"]
    command += [f"--data-dir={folder / 'data'}", "--exit-timeout-secs=5", *port_options(ports)]
    with running("weir", command, folder, ports, None) as server:
        yield server


@contextlib.contextmanager
def _triton(folder: Path, installation: TritonInstallation) -> Iterator[Server]:
    installation.write_backends(folder / "backends")
    ports = free_ports()
    command = [
        str(installation.server),
        f"--model-repository={folder / 'repository'}",
        f"--backend-directory={folder / 'backends'}",
        "--backend-config=python,shm-default-byte-size=67108864",
        "--exit-timeout-secs=5",
        "--allow-gpu-metrics=false",
        *(f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")),
        *port_options(ports),
    ]
    with running("triton", command, folder, ports, installation.environment) as server:
        yield server


if __name__ == "__main__":
    typer.run(compare)
