"""Ports for servers that share one, and so can't each take a free one."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of loopback that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
