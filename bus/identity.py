"""Names of processes on the bus, which tell on which host each runs.

Two processes share payloads in shared memory exactly when they see the same `/dev/shm`: the same boot of the same
kernel, and the same mount (containers usually have one each). Where that is not so, `WEIR_HOST_ID` tells hosts apart.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from functools import cache, lru_cache
from pathlib import Path

HOST_VARIABLE = "WEIR_HOST_ID"
"""What names the host of a process, where it is set: processes of unlike names read nothing of each other's memory."""

SEGMENT_PREFIX = "weir-"
"""How the name of each shared-memory segment of ours begins; its owner's id follows."""

_is_segment = re.compile(r"weir-[A-Za-z0-9_-]+\.[0-9]+", re.ASCII).fullmatch
_is_host = re.compile(r"[0-9a-f]{8}").fullmatch

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108 - POSIX shared memory lives there on Linux


@cache
def host() -> str:
    """Eight hexadecimal digits, equal for processes that can share memory."""
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return hashlib.blake2s(f"given/{given}".encode(), digest_size=4).hexdigest()
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
    return host_of(identity) == host()


def host_of(identity: str) -> str:
    """On which host the process named `identity` runs, "" where its name doesn't tell."""
    parts = identity.rsplit("-", 2)
    return parts[1] if len(parts) == 3 and _is_host(parts[1]) else ""


@lru_cache(4096)
def owner_of(segment: str) -> str:
    """The process that a shared-memory segment of this name belongs to, "" where no segment of ours is called so."""
    if not _is_segment(segment):
        return ""
    return segment.removeprefix(SEGMENT_PREFIX).rpartition(".")[0].partition("_")[0]


@lru_cache(4096)
def lies_elsewhere(segment: str) -> bool:
    """Whether the segment of this name is one of another host, where only its owner can read it."""
    return host_of(owner_of(segment)) not in ("", host())
