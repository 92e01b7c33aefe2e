"""`Cluster`: any number of gateways, schedulers and workers as separate processes on one nats-server.

`write_sleeper` writes models that take a fixed time on any machine: they sleep without the interpreter's lock and
return their input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from weir.bus.nats.embedded_server import SYNCED_SERVER_VARIABLE, EmbeddedNats
from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import READY_FD

_ROOT = Path(__file__).parents[2]
_STOP_S = 30.0


class RoleProcess:
    """One role; `place` is where a gateway listens for HTTP, as `host:port`."""

    def __init__(self, role: str, options: list[str], log: Path, environment: dict[str, str]) -> None:
        self.role = role
        self._options = options
        self._log = log
        self._environment = environment
        self.place = ""
        self.start()

    def start(self) -> None:
        """Starts it, again on the same port. Raises SystemExit when it does not start."""
        ready, announced = os.pipe()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weir", self.role, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, READY_FD: str(announced)},
                pass_fds=(announced,),
                start_new_session=True,  # an interrupt from the keyboard is for us to pass on
                preexec_fn=dies_with_parent(),
            )
        os.close(announced)
        self._ready = ready
        self._watched = psutil.Process(self.process.pid)

    def wait_ready(self) -> None:
        """Returns when it is ready. Raises SystemExit when it ends instead."""
        with os.fdopen(self._ready) as pipe:
            reply = json.loads(pipe.readline() or "{}")
        if not reply.get("ready"):
            raise SystemExit(f"{self.role} did not start: {self._log.read_text(errors='replace')[-2000:]}")
        if "http_port" in reply and not self.place:
            self.place = f"127.0.0.1:{reply['http_port']}"
            self._options = [*self._options, f"--http-port={reply['http_port']}"]

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    @property
    def watched(self) -> psutil.Process:
        """It, as psutil has it."""
        return self._watched


class Cluster:
    """Roles on one nats-server; call `close`. `folder` has the models (in `models`), logs and data."""

    def __init__(self, folder: Path, gateways: int = 1, schedulers: int = 1, workers: int = 1) -> None:
        self._folder = folder
        (folder / "logs").mkdir(parents=True)
        self.nats = EmbeddedNats(folder / "nats")
        self.nats.start()
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            SYNCED_SERVER_VARIABLE: self.nats.synced_name,
        }
        self.roles: dict[str, list[RoleProcess]] = {"scheduler": [], "worker": [], "gateway": []}
        for role, count in (("scheduler", schedulers), ("worker", workers), ("gateway", gateways)):
            for _ in range(count):
                self.add(role)
        for of_role in self.roles.values():
            for process in of_role:
                process.wait_ready()

    def add(self, role: str) -> RoleProcess:
        """Starts one more, which is not waited for."""
        options = [f"--nats={self.nats.url}"]
        if role == "worker":
            options.append(f"--model-repository={self._folder / 'models'}")
        if role == "gateway":
            options += ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        log = self._folder / "logs" / f"{role}-{len(self.roles[role])}.log"
        process = RoleProcess(role, options, log, self._environment)
        self.roles[role].append(process)
        return process

    @property
    def places(self) -> list[str]:
        """Where gateways listen for HTTP."""
        return [gateway.place for gateway in self.roles["gateway"]]

    def processes(self) -> dict[str, psutil.Process]:
        """All that run, nats-server too, by a name of their own."""
        found = {
            f"{role} {number}": process.watched
            for role, of_role in self.roles.items()
            for number, process in enumerate(of_role, 1)
            if process.is_running
        }
        if self.nats.pid is not None:
            found["nats-server"] = psutil.Process(self.nats.pid)
        return found

    def cpu_s(self) -> float:
        """Seconds of CPU that all of them have used."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes().values())

    def close(self) -> None:
        """Ends all, those that ask before those that answer."""
        for role in ("gateway", "worker", "scheduler"):
            running = [process for process in self.roles[role] if process.is_running]
            for process in running:
                process.process.terminate()
            for process in running:
                try:
                    process.process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        self.nats.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Returns when it holds. Raises SystemExit when it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("it did not come about in time")
        time.sleep(0.02)


_CONFIG = """
backend: "sleeper" max_batch_size: {batch}
input {{ name: "IN" data_type: TYPE_INT64 dims: [ 1 ] }}
output {{ name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
{batching}
"""
_BACKEND = """
import time

import numpy as np

from weir.backend import ArrayBackend


class Backend(ArrayBackend):
    def open(self, model):
        def run(inputs):
            time.sleep({seconds})
            return {{"OUT": np.array(inputs["IN"])}}

        return run
"""


def write_sleeper(repository: Path, name: str, ms: float, batch: int = 1, instances: int = 1) -> None:
    """One whose batches of up to `batch` take `ms`; 0: as long as it takes to copy them."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    batching = "dynamic_batching { }" if batch > 1 else ""
    (folder / "config.pbtxt").write_text(_CONFIG.format(batch=batch, instances=instances, batching=batching))
    (folder / "backend.py").write_text(_BACKEND.format(seconds=ms / 1000))
