"""The command line, the supervisor of `weir serve`, and `Server`, which runs a server from a Python program.

Importing it costs nothing: the names exported here are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir.errors import StartError
    from weir.inference import InferResult
    from weir.schemas.core.errors import ErrorCode, WeirError
    from weir.server import Server

__version__ = "0.1.0"

__all__ = ["ErrorCode", "InferResult", "Server", "StartError", "WeirError", "__version__"]

NATS_URL_VARIABLE = "WEIR_NATS_URL"
"""Environment variable with the broker's URL. `weir serve` passes it so because every local user can read arguments."""

API_KEY_VARIABLE = "WEIR_API_KEY"
"""Environment variable with the key that commands show to a gateway, or `@FILE` for the file that holds it."""

OTLP_HEADERS_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""OpenTelemetry's environment variables with the headers that the collector of traces wants, such as a key."""

DATA_DIR_VARIABLE = "WEIR_DATA_DIR"
"""Environment variable with the data folder of `weir serve`, for the server and for the commands that look for one."""

_FROM = {
    "ErrorCode": "weir.schemas.core.errors",
    "InferResult": "weir.inference",
    "Server": "weir.server",
    "StartError": "weir.errors",
    "WeirError": "weir.schemas.core.errors",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line needs neither gRPC nor numpy and starts faster without them.
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FROM[name]), name)
