"""Roles started one by one with the settings of a test, against one nats-server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from endpoints import Endpoints
from serving import clean_environment

from bus.embedded import EmbeddedNats
from bus.parent_death import dies_with_parent
from telemetry.readiness import READY_FD

_PROGRAM = """
import json, pathlib, sys
from {role}.main import run
from {role}.settings import {role_class}Settings as Settings
given = json.loads(sys.argv[1])
if "model_repositories" in given:
    given["model_repositories"] = tuple(map(pathlib.Path, given["model_repositories"]))
sys.exit(run(Settings(**{{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}})))
"""


class Roles:
    """Starts roles, and ends those that still run; each must end cleanly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.nats = EmbeddedNats(folder / "nats")
        self.nats.start()

    def __call__(self, role: str, **settings: Any) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """The process of a new role, and what it announced."""
        ready, announced = os.pipe()
        log_path = self._folder / f"{role}-{len(self._processes)}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _PROGRAM.format(role=role, role_class=role.title()),
                    json.dumps({"nats_url": self.nats.url, **settings}),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**clean_environment(self._folder), READY_FD: str(announced)},
                pass_fds=(announced,),
                preexec_fn=dies_with_parent(),
            )
        self._processes.append(process)
        os.close(announced)
        with os.fdopen(ready) as pipe:
            facts = json.loads(pipe.readline() or "{}")
        assert facts, log_path.read_text()
        return process, facts

    def worker(self, **settings: Any) -> subprocess.Popen[bytes]:
        """A worker of the folder `models`."""
        process, facts = self("worker", model_repositories=[str(self._folder / "models")], **settings)
        assert facts.get("ready"), facts
        return process

    def gateway(self, **settings: Any) -> Endpoints:
        """Where a new gateway listens."""
        _, facts = self("gateway", http_port=0, grpc_port=0, metrics_port=0, **settings)
        assert facts.get("ready"), facts
        return Endpoints(*(f"127.0.0.1:{facts[f'{name}_port']}" for name in ("http", "grpc", "metrics")))

    def end_all(self) -> None:
        """Ends what still runs, the last started first."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0

    def close(self) -> None:
        """Kills what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self.nats.stop()
