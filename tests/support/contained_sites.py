"""`SITES`: all contained sites of Weir, for tests that go through them by introspection; `fail_for` makes one raise."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

import weir
from weir.runtime.containment import SITES


def _import_everything() -> None:
    for module in pkgutil.walk_packages(weir.__path__, "weir."):
        if "python_stub" not in module.name and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:
                pass  # of a backend whose framework is not installed


_import_everything()


def fail_for(monkeypatch: pytest.MonkeyPatch, site: str, is_meant: Callable[..., bool] = lambda *_: True) -> None:
    """Lets calls of the site's function raise for which `is_meant(*arguments)`; the others are not affected."""
    function = SITES[site].function

    def failing(*arguments: Any, **named: Any) -> Any:
        if is_meant(*arguments):
            raise RuntimeError("injected")
        return function(*arguments, **named)

    monkeypatch.setattr(SITES[site], "function", failing)


__all__ = ["SITES", "fail_for"]
