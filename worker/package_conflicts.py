"""Packages that can't be installed beside each other, though no installer says so."""

from __future__ import annotations

from importlib import metadata

_CONFLICTS = {
    "onnxruntime": (
        ("onnxruntime", "onnxruntime-gpu"),
        "the packages onnxruntime and onnxruntime-gpu are both installed, and own the same files: "
        "uninstall both (pip uninstall onnxruntime onnxruntime-gpu), then install one (weir-serve[cpu] or weir-serve[gpu])",
    ),
}
"""By backend: packages that must not lie in one folder, and what is said where they do."""


def conflict_of(backend: str) -> str:
    """Why the packages of `backend` can't work, and what to do about it; "" where nothing is wrong with them.

    Looks at what is installed and imports none of it. Packages in different folders don't disturb each other.
    """
    if backend not in _CONFLICTS:
        return ""
    packages, problem = _CONFLICTS[backend]
    try:
        folders = {str(metadata.distribution(package).locate_file("")) for package in packages}
    except metadata.PackageNotFoundError:
        return ""
    return problem if len(folders) == 1 else ""
