"""The processes of Python models: children of their worker, or of the worker's fork server."""

from __future__ import annotations

import contextlib

import psutil

from weir.worker.python_stub._weir_fork_server import ARGUMENT


def model_processes(worker: int | None = None) -> list[psutil.Process]:
    """The processes that run models for this worker (default: this process), without those that have ended."""
    found: list[psutil.Process] = []
    for child in psutil.Process(worker).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += child.children() if is_fork_server(child) else [child]
    return [process for process in found if _runs(process)]


def fork_servers(worker: int | None = None) -> list[psutil.Process]:
    """The fork servers of this worker (default: this process)."""
    return [child for child in psutil.Process(worker).children() if is_fork_server(child)]


def is_fork_server(process: psutil.Process) -> bool:
    """Whether this is a fork server, or a process that one has forked."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return ARGUMENT in process.cmdline()
    return False


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
