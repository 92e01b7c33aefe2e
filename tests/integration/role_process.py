"""`RoleProcess`: one role as a command of its own, as containers run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving import clean_environment

from bus.parent_death import dies_with_parent
from telemetry.readiness import READY_FD


class RoleProcess:
    """One role; `facts` are what it announced when it was ready."""

    def __init__(self, folder: Path, role: str, *options: str) -> None:
        self._log = folder / f"{role}-{len(list(folder.iterdir()))}.log"
        ready, announced = os.pipe()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weir", role, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**clean_environment(folder), READY_FD: str(announced)},
                pass_fds=(announced,),
                preexec_fn=dies_with_parent(),
            )
        os.close(announced)
        with os.fdopen(ready) as pipe:
            self.facts: dict[str, Any] = json.loads(pipe.readline() or "{}")
        assert self.facts.get("ready"), self._log.read_text()

    def log(self) -> str:
        return self._log.read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)
