"""Keeps Weir's packages and the modules of other projects apart: `schemas`, `worker` or `bus` may be the name of either.

In a process that belongs to a user (a program with `weir.Server`, a test run with `weir.pytest_plugin`) such a name means
the user's module. So what programs import (`weir`, and the modules behind `weir.Server`) imports none of these packages.
In a process of ours (`weir serve`, its roles, all commands) the name means our package, whatever PYTHONPATH holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

OWN_PACKAGES = frozenset(
    ("bus", "calls", "gateway", "repository", "runtime", "scheduler", "schemas", "telemetry", "worker")
)
"""All our packages beside `weir`."""

_ROOT = Path(__file__).resolve().parents[1]


class _OwnPackageFinder:
    """A finder of `sys.meta_path` that looks for `OWN_PACKAGES` where `weir` lies, and for nothing else."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in OWN_PACKAGES else None


def prefer_own_packages() -> None:
    """From now on `OWN_PACKAGES` are imported from where `weir` lies. For processes that are all ours."""
    if _OwnPackageFinder not in sys.meta_path:
        sys.meta_path.insert(0, _OwnPackageFinder)


def check_own_packages(module: str) -> None:
    """Raise ImportError where `module` can't be imported because another module has the name of one of our packages."""
    for name in sorted(OWN_PACKAGES):
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded else PathFinder.find_spec(name)
        origin = spec.origin if spec else None
        if origin is not None and Path(origin).resolve().parent != _ROOT / name:
            raise ImportError(
                f"{module} needs Weir's package '{name}', and {origin} has the same name: rename that, or import {module} "
                "only in the file of the backend, which runs in Weir's own process",
                name=name,
            )
