"""`WorkerDevices`: which of its host's devices a worker runs instances on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from schemas.errors import invalid


class WorkerDevices(NamedTuple):
    """See the module.

    `host_gpus` are the ordinals of all GPUs of the host, by which a configuration is completed and checked: so all workers
    of a host make the same of it. `own_gpus` are those of this worker, which runs the instances that are meant for them,
    and with `has_cpu` also those that need no GPU.
    """

    host_gpus: tuple[int, ...] = ()
    own_gpus: tuple[int, ...] = ()
    has_cpu: bool = True

    @classmethod
    def of(cls, host_gpus: Sequence[int], gpu: int | None, has_cpu: bool = True) -> WorkerDevices:
        """Those of a worker that was told to use this GPU, None for all. Raises WeirError where there is no such GPU."""
        if gpu is not None and gpu not in host_gpus:
            known = f"those of this host are {', '.join(map(str, host_gpus))}" if host_gpus else "this host has none"
            raise invalid(f"there is no GPU {gpu}: {known}")
        return cls(tuple(host_gpus), tuple(host_gpus) if gpu is None else (gpu,), has_cpu)


CPU_ONLY = WorkerDevices()
"""Those of a worker that uses no GPU."""
