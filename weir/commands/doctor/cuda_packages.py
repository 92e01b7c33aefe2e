"""`cuda_major`: the major version of CUDA for which an installed package was built.

A driver runs programs of its own major version of CUDA and of older ones, whatever the minor version (CUDA's minor version
compatibility).
"""

from __future__ import annotations

import re

_SUFFIX = re.compile(r"-cu(\d\d)$")
_LOCAL = re.compile(r"\+cu(\d\d)\d")
_NAMED_AFTER_CUDA = frozenset(
    ("cuda-bindings", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-cupti")
)
"""Packages without a suffix whose own version is that of CUDA."""


def cuda_major(name: str, version: str) -> int | None:
    """The major version of CUDA that the package `name` of this version needs; None for a package without CUDA."""
    suffix = _SUFFIX.search(name.lower())
    if suffix:
        return int(suffix[1])
    if name.lower() in _NAMED_AFTER_CUDA and version.partition(".")[0].isdigit():
        return int(version.partition(".")[0])
    local = _LOCAL.search(version) if name.lower().startswith("torch") else None
    return int(local[1]) if local else None
