"""`Installation`: a version of Weir that is installed in a folder, and `VersionedRole`: one role of it as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers.weir_server import clean_environment
from weir.bus.naming.identity import HOST_VARIABLE
from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import READY_FD

BEFORE_VARIABLE = "WEIR_VERSION_BEFORE"
"""Names the folder of the installation of the version before this one."""

_STOP_S = 60.0


@dataclass(frozen=True)
class Installation:
    """One version: its interpreter, which finds its packages."""

    name: str
    python: str

    def package_folder(self) -> Path:
        """The folder of the package `weir` that its roles run."""
        command = [self.python, "-P", "-c", "import weir; print(weir.__file__)"]
        printed = subprocess.run(command, env=_without_paths(os.environ), check=True, capture_output=True, text=True)
        return Path(printed.stdout.strip()).parent


def this_version() -> Installation:
    """The version under test."""
    return Installation("after", sys.executable)


def version_before() -> Installation | str:
    """The installation that `WEIR_VERSION_BEFORE` names: a virtual environment, or a checkout with one in `.venv`.

    Returns why there is none to test with, where there is none.
    """
    folder = os.environ.get(BEFORE_VARIABLE, "")
    if not folder:
        return f"{BEFORE_VARIABLE} is not set: it names a virtual environment with the version before, or its checkout"
    for path in (Path(folder, "bin/python"), Path(folder, ".venv/bin/python")):
        if path.exists():
            before = Installation("before", str(path.absolute()))
            if before.package_folder() == this_version().package_folder():
                return f"{BEFORE_VARIABLE}={folder} runs the version under test: it must name another installation"
            return before
    return f"{BEFORE_VARIABLE}={folder} has neither bin/python nor .venv/bin/python"


class VersionedRole:
    """A role of an installation, as a process of its own that believes to be on this `host`.

    It is ready once constructed; `facts` are what it announced.
    """

    def __init__(self, installation: Installation, folder: Path, *words: str, host: str) -> None:
        self.installation = installation
        self._log = folder / f"{words[0]}-{len(list(folder.glob('*.log')))}-{installation.name}.log"
        ready, announced = os.pipe()
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [installation.python, "-P", "-m", "weir", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**_without_paths(clean_environment(folder)), READY_FD: str(announced), HOST_VARIABLE: host},
                pass_fds=(announced,),
                preexec_fn=dies_with_parent(),
            )
        os.close(announced)
        with os.fdopen(ready) as pipe:
            self.facts: dict[str, Any] = json.loads(pipe.readline() or "{}")
        assert self.facts.get("ready"), self.log()

    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ends it with SIGTERM and waits for its end, which must be a clean one."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(_STOP_S) == 0, self.log()

    def kill(self) -> None:
        """Ends it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _without_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would lead an interpreter to the packages of another version."""
    return {
        name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
