"""`RoleHosts`: roles as processes against one nats-server, of which some are told that they run on another host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tritonclient.http as triton

from bus.embedded import EmbeddedNats
from bus.identity import HOST_VARIABLE
from telemetry.readiness import READY_FD


class RoleHosts:
    """See the module. `code` is run instead of the command line, where it is given; `stack` ends all."""

    def __init__(self, stack: ExitStack, code: str = "") -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._code = code
        self._nats = EmbeddedNats(self.folder / "nats")
        self._nats.start()
        stack.callback(self._nats.stop)
        self._processes: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end)

    @property
    def pids(self) -> list[int]:
        """Of all roles, and of nats-server."""
        assert self._nats.process is not None
        return [self._nats.process.pid, *(process.pid for process in self._processes)]

    def start(self, role: str, *options: str, host: str = "") -> Any:
        """What a new role announced when it was ready."""
        ready, announced = os.pipe()
        command = ["-c", self._code] if self._code else ["-m", "weir"]
        environment = {**os.environ, READY_FD: str(announced), **({HOST_VARIABLE: host} if host else {})}
        log_file = self.folder / f"{role}-{len(self._processes)}.log"
        with log_file.open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *command, role, f"--nats={self._nats.url}", *options],
                    env=environment,
                    pass_fds=(announced,),
                    stdout=log,
                    stderr=log,
                )
            )
        os.close(announced)
        with os.fdopen(ready) as pipe:
            facts = json.loads(pipe.readline() or "{}")
        if not facts.get("ready"):
            raise SystemExit(log_file.read_text())
        return facts

    def gateway(self, model: str, *options: str, host: str = "") -> str:
        """Where a new gateway listens for HTTP, once `model` is ready there."""
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        url = f"127.0.0.1:{self.start('gateway', *ports, *options, host=host)['http_port']}"
        with triton.InferenceServerClient(url) as client:
            while not client.is_model_ready(model):
                time.sleep(0.05)
        return url

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(30)
