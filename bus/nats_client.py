"""nats-py's `Client`, imported without aiohttp, which nats-py loads for WebSockets wherever it is installed.

No role speaks NATS over WebSockets, and each would pay for it with 0.1 s of its start and 11 MiB.
"""

from __future__ import annotations

import sys

_is_loaded = "aiohttp" in sys.modules
if not _is_loaded:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # to import it is an ImportError now, which nats-py expects
try:
    from nats.aio.client import Client
finally:
    if not _is_loaded:
        del sys.modules["aiohttp"]

__all__ = ["Client"]
