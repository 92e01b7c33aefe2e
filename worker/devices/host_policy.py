"""`HostPolicy`: the cores on which an instance runs, and the NUMA node of its memory.

Source: Triton's `--host-policy=<policy>,<setting>=<value>` and the `host_policy` of instance groups, with the settings
`cpu-cores` and `numa-node`. A policy applies to the thread of an instance and to everything that the thread starts: threads
of its backend, or the process of a Python model.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weir.schemas.config.model_config import InstanceGroup
from weir.schemas.core.errors import internal, invalid

CORES, NODE = "cpu-cores", "numa-node"

_MAX_CORES = 1 << 13  # the maximum that Linux supports
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT_MEMORY, _BOUND_MEMORY = 0, 2
_MASK_BITS = 64

_bound = threading.local()


class HostPolicy(NamedTuple):
    """The numbers of the usable `cores` (empty: all), and the NUMA `node` of memory (None: any)."""

    cores: frozenset[int] = frozenset()
    node: int | None = None

    @classmethod
    def of_settings(cls, settings: Mapping[str, str]) -> HostPolicy:
        """The policy with these settings. Raises WeirError (INVALID_ARG, in Triton's words) for invalid ones."""
        node = _integer(NODE, settings[NODE]) if NODE in settings else None
        return cls(_cores(settings[CORES]) if CORES in settings else frozenset(), node)

    @classmethod
    def current(cls) -> HostPolicy:
        """The policy of the calling thread."""
        return getattr(_bound, "policy", UNBOUND)

    def bind(self) -> None:
        """Applies the policy to the calling thread and to everything that it starts.

        Raises WeirError (INTERNAL, in Triton's words) if the host does not allow it.
        """
        before = HostPolicy.current()
        if self.cores != before.cores:
            try:
                os.sched_setaffinity(0, self.cores or os.sched_getaffinity(os.getpid()))
            except OSError as error:
                raise internal(f"Unable to set NUMA thread affinity: {error.strerror}") from error
        _bound.policy = self._replace(node=before.node)
        if self.node != before.node:
            number = _set_memory(self.node)
            if number:
                raise internal(f"Unable to set NUMA memory policy: {os.strerror(number)}")
        _bound.policy = self


UNBOUND = HostPolicy()
"""The policy of threads without one."""


class HostPolicies:
    """The policies by name, from valid options of the form `<policy>,<setting>=<value>`."""

    def __init__(self, options: Iterable[str] = ()) -> None:
        self._settings: dict[str, dict[str, str]] = {}
        for option in options:
            name, _, setting = option.partition(",")
            key, _, value = setting.partition("=")
            self._settings.setdefault(name, {})[key] = value

    def of(self, group: InstanceGroup, device_id: int) -> HostPolicy:
        """The policy of an instance of `group` on GPU `device_id`. Raises WeirError for an invalid one.

        A group without a policy has the one that is named after its device: `cpu`, `model` or `gpu_<id>`.
        """
        default = {"KIND_GPU": f"gpu_{device_id}", "KIND_MODEL": "model"}.get(group.kind, "cpu")
        return HostPolicy.of_settings(self._settings.get(group.host_policy or default, {}))


NO_POLICIES = HostPolicies()
"""No policies: instances run anywhere."""


def _cores(text: str) -> frozenset[int]:
    """The numbers in a list of ranges. A single number is accepted as well, unlike in Triton."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first or (dash and not last):
            raise invalid(
                f"host policy setting '{CORES}' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got {part}"
            )
        lower = _integer(CORES, first)
        cores.update(range(lower, min(_integer(CORES, last) if dash else lower, _MAX_CORES - 1) + 1))
    if not cores:
        raise internal(f"Unable to set NUMA thread affinity: {os.strerror(errno.EINVAL)}")
    return frozenset(cores)


def _integer(setting: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise invalid(f"Parsing '{setting}' value: Can't parse '{text}' to integer")
    return int(text)


def _set_memory(node: int | None) -> int:
    """Binds the memory of the calling thread to the node; returns an error number, or 0."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return errno.ENOSYS
    if node is not None and node >= _MASK_BITS:
        return errno.EINVAL
    mode = _DEFAULT_MEMORY if node is None else _BOUND_MEMORY
    mask = None if node is None else ctypes.byref(ctypes.c_ulong(1 << node))
    bits = ctypes.c_ulong(0 if node is None else _MASK_BITS + 1)  # the kernel subtracts one
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(call), ctypes.c_int(mode), mask, bits) else 0
