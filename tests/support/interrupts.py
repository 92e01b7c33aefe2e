"""Interrupts of processes that tests start."""

from __future__ import annotations

import signal


def accept_interrupts() -> None:
    """Lets a child react to SIGINT. A shell that runs the tests in the background has all its children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
