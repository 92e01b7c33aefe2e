"""`PausePoints`: the driver's side of the pause points: orders that a role stops or dies at a step of a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.pause_points import POINTS

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
"""The additional steps of a durable request."""

_LOOK_S = 0.005


class PausePoints:
    """Orders to roles at pause points. `folder` is created; roles receive it in their environment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(folder / "driver"))

    @staticmethod
    def role_of(step: str) -> str:
        """The role of a step."""
        return POINTS[step].role

    def order(self, pid: int, step: str, action: str, passages: int = 1, delay_ms: float = 0) -> bool:
        """Order an action at a step of this process; False if it does not accept orders."""
        try:
            self._socket.sendto(f"{step} {action} {passages} {delay_ms}".encode(), str(self.folder / str(pid)))
        except OSError:
            return False
        return True

    async def told_any(self, pids: Sequence[int], step: str, timeout_s: float) -> int | None:
        """The first of these processes to reach the step; None on a time-out."""
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
        """Close the socket."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / "driver")
