"""`Server`: one `weir serve` as a process, and the check that nothing is left when it has stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.support.models.processes import model_processes
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.forked_commands import COMMAND, run_weir
from tests.support.waiting import wait_until

ROLES = ("scheduler", "worker", "durable", "gateway")

_SEGMENT = re.compile(r"/dev/shm/(\.?weir-[^\s]+)")


def alive(pid: int) -> bool:
    """Whether the process runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def segments_of(pids: list[int]) -> set[str]:
    """The payload segments these processes have mapped, as paths that still exist."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names.update(_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text()))
    return {name for name in names if Path("/dev/shm", name).exists()}


def clean_environment(folder: Path) -> dict[str, str]:
    """This process's environment without settings of ours, and with a folder for temporary files of its own."""
    (folder / "tmp").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    return {**kept, "TMPDIR": str(folder / "tmp")}


class Server(Endpoints):
    """A running `weir serve` on free ports. `folder` is its own: log, data and temporary files lie there.

    As a context it is stopped at the end, and must stop cleanly.

    `before` are the words of a command that becomes the server, as `unshare` does.
    """

    def __init__(
        self,
        folder: Path,
        repository: Path,
        *options: str,
        start_timeout_s: float = 40.0,
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._log = folder / "stderr"
        self._out = folder / "stdout"
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        with self._log.open("wb") as errors, self._out.open("wb") as out:
            self.process = run_weir(
                ["serve", f"--model-repository={repository}", *ports, *options],
                {**clean_environment(folder), **(environment or {})},
                out.fileno(),
                errors.fileno(),
                before=before,
            )
        try:
            wait_until(lambda: "\n\n" in self.printed().strip() or self.process.poll() is not None, start_timeout_s)
            assert self.process.poll() is None, self.log()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        super().__init__(
            self.printed_value("HTTP").rpartition("/")[2],
            self.printed_value("gRPC").rpartition("/")[2],
            self.printed_value("metrics").removesuffix("/metrics").rpartition("/")[2],
        )
        is_embedded = "  NATS access " in self.printed()
        self.nats_url = Path(self.printed_value("NATS access")).read_text().strip() if is_embedded else ""
        self.nats_url = self.nats_url or self.printed_value("NATS")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops it, which must succeed, and leaves nothing."""
        try:
            if kind is None:
                assert self.stop() == 0, self.log()
        finally:
            self.close()

    def printed(self) -> str:
        """What it wrote to its standard output."""
        return self._out.read_text()

    def log(self) -> str:
        """What it wrote to its standard error."""
        return self._log.read_text()

    def batches(self, model: str) -> Counter[str]:
        """The batches that the scheduler has sent of `model`, by their ids, each with its number of requests.

        From the log: the server needs --log-verbose=1.
        """
        return Counter(re.findall(rf", model '{re.escape(model)}': in batch (\d+) for instance ", self.log()))

    def printed_value(self, row: str) -> str:
        """The value in a row of the start-up block."""
        found = re.search(rf"^  {row} +(\S+)$", self.printed(), re.MULTILINE)
        assert found, self.printed()
        return found[1]

    # Processes

    def processes(self) -> list[psutil.Process]:
        """Everything it has started, and itself."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def pids(self) -> dict[str, int]:
        """The process of each role, and `nats`; a role that does not run just now is missing."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(child.cmdline()).split()  # a forked role has one word there
                if child.status() == psutil.STATUS_ZOMBIE or not command:
                    continue
                if command[0].endswith("nats-server"):
                    found["nats"] = child.pid
                elif len(command) > len(COMMAND) and command[len(COMMAND)] in ROLES:
                    found[command[len(COMMAND)]] = child.pid
        return found

    def python_children(self) -> list[int]:
        """The processes of Python models."""
        worker = self.pids().get("worker")
        if worker is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process.pid for process in model_processes(worker)]
        return []

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a role once it runs; returns the process's id, when it is dead if that was to be."""
        pid = wait_until(lambda: self.pids().get(role))
        os.kill(pid, number)
        if number == signal.SIGKILL:
            wait_until(lambda: not alive(pid))
        return int(pid)

    def segments(self) -> set[str]:
        """The payload segments in use by its processes."""
        return segments_of([process.pid for process in self.processes()])

    def wait_ready(self, model: str = "", timeout_s: float = 30.0) -> None:
        """Returns once every role runs and this model is ready, or all are."""
        wait_until(lambda: len(self.pids()) == len(ROLES) + 1 and self.is_ready(model), timeout_s)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Ends it and returns its status; asserts that no process, no shared memory and no temporary file is left."""
        processes, segments = self.processes(), self.segments()
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        wait_until(lambda: not any(alive(process.pid) for process in processes))
        left = {name for name in segments if Path("/dev/shm", name).exists()}
        assert not left
        assert not list((self.folder / "tmp").iterdir())
        return status

    def close(self) -> None:
        """Ends it somehow, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Serve = Callable[..., Server]
"""Starts a server of the given repository with further options of `weir serve`."""
