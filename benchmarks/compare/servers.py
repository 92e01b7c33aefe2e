"""`Server`: one of the two servers, running with all networks on free ports of loopback, and its CPU time by role."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.compare.installation import TritonInstallation
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.targets import Protocol
from weir.runtime.child_processes import dies_with_parent

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
    """One running server with its ports and processes."""

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
    with running("weir", [*weir_command(folder), *port_options(ports)], folder, ports, None) as server:
        yield server


def weir_command(folder: Path) -> list[str]:
    """The command, without ports, that serves the models in the folder `repository` of `folder`."""
    return [
        str(Path(sys.executable).with_name("weir")),
        "serve",
        f"--model-repository={folder / 'repository'}",
        f"--data-dir={folder / 'data'}",
        "--exit-timeout-secs=5",
    ]


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


_ROLES = {
    "serve": "supervisor",
    "gateway": "gateway",
    "durable": "durable",
    "scheduler": "scheduler",
    "worker": "worker",
    "nats-server": "nats-server",
    "tritonserver": "tritonserver",
    "triton_python_backend_stub": "Python backend",
}
_QUIET_CORES = 0.1
_QUIET_WINDOW_S = 0.2
_QUIET_DEADLINE_S = 3.0


class ProcessTree:
    """A process and all its descendants, as they are now. Times are user and system, in seconds."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._roles = {process: _role(process) for process in (root, *root.children(recursive=True))}

    def cpu_s_by_role(self) -> Counter[str]:
        """Seconds spent so far. Raises psutil.NoSuchProcess when one of the processes has ended: figures would lie."""
        seconds: Counter[str] = Counter()
        for process, role in self._roles.items():
            times = process.cpu_times()
            seconds[role] += times.user + times.system
        return seconds

    def cpu_s(self) -> float:
        """Seconds spent so far by all."""
        return sum(self.cpu_s_by_role().values())

    def idle_cores(self, seconds: float = 1.0) -> float:
        """Cores used over the next `seconds`; call it while no requests are sent."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds

    def wait_until_quiet(self) -> None:
        """Returns once what earlier requests set off is done."""
        deadline = time.monotonic() + _QUIET_DEADLINE_S
        while self.idle_cores(_QUIET_WINDOW_S) > _QUIET_CORES and time.monotonic() < deadline:
            pass


def machine_busy_s() -> float:
    """Seconds of CPU spent so far by everything on the machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _role(process: psutil.Process) -> str:
    words = [Path(word).name for word in " ".join(process.cmdline()).split()]
    return next((_ROLES[word] for word in words if word in _ROLES), process.name())
