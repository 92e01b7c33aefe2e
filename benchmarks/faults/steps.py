"""`Steps`: the driver's side of pause points: has a role stop, or die, at a step of a request's life, and hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from weir.pause_points import POINTS

LIVE = ("accepted", "published", "pulled", "batched", "executing", "answered", "acked", "delivered")
"""The eight steps of a live request."""

DURABLE = (
    "durable.pulled",
    "durable.submitted",
    "durable.answered",
    "durable.recorded",
    "durable.replied",
    "durable.purged",
)
"""The steps that a durable request has besides."""

_LOOK_S = 0.005


class Steps:
    """See the module. `folder` is made; processes are told of it by their environment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(folder / "driver"))

    @staticmethod
    def role_of(step: str) -> str:
        """Whose step it is."""
        return POINTS[step].role

    def order(self, pid: int, step: str, action: str, passages: int = 1, delay_ms: float = 0) -> bool:
        """Orders something at a step of this process; False where it takes no orders (yet, or any more)."""
        try:
            self._socket.sendto(f"{step} {action} {passages} {delay_ms}".encode(), str(self.folder / str(pid)))
        except OSError:
            return False
        return True

    async def told_any(self, pids: Sequence[int], step: str, timeout_s: float) -> int | None:
        """The process of these that is first to come there; None where none does in time."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(BlockingIOError):
                while True:
                    _, pid, point = self._socket.recv(200).decode().split()
                    if int(pid) in pids and point == step:
                        return int(pid)
            await asyncio.sleep(_LOOK_S)
        return None

    def close(self) -> None:
        """Hears no more."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / "driver")
