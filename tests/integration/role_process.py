"""`RoleProcess`: one role as a command of its own, as containers run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prepared_weir import WeirProcess, run_weir
from serving import clean_environment

from bus.identity import HOST_VARIABLE
from bus.parent_death import dies_with_parent
from telemetry.readiness import READY_FD


def role_started(
    words: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str] | None = None
) -> tuple[WeirProcess | subprocess.Popen[bytes], dict[str, Any]]:
    """`weir` with these words, a role, and what it announced: that it is ready, or why it does not start."""
    ready, announced = os.pipe()
    told = {**clean_environment(folder), **(environment or {}), READY_FD: str(announced)}
    with log.open("wb") as output:
        process = run_weir(words, told, output.fileno(), output.fileno(), announced)
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

    def __init__(self, folder: Path, role: str, *options: str, host: str = "") -> None:
        self._log = folder / f"{role}-{len(list(folder.iterdir()))}.log"
        environment = {HOST_VARIABLE: host} if host else {}
        self.process, self.facts = role_started([role, *options], folder, self._log, environment)
        assert self.facts.get("ready"), self._log.read_text()

    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)
