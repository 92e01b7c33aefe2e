"""The demo's server, started as by `make serve`, for the commands in the documentation."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.docs.pages import ROOT

DRAWN_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--nats-port=0")

DOCUMENTED_PORTS = {"HTTP": "8000", "gRPC": "8001", "metrics": "8002", "NATS": "4222"}
"""Where the pages ask a server that `make serve` has started."""


@dataclass(frozen=True)
class Served:
    """What `make serve` left running: the folder it was started in, what it printed, and its real ports."""

    folder: Path
    printed: str
    ports: dict[str, str]
    nats_url: str
    console_url: str = ""

    def here(self, text: str) -> str:
        """`text` of the documentation with the ports of this server."""
        for documented, real in self.ports.items():
            text = text.replace(f"localhost:{documented}", f"127.0.0.1:{real}")
        return text


def in_venv(command: str) -> list[str]:
    """The words of a documented command, with programs of `.venv/bin` taken from where this Python is."""
    words = shlex.split(command)
    words[0] = words[0].replace(".venv/bin", str(Path(sys.executable).parent))
    return words


def environment(served: Served | None = None) -> dict[str, str]:
    """This process's environment, in which modules of the checkout are found from any folder, and `served`'s NATS_URL."""
    reply = {"NATS_URL": served.nats_url} if served is not None else {}
    return {**os.environ, "PYTHONPATH": str(ROOT), **reply}


@contextmanager
def demo_served(
    folder: Path, *options: str, python: str | Path = sys.executable, path: str = str(ROOT)
) -> Iterator[Served]:
    """The demo's server on free ports, with what it makes in `folder`; it must end cleanly. `path` is its PYTHONPATH."""
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [python, "-m", "weir", "demo", "--serve", *DRAWN_PORTS, *options],
            cwd=folder,
            env={**environment(), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    try:
        printed = ""
        while "Files to try" not in printed:
            line = process.stdout.readline()
            assert line, log.read_text()
            printed += line
        rows = [line.split() for line in printed.splitlines()]
        listening = ("HTTP", "gRPC", "metrics", "NATS", "console")
        places = {row[0]: row[1] for row in rows if len(row) == 2 and row[0] in listening}
        numbers = {name: place.removesuffix("/metrics").rpartition(":")[2] for name, place in places.items()}
        (url_file,) = (row[2] for row in rows if row[:2] == ["NATS", "access"])
        nats_url = (folder / url_file).read_text().strip()
        ports = {port: numbers[name] for name, port in DOCUMENTED_PORTS.items() if name in numbers}
        yield Served(folder, printed, ports, nats_url, places.get("console", ""))
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        process.stdout.close()
    assert status == 0, log.read_text()
