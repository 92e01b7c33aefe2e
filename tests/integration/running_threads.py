"""`running`: threads that go on as long as a context lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def running(threads: Sequence[threading.Thread], is_over: threading.Event, timeout_s: float = 60.0) -> Iterator[None]:
    """Starts them; at the end sets `is_over`, by which they know, and waits for each."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(timeout_s)
