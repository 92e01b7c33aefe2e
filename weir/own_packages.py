"""Separates Weir's packages from modules of other projects with the same names, such as `schemas`, `worker` or `bus`.

In a user's process (a program with `weir.Server`, a test run with `weir.pytest_plugin`) such a name means the user's
module. Therefore `weir` and the modules behind `weir.Server` import none of these packages. In Weir's own processes
(`weir serve`, its roles, all commands) the name means Weir's package, whatever PYTHONPATH contains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

OWN_PACKAGES = frozenset(
    (
        "bus",
        "client",
        "cluster",
        "console",
        "durable",
        "gateway",
        "jobs",
        "perf",
        "repository",
        "runtime",
        "scheduler",
        "schemas",
        "telemetry",
        "worker",
    )
)
"""All of Weir's top-level packages except `weir`."""

_ROOT = Path(__file__).resolve().parents[1]


class _OwnPackageFinder:
    """A finder for `sys.meta_path` that finds `OWN_PACKAGES` beside the package `weir`, and nothing else."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in OWN_PACKAGES else None


def prefer_own_packages() -> None:
    """Import `OWN_PACKAGES` from the folder of `weir` from now on. For Weir's own processes only."""
    if _OwnPackageFinder not in sys.meta_path:
        sys.meta_path.insert(0, _OwnPackageFinder)


def check_own_packages(module: str) -> None:
    """Raise ImportError if another module shadows one of Weir's packages, which `module` needs."""
    for name in sorted(OWN_PACKAGES):
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded else PathFinder.find_spec(name)
        origin = spec.origin if spec else None
        if origin is not None and Path(origin).resolve().parent != _ROOT / name:
            raise ImportError(
                f"{module} needs Weir's package '{name}', but {origin} has the same name: rename it, or import {module} "
                "only in the backend's file, which runs in a process of Weir",
                name=name,
            )
