"""`SITES`: all contained sites of Weir, for tests that go through them by introspection."""

from __future__ import annotations

import importlib
import pkgutil

from runtime.containment import SITES

PACKAGES = ("runtime", "schemas", "bus", "repository", "telemetry", "calls", "gateway", "scheduler", "worker", "weir")


def _import_everything() -> None:
    for package in PACKAGES:
        paths = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(paths, f"{package}."):
            if "python_stub" not in module.name and not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ImportError:
                    pass  # of a backend whose framework is not installed


_import_everything()

__all__ = ["SITES"]
