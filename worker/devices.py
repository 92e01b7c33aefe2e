"""`WorkerDevices`: which of its host's devices a worker runs instances on."""

from __future__ import annotations

from typing import NamedTuple


class WorkerDevices(NamedTuple):
    """See the module.

    `host_gpus` are the ordinals of all GPUs of the host, by which a configuration is completed and checked: so all workers
    of a host make the same of it. `own_gpus` are those of this worker, which runs the instances that are meant for them,
    and with `has_cpu` also those that need no GPU.
    """

    host_gpus: tuple[int, ...] = ()
    own_gpus: tuple[int, ...] = ()
    has_cpu: bool = True


CPU_ONLY = WorkerDevices()
"""Those of a worker that uses no GPU."""
