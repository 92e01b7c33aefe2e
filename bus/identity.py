"""Names of processes on the bus, which tell on which host each runs.

Two processes share payloads in shared memory exactly when they see the same `/dev/shm`: the same boot of the same
kernel, and the same mount (containers usually have one each).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from functools import cache
from pathlib import Path

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108 - POSIX shared memory lives there on Linux


@cache
def host() -> str:
    """Eight hexadecimal digits, equal for processes that can share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mount = os.stat(SHARED_MEMORY_DIRECTORY).st_dev
    except OSError:  # no /proc or no /dev/shm: nothing can be shared, so be alone on this host
        return secrets.token_hex(4)
    return hashlib.blake2s(f"{boot}/{mount}".encode(), digest_size=4).hexdigest()


def new_id(role: str) -> str:
    """A fresh name for a process of `role` ("gateway"), unique over the cluster and over restarts."""
    return f"{role}-{host()}-{secrets.token_hex(4)}"


def own_id(role: str, given: str | None) -> str:
    """The name of a process of `role` that was given one, or else a fresh one. A given name is completed by the host.

    So it is the same after each restart, and tells all the same on which host it is.
    """
    return f"{given}-{host()}-{role}" if given else new_id(role)


def shares_memory(identity: str) -> bool:
    """Whether the process named `identity` can read this process's shared memory."""
    parts = identity.rsplit("-", 2)
    return len(parts) == 3 and parts[1] == host()
