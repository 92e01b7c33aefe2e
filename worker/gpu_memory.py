"""`GpuMemory`: what each model takes of the memory of this worker's GPUs, measured around its load.

Libraries allocate as they like, and tell nobody; what the driver has free before and after is what can be known. So loads
that use a GPU follow each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from schemas.errors import ErrorCode, WeirError

ReadMemory = Callable[[int], tuple[int, int]]
"""(free bytes, bytes in all) of a GPU."""


class GpuMemory:
    """See the module. `limits` are fractions in use, by GPU, beyond which nothing more is loaded there.

    Source: Triton's `--model-load-gpu-limit`, and `memory_usage` of its statistics.
    """

    def __init__(self, limits: Mapping[int, float] | None = None, read: ReadMemory | None = None) -> None:
        self._limits = limits or {}
        self._read = read or _read_memory
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def loading(self, model: str, gpus: Sequence[int]) -> Iterator[dict[int, int]]:
        """A load on these GPUs; the dictionary holds, at the end, the bytes that it took of each.

        Raises WeirError (UNAVAILABLE) where the limit of one of them is reached.
        """
        taken: dict[int, int] = {}
        if not gpus:
            yield taken
            return
        with self._lock:
            before = {gpu: self._read(gpu) for gpu in gpus}
            for gpu, (free, total) in before.items():
                if total - free > self._limits.get(gpu, 1.0) * total:
                    raise WeirError(
                        ErrorCode.UNAVAILABLE,
                        f"can not create model '{model}': memory limit set for GPU {gpu} has exceeded, model loading is "
                        "rejected.",
                    )
            yield taken
            # Others may have given up more than this load took.
            taken |= {gpu: max(0, free - self._read(gpu)[0]) for gpu, (free, _) in before.items()}


def gpu_limits(pairs: Sequence[str]) -> dict[int, float]:
    """The limits in values of `--model-load-gpu-limit`, each `DEVICE:FRACTION`."""
    return {int(device): float(fraction) for device, _, fraction in (pair.partition(":") for pair in pairs)}


def _read_memory(gpu: int) -> tuple[int, int]:
    from cuda.bindings import runtime

    chosen, *_ = runtime.cudaSetDevice(gpu)
    status, free, total = (chosen, 0, 0) if int(chosen) else runtime.cudaMemGetInfo()
    if int(status):
        raise WeirError(ErrorCode.UNAVAILABLE, f"GPU {gpu} can't be used: {getattr(status, 'name', status)}")
    return int(free), int(total)
