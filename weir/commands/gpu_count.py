"""`count_gpus`: how many GPUs the workers of `weir serve` will see."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any


def _find_nvml() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def count_gpus(find_nvml: Callable[[], Any | None] = _find_nvml, environment: Mapping[str, str] = os.environ) -> int:
    """The number of GPUs that CUDA will show to child processes, by NVML without initialising CUDA; 0 without NVML.

    `CUDA_VISIBLE_DEVICES` is interpreted as CUDA does: entries after an invalid one are ignored. Where part of a GPU (MIG)
    is visible, CUDA shows each process the first such part, and nothing else. A GPU that is to be divided, but has no part
    yet, is not shown.
    """
    nvml = find_nvml()
    if nvml is None:
        return 0
    try:
        nvml.nvmlInit()
        try:
            found = [_visible_parts(nvml, index) for index in range(int(nvml.nvmlDeviceGetCount()))]
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            chosen = found if visible is None else list(_named_gpus(nvml, visible, found))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return 0
    if any(parts for parts in chosen if parts is not None):
        return 1
    return chosen.count(None)


def _visible_parts(nvml: Any, index: int) -> int | None:
    """The number of parts of a GPU; None for one that is not divided."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        mode, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if not mode:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # a GPU that can't be divided
        return None
    parts = 0
    for number in range(most):
        with suppress(nvml.NVMLError):
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            parts += 1
    return parts


def _named_gpus(nvml: Any, visible: str, found: Sequence[int | None]) -> Iterator[int | None]:
    """The GPUs, as `_visible_parts` describes them, that `CUDA_VISIBLE_DEVICES` names before an invalid entry."""
    for name in map(str.strip, visible.split(",")):
        if name.startswith("MIG-"):
            yield 1
        elif name.isdecimal() and int(name) < len(found):
            yield found[int(name)]
        elif name.startswith("GPU-"):
            uuids = [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(len(found))]
            texts = [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids]
            index = next((index for index, uuid in enumerate(texts) if uuid.startswith(name)), None)
            if index is None:
                return
            yield found[index]
        else:
            return
