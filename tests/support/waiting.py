"""Waiting in tests: until a condition holds, blocking or in an event loop, and for threads to end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")

POLL_S = 0.005


def wait_until(condition: Callable[[], _Result], timeout_s: float = 20.0) -> _Result:
    """Block until `condition()` is true and return its value. Fails the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"the condition did not become true within {timeout_s:g} s"
        time.sleep(POLL_S)
    return value


async def eventually(condition: Callable[[], _Result], timeout_s: float = 20.0) -> _Result:
    """As `wait_until`, without blocking the event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"the condition did not become true within {timeout_s:g} s"
        await asyncio.sleep(POLL_S)
    return value


@contextmanager
def running(threads: Sequence[threading.Thread], is_over: threading.Event, timeout_s: float = 60.0) -> Iterator[None]:
    """Run the threads within the context; at its end sets `is_over`, which they watch, and joins each."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(timeout_s)
