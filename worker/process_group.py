"""`GroupTie`: a process group that the kernel kills when this process ends, however that happens.

The parent-death signal reaches one process alone; what that has started would live on. So its group holds the reading end
of a pipe of which this process has the other one, and of which the kernel tells the group by SIGKILL that it was closed.
"""

from __future__ import annotations

import fcntl
import os
import signal

_F_SETSIG = 10  # of Linux; the module `fcntl` does not name it


class GroupTie:
    """See the module. `fd` is to be passed on to the group's first process, which need not know of it."""

    def __init__(self) -> None:
        self.fd, self._held_fd = os.pipe()

    def tie(self, group: int) -> None:
        """Kills this group when the tie is closed, or this process ends."""
        fcntl.fcntl(self.fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self.fd, fcntl.F_SETOWN, -group)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_ASYNC)
        self._close_fd()

    def close(self) -> None:
        """Kills what is left of the group. May be called again, and of one that was never tied."""
        self._close_fd()
        if self._held_fd >= 0:
            os.close(self._held_fd)
            self._held_fd = -1

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
