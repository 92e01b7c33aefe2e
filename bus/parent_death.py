"""Children that can't outlive their parent, even one killed with SIGKILL: Linux's parent-death signal.

Promises that a process started with `preexec_fn=dies_with_parent()` is killed by the kernel when the thread that
started it ends. Start such processes from a thread that lives as long as they shall: the main one.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dies_with_parent() -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the child gets SIGKILL once the calling thread is gone."""
    # Looked up before the fork: between fork and exec only plain system calls are safe.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # the parent died before the kernel was asked
            os._exit(1)

    return ask_kernel
