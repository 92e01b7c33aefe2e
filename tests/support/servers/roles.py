"""Roles as separate commands against one nats-server, as containers run them.

`RoleProcess` is one role. `Start` starts roles of a test and stops them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.servers.endpoints import Endpoints
from tests.support.servers.forked_commands import WeirProcess, run_weir
from tests.support.servers.weir_server import clean_environment, segments_of
from weir.bus.naming.identity import HOST_VARIABLE
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import READY_FD


def role_started(
    words: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> tuple[WeirProcess | subprocess.Popen[bytes], dict[str, Any]]:
    """`weir` with these words, a role, and what it announced: that it is ready, or why it does not start."""
    ready, announced = os.pipe()
    reply = {**clean_environment(folder), **(environment or {}), READY_FD: str(announced)}
    with log.open("wb") as output:
        process = run_weir(words, reply, output.fileno(), output.fileno(), announced)
    os.close(announced)
    with os.fdopen(ready) as pipe:
        return process, json.loads(pipe.readline() or "{}")


def started(
    arguments: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """As `role_started`, of a role that Python runs with these arguments."""
    ready, announced = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**clean_environment(folder), **(environment or {}), READY_FD: str(announced)},
            pass_fds=(announced,),
            preexec_fn=dies_with_parent(),
        )
    os.close(announced)
    with os.fdopen(ready) as pipe:
        return process, json.loads(pipe.readline() or "{}")


class RoleProcess:
    """One role, on another `host` than this where that is named; `facts` are what it announced when it was ready."""

    def __init__(
        self, folder: Path, role: str, *options: str, host: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = folder / f"{role}-{len(list(folder.iterdir()))}.log"
        environment = {**(environment or {}), **({HOST_VARIABLE: host} if host else {})}
        self.process, self.facts = role_started([role, *options], folder, self._log, environment)
        assert self.facts.get("ready"), self._log.read_text()

    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


class Start:
    """Starts roles against one nats-server, and ends them."""

    def __init__(self, folder: Path, nats: Any = None) -> None:
        """`nats` is where they connect to, something with a `url` and `stop`; without it a server is started."""
        (folder / "logs").mkdir()
        self.folder = folder
        self._roles: list[RoleProcess] = []
        self.nats = nats
        if nats is None:
            self.nats = EmbeddedNats(folder / "nats")
            self.nats.start()

    def __call__(
        self, role: str, *options: str, host: str = "", environment: Mapping[str, str] | None = None
    ) -> RoleProcess:
        url = self.nats.url_of(role) if hasattr(self.nats, "url_of") else self.nats.url
        role_process = RoleProcess(
            self.folder / "logs", role, f"--nats={url}", *options, host=host, environment=environment
        )
        self._roles.append(role_process)
        return self._roles[-1]

    def worker(self, *options: str, host: str = "") -> RoleProcess:
        """A worker of the test's models, on another host than this where that is named."""
        return self("worker", f"--model-repository={self.folder / 'models'}", *options, host=host)

    def gateway(self, *options: str, host: str = "") -> Endpoints:
        """Where a new gateway listens, on another host than this where that is named."""
        ports = self("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0", *options, host=host).facts
        return Endpoints(*(f"127.0.0.1:{ports[f'{name}_port']}" for name in ("http", "grpc", "metrics")))

    def logs(self) -> str:
        """What all roles have logged."""
        return "".join(role.log() for role in self._roles)

    def end_all(self) -> None:
        """Ends what still runs, those that ask before those that answer; nothing may be left of it."""
        running = [role for role in self._roles if role.process.poll() is None]
        segments = segments_of([role.process.pid for role in running])
        for role in reversed(running):
            assert role.end() == 0, role.log()
        assert not {name for name in segments if Path("/dev/shm", name).exists()}

    def close(self) -> None:
        """Kills what still runs."""
        for role in self._roles:
            role.process.kill()
            role.process.wait()
        self.nats.stop()
