"""Imports nats-py without aiohttp, which nats-py loads for WebSockets wherever it is installed (0.1 s, 11 MiB).

Weir connects to NATS over TCP only. Import this module ahead of everything that imports nats-py.
"""

import sys

_is_loaded = "aiohttp" in sys.modules
if not _is_loaded:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # an import of it fails now, which nats-py expects
try:
    import nats  # noqa: F401
finally:
    if not _is_loaded:
        del sys.modules["aiohttp"]
