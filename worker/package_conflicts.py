"""Packages that can't be installed beside each other, though no installer says so."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

_CONFLICTS = {
    "onnxruntime": (
        ("onnxruntime", "onnxruntime-gpu"),
        "the packages onnxruntime and onnxruntime-gpu are both installed, and own the same files: "
        "uninstall both (pip uninstall onnxruntime onnxruntime-gpu), then install one (weir[cpu] or weir[gpu])",
    ),
}
"""By backend: packages of which it may see only one, and what is said where it sees all."""


def conflict_of(backend: str, version_of: Callable[[str], str] = metadata.version) -> str:
    """Why the packages of `backend` can't work, and what to do about it; "" where nothing is wrong with them."""
    packages, problem = _CONFLICTS.get(backend, ((), ""))
    try:
        for package in packages:
            version_of(package)
    except metadata.PackageNotFoundError:
        return ""
    return problem
