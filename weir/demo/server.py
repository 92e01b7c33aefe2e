"""`weir serve` as a child process, for as long as a `with` block lasts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weir.errors import StartError
from weir.runtime.child_processes import dies_with_parent

STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class DemoServer:
    """A server that is ready: `http` and `grpc` are `host:port`, `metrics` is a URL, `block` what it printed."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    block: str


@contextmanager
def running_server(
    repositories: Iterable[Path], options: Sequence[str], log: Path | None = None
) -> Iterator[DemoServer]:
    """Serves `repositories` with further `weir serve` options; its log goes to `log`, by default to stderr.

    Raises StartError if the server can't start. At the end of the block it is stopped.
    """
    repository_options = [f"--model-repository={repository}" for repository in repositories]
    command = [sys.executable, "-P", "-m", "weir", "serve", *repository_options, *options]
    stderr = None if log is None else log.open("w")
    # A session of its own: Ctrl-C is for this program, which then stops the server once.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        preexec_fn=dies_with_parent(),
    )
    try:
        yield _when_ready(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            if stderr is not None:
                stderr.close()


def _when_ready(process: subprocess.Popen[str], log: Path | None) -> DemoServer:
    assert process.stdout is not None  # noqa: S101 - for the type checker
    lines: list[str] = []
    places: dict[str, str] = {}
    for line in process.stdout:
        lines.append(line)
        match line.split():
            case [("HTTP" | "gRPC" | "metrics") as name, place]:
                places[name] = place
            case [] if len(places) == 3:  # the models follow; where the server listens is known
                if places["HTTP"].startswith("https://"):
                    raise StartError("weir demo sends its requests without TLS: leave out the options --tls-...")
                http = places["HTTP"].removeprefix("http://")
                return DemoServer(process, http, places["gRPC"], places["metrics"], "".join(lines))
    process.wait()
    raise StartError("the server did not start" + (f":\n{log.read_text()}" if log is not None else ""))
