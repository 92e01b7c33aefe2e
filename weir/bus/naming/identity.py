"""Names of processes on the bus, which contain their host.

Two processes share payloads in shared memory exactly when they see the same `/dev/shm`: the same boot of the same
kernel, and the same mount (containers usually have one each). `WEIR_HOST_ID` overrides that.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from functools import cache, lru_cache
from pathlib import Path

HOST_VARIABLE = "WEIR_HOST_ID"
"""The environment variable that names the host. Processes with different names share no memory."""

SEGMENT_PREFIX = "weir-"
"""The prefix of the name of each shared-memory segment of Weir; its owner's id follows."""

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
    except OSError:  # no /proc or no /dev/shm: nothing can be shared
        return secrets.token_hex(4)
    return hashlib.blake2s(f"{boot}/{mount}".encode(), digest_size=4).hexdigest()


def new_id(role: str) -> str:
    """A new name for a process of `role` ("gateway"), unique over the cluster and over restarts."""
    return f"{role}-{host()}-{secrets.token_hex(4)}"


def own_id(role: str, given: str | None) -> str:
    """The name of a process of `role`: `given` completed by the host, which is the same after a restart, or a new one."""
    return f"{given}-{host()}-{role}" if given else new_id(role)


def shares_memory(identity: str) -> bool:
    """Whether the process named `identity` can read this process's shared memory."""
    return host_of(identity) == host()


def host_of(identity: str) -> str:
    """The host of the process named `identity`, "" where the name has none."""
    parts = identity.rsplit("-", 2)
    return parts[1] if len(parts) == 3 and _is_host(parts[1]) else ""


@lru_cache(4096)
def owner_of(segment: str) -> str:
    """The process that owns a shared-memory segment of this name, "" for a segment that is not of Weir."""
    if not _is_segment(segment):
        return ""
    return segment.removeprefix(SEGMENT_PREFIX).rpartition(".")[0].partition("_")[0]


@lru_cache(4096)
def lies_elsewhere(segment: str) -> bool:
    """Whether the segment of this name is on another host, where only processes there can read it."""
    return host_of(owner_of(segment)) not in ("", host())
