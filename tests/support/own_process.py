"""What a process of pytest need not hold: it keeps the memory of an import, and of much else, to its end.

All processes of pytest collect all tests, and few run those of PyTorch, whose import takes 190 MB: they have it `later`.
`run_in_own_process` calls a function in a process of its own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_mock")):
            raise AttributeError(name)  # pytest asks all that a module of tests has
        return getattr(importlib.import_module(self.__name__), name)


def later(name: str) -> ModuleType:
    """A module that is imported when an attribute of it is used. Without it, skips the tests of the caller's module."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Later(name)


def run_in_own_process(function: Callable[..., object], *arguments: str) -> None:
    """Calls a function of a module with these texts. An exception of it fails the test, with its traceback."""
    code = f"import sys; from {function.__module__} import {function.__name__} as called; called(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
