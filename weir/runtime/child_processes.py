"""Child processes: when one that died is restarted, and how all of them end with their parent.

`RestartPolicy` and `RestartHistory` compute delays and budget from given times, for the roles of `weir serve` and for the
processes of Python models. `dies_with_parent` uses Linux's parent-death signal, which reaches one process;
`KillOnParentExit` also kills the processes that a child has started.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any


def environment_of_helpers(*without: str) -> dict[str, str]:
    """The environment of this process for a child that is no role, without variables that begin with OTEL_ or `without`.

    They may hold secrets, such as the headers for a collector of traces, and /proc shows a child's as long as it runs.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", *without))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `longest_delay_s`, and start over after `healthy_s` of being ready.

    With `is_first_at_once` a delay of 0 precedes them. After `budget` deaths within `window_s` the process is not
    restarted; with None it always is.
    """

    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    healthy_s: float = 30.0
    is_first_at_once: bool = False
    budget: int | None = 10
    window_s: float = 60.0


class RestartHistory:
    """The deaths of one process and its successors. Times are seconds of any one clock."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._delay = self._first_delay
        self._deaths: deque[float] = deque(maxlen=policy.budget or 0)

    @property
    def _first_delay(self) -> float:
        return 0.0 if self._policy.is_first_at_once else self._policy.first_delay_s

    def died(self, now: float, ready_since: float | None) -> float | None:
        """Counts a death; returns the seconds to wait before the next start, None when the budget is spent.

        `ready_since` is when the process that died became ready, None if it never did.
        """
        policy = self._policy
        if ready_since is not None and now - ready_since >= policy.healthy_s:
            self._delay = self._first_delay
        self._deaths.append(now)
        if policy.budget and len(self._deaths) == policy.budget and now - self._deaths[0] <= policy.window_s:
            return None
        delay = self._delay
        self._delay = min(max(2 * delay, policy.first_delay_s), policy.longest_delay_s)
        return delay


_F_SETSIG = 10  # Linux's; the module `fcntl` has no name for it


class KillOnParentExit:
    """A process group that the kernel kills when this process ends, however that happens.

    The group holds the reading end of a pipe whose other end this process holds. When that closes, the kernel sends SIGKILL
    to the group. Pass `fd` on to the first process of the group, which need not do anything with it.
    """

    def __init__(self) -> None:
        self.fd, self._held_fd = os.pipe()

    def tie(self, group: int) -> None:
        """Kills this process group when `close` is called, or this process ends."""
        fcntl.fcntl(self.fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, -group)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_ASYNC)
        self._close_fd()

    def close(self) -> None:
        """Kills what is left of the group. May be called repeatedly, and without `tie`."""
        self._close_fd()
        if self._held_fd >= 0:
            os.close(self._held_fd)
            self._held_fd = -1

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def run_in_group(
    command: Sequence[str], timeout_s: float, *, input: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end, in a process group that the kernel kills when this process ends. Blocking.

    `input` is its standard input (None: empty), `options` are those of `subprocess.Popen`; its standard output is returned
    as text. Raises OSError, and TimeoutExpired after the group was killed.
    """
    with closing(KillOnParentExit()) as group:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[group.fd],
            start_new_session=True,
            **options,
        )
        group.tie(process.pid)
        try:
            output, errors = process.communicate(input, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            group.close()
            process.communicate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors or "")


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dies_with_parent() -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel kills the child when the thread that started it ends.

    Start such processes from a thread that lives as long as they should, the main thread for example.
    """
    # Looked up before the fork: between fork and exec only plain system calls are safe.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # the parent died before the request to the kernel
            os._exit(1)

    return ask_kernel
