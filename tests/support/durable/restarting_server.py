"""`Served`: a `weir serve` that survives any number of killed processes, and the processes it consists of."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import READY_FD

ROLES = ("worker", "scheduler", "gateway", "durable", "nats-server")
_STOP_S = 60.0
_ROOT = Path(__file__).parents[3]


class Served:
    """A server that survives any number of killed processes. Addresses are `host:port`; `folder` has its log."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, addresses: dict[str, str]) -> None:
        self.process = process
        self.folder = folder
        self.http = addresses["http"]
        self.grpc = addresses["grpc"]
        self.metrics = addresses["metrics"]
        self.nats_url = addresses["nats_url"]
        self.worst_rss_bytes: dict[str, int] = {}

    def log(self) -> str:
        """What it and its roles have logged."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def roles(self) -> dict[str, psutil.Process]:
        """The process of each role that runs just now."""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
                words = [Path(word).name for word in " ".join(child.cmdline()).split()[:6]]
                role = next((role for role in ROLES if role in words), None)
                if role is not None:
                    found[role] = child
        return found

    def sample_memory(self) -> None:
        """Looks at what each role has in memory, and keeps the most."""
        for role, process in self.roles().items():
            with contextlib.suppress(psutil.Error):
                rss_bytes = process.memory_info().rss
                self.worst_rss_bytes[role] = max(rss_bytes, self.worst_rss_bytes.get(role, 0))

    def kill(self, role: str) -> bool:
        """kill -9 of this role, if it runs; returns whether it did."""
        process = self.roles().get(role)
        if process is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            return True
        return False


@contextlib.contextmanager
def tireless(folder: Path, repository: Path, *options: str) -> Iterator[Served]:
    """A server of `repository` with its data in `folder`, on free ports. Raises SystemExit when it does not start."""
    ready, announced = os.pipe()
    command = [
        *(sys.executable, "-m", "tests.support.durable.tireless", "serve"),
        *(f"--model-repository={repository}", f"--data-dir={folder / 'data'}"),
        *("--http-port=0", "--grpc-port=0", "--metrics-port=0", *options),
    ]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, READY_FD: str(announced), "PYTHONPATH": str(_ROOT)},
            cwd=folder,
            pass_fds=(announced,),
            start_new_session=True,  # an interrupt from the keyboard is for us to pass on
            preexec_fn=dies_with_parent(),
        )
    os.close(announced)
    try:
        with os.fdopen(ready) as pipe:
            addresses = json.loads(pipe.readline() or "{}")
        if not addresses.get("ready"):
            raise SystemExit(f"the server did not start: {(folder / 'log.txt').read_text(errors='replace')}")
        yield Served(process, folder, addresses)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _STOP_S
    process.send_signal(signal.SIGTERM)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
