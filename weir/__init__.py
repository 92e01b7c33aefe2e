"""The command line, the supervisor behind `weir serve`, and `Server`, which runs it from a Python program.

What a program imports from here needs none of our other packages: see `weir.own_packages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir.errors import ErrorCode, WeirError
    from weir.inference import InferResult
    from weir.server import Server
    from weir.start_error import StartError

__version__ = "0.1.0"

__all__ = ["ErrorCode", "InferResult", "Server", "StartError", "WeirError", "__version__"]

NATS_URL_VARIABLE = "WEIR_NATS_URL"
"""Tells a role where the bus is. Not an argument when `weir serve` does it: those can be read by every local user."""

_FROM = {
    "ErrorCode": "weir.errors",
    "InferResult": "weir.inference",
    "Server": "weir.server",
    "StartError": "weir.start_error",
    "WeirError": "weir.errors",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for: the command line needs neither gRPC nor numpy, and starts without them.
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FROM[name]), name)
