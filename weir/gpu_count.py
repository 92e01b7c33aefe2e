"""`count_gpus`: how many workers `weir serve` starts for GPUs, told without starting CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


def _find_nvml() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def count_gpus(find_nvml: Callable[[], Any | None] = _find_nvml, environment: Mapping[str, str] = os.environ) -> int:
    """How many GPUs processes that are started from here will find; CUDA is not started. 0 where NVML can't tell.

    `CUDA_VISIBLE_DEVICES` counts as CUDA reads it: what stands behind one that is none is not looked at.
    """
    nvml = find_nvml()
    if nvml is None:
        return 0
    try:
        nvml.nvmlInit()
        try:
            count = int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    named = 0
    for name in map(str.strip, visible.split(",")):
        if not (name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)):
            break
        named += 1
    return named
