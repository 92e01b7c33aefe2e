"""CPU time of a server's processes, by role."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import psutil

_ROLES = {
    "serve": "supervisor",
    "gateway": "gateway",
    "scheduler": "scheduler",
    "worker": "worker",
    "nats-server": "nats-server",
    "tritonserver": "tritonserver",
    "triton_python_backend_stub": "Python backend",
}
_QUIET_CORES = 0.1
_QUIET_WINDOW_S = 0.2
_QUIET_DEADLINE_S = 3.0


class ProcessTree:
    """A process and all its descendants, as they are now. Times are user and system, in seconds."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._roles = {process: _role(process) for process in (root, *root.children(recursive=True))}

    def cpu_s_by_role(self) -> Counter[str]:
        """Seconds spent so far. Raises psutil.NoSuchProcess when one of the processes has ended: figures would lie."""
        seconds: Counter[str] = Counter()
        for process, role in self._roles.items():
            times = process.cpu_times()
            seconds[role] += times.user + times.system
        return seconds

    def cpu_s(self) -> float:
        """Seconds spent so far by all."""
        return sum(self.cpu_s_by_role().values())

    def idle_cores(self, seconds: float = 1.0) -> float:
        """Cores used over the next `seconds`, to be asked while nobody sends requests."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds

    def wait_until_quiet(self) -> None:
        """Returns once what earlier requests set off is done."""
        deadline = time.monotonic() + _QUIET_DEADLINE_S
        while self.idle_cores(_QUIET_WINDOW_S) > _QUIET_CORES and time.monotonic() < deadline:
            pass


def machine_busy_s() -> float:
    """Seconds of CPU spent so far by everything on the machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _role(process: psutil.Process) -> str:
    words = [Path(word).name for word in " ".join(process.cmdline()).split()]
    return next((_ROLES[word] for word in words if word in _ROLES), process.name())
