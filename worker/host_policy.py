"""`HostPolicy`: on which cores of the host an instance runs, and which of its memory it gets.

Source: Triton's `--host-policy=<policy>,<setting>=<value>` and the `host_policy` of instance groups, with the settings
`cpu-cores` and `numa-node`. A policy holds for the thread of an instance, and for what that starts: threads of its backend
and the process of a Python model.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from schemas.errors import internal, invalid
from schemas.execution_config import InstanceGroup

CORES, NODE = "cpu-cores", "numa-node"

_MAX_CORES = 1 << 13  # what Linux can be built for
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT_MEMORY, _BOUND_MEMORY = 0, 2
_MASK_BITS = 64

_bound = threading.local()


class HostPolicy(NamedTuple):
    """The numbers of the `cores` that may be used, empty for all of them, and the NUMA `node` of memory, None for any."""

    cores: frozenset[int] = frozenset()
    node: int | None = None

    @classmethod
    def of_settings(cls, settings: Mapping[str, str]) -> HostPolicy:
        """The policy with these settings. Raises WeirError (INVALID_ARG, in Triton's words) for one that makes no sense."""
        node = _integer(NODE, settings[NODE]) if NODE in settings else None
        return cls(_cores(settings[CORES]) if CORES in settings else frozenset(), node)

    @classmethod
    def current(cls) -> HostPolicy:
        """That of the calling thread."""
        return getattr(_bound, "policy", UNBOUND)

    def bind(self) -> None:
        """From now on the calling thread runs, and has what it starts run, by this policy.

        Raises WeirError (INTERNAL, in Triton's words) where the host doesn't let it.
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
"""That of whatever is not told where to run."""


class HostPolicies:
    """The policies by name, of options of the form `<policy>,<setting>=<value>`, which are well formed."""

    def __init__(self, options: Iterable[str] = ()) -> None:
        self._settings: dict[str, dict[str, str]] = {}
        for option in options:
            name, _, setting = option.partition(",")
            key, _, value = setting.partition("=")
            self._settings.setdefault(name, {})[key] = value

    def of(self, group: InstanceGroup, device_id: int) -> HostPolicy:
        """That of an instance of `group`; `device_id` is its GPU. Raises WeirError where it makes no sense.

        Where the group names none it is the one named after what it runs on: `cpu`, `model` or `gpu_<id>`.
        """
        usual = {"KIND_GPU": f"gpu_{device_id}", "KIND_MODEL": "model"}.get(group.kind, "cpu")
        return HostPolicy.of_settings(self._settings.get(group.host_policy or usual, {}))


NO_POLICIES = HostPolicies()
"""Where none is given: instances run anywhere."""


def _cores(text: str) -> frozenset[int]:
    """The numbers in a list of ranges; one alone is taken too, which Triton refuses."""
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
    """Gives the calling thread memory of this node alone; returns the number of the error, 0 for none."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return errno.ENOSYS
    if node is not None and node >= _MASK_BITS:
        return errno.EINVAL
    mode = _DEFAULT_MEMORY if node is None else _BOUND_MEMORY
    mask = None if node is None else ctypes.byref(ctypes.c_ulong(1 << node))
    bits = ctypes.c_ulong(0 if node is None else _MASK_BITS + 1)  # the kernel takes one off
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(call), ctypes.c_int(mode), mask, bits) else 0
