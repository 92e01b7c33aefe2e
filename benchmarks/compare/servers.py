"""`Server`: one of the two servers, running with all networks on free ports of loopback."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.compare.installation import TritonInstallation
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.processes import ProcessTree
from benchmarks.compare.targets import Protocol
from bus.parent_death import dies_with_parent

_TRITON_MODEL = Path(__file__).with_name("triton_model.py")
_START_S = 120.0
_STOP_S = 20.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Counters:
    """What a server says of one model since it started."""

    answered: float
    inferences: float
    executions: float

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.answered - earlier.answered,
            self.inferences - earlier.inferences,
            self.executions - earlier.executions,
        )


@dataclass(frozen=True)
class Server:
    """See the module."""

    name: str
    process: subprocess.Popen[bytes]
    ports: tuple[int, int, int]  # HTTP, gRPC, metrics

    def address(self, protocol: Protocol) -> str:
        return f"127.0.0.1:{self.ports[1 if protocol is Protocol.GRPC else 0]}"

    def processes(self) -> ProcessTree:
        return ProcessTree(self.process.pid)

    def counters(self, network: str) -> Counters:
        """The same names on both: they are Triton's."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=10) as response:
            text = response.read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

        def total(name: str) -> float:
            # The parser gives counters the ending that their names lack.
            return sum(
                sample.value
                for sample in samples
                if sample.name.removesuffix("_total") == name and sample.labels.get("model") == network
            )

        return Counters(
            total("nv_inference_request_success"), total("nv_inference_count"), total("nv_inference_exec_count")
        )


@contextlib.contextmanager
def running_weir(folder: Path) -> Iterator[Server]:
    """One gateway, one scheduler, one worker and the nats-server that comes along."""
    repository = folder / "repository"
    for network in NETWORKS.values():
        network.write(repository, "onnxruntime")
    ports = free_ports()
    command = [
        str(Path(sys.executable).with_name("weir")),
        "serve",
        f"--model-repository={repository}",
        f"--data-dir={folder / 'data'}",
        "--exit-timeout-secs=5",
        *port_options(ports),
    ]
    with running("weir", command, folder, ports, None) as server:
        yield server


@contextlib.contextmanager
def running_triton(folder: Path, installation: TritonInstallation) -> Iterator[Server]:
    """The tritonserver of the wheel with one stub process for each model."""
    repository = folder / "repository"
    for network in NETWORKS.values():
        shutil.copy(_TRITON_MODEL, network.write(repository, "python") / "model.py")
    installation.write_backends(folder / "backends")
    ports = free_ports()
    command = [
        str(installation.server),
        f"--model-repository={repository}",
        f"--backend-directory={folder / 'backends'}",
        "--backend-config=python,shm-default-byte-size=67108864",
        "--exit-timeout-secs=5",
        "--allow-gpu-metrics=false",
        *(f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")),
        *port_options(ports),
    ]
    with running("triton", command, folder, ports, installation.environment) as server:
        yield server


@contextlib.contextmanager
def running(
    name: str, command: list[str], folder: Path, ports: tuple[int, int, int], environment: dict[str, str] | None
) -> Iterator[Server]:
    """The server that `command` starts, from when it is ready until it is stopped; its log lies in `folder`."""
    log_path = folder / "log.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is for us to pass on
            preexec_fn=dies_with_parent(),
        )
    try:
        _wait_until_ready(name, process, ports[0], log_path)
        yield Server(name, process, ports)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(name: str, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    deadline = time.monotonic() + _START_S
    ready_url = f"http://127.0.0.1:{port}/v2/health/ready"
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(ready_url, timeout=5):
            return
        time.sleep(_POLL_S)
    raise SystemExit(f"{name} is not ready: see {log_path}")


def free_ports() -> tuple[int, int, int]:
    """Of HTTP, gRPC and metrics."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        http, grpc, metrics = (listener.getsockname()[1] for listener in sockets)
        return http, grpc, metrics


def port_options(ports: tuple[int, int, int]) -> list[str]:
    """Both servers' options for these ports."""
    return [f"--{service}-port={port}" for service, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
