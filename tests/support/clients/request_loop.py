"""`RequestLoop`: a thread that sends one request after another until it is stopped, and checks each response."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Ask = Callable[[int], int]
"""Sends a request with this value and returns the value of the response."""


class RequestLoop:
    """Requests of one kind. `open` returns the function that sends one; what it opens is closed by the stack."""

    def __init__(self, name: str, open: Callable[[ExitStack], Ask], pause_s: float = 0.02) -> None:
        self.name = name
        self.sent = 0
        self.answered = 0
        self.faults: list[str] = []
        self._open = open
        self._pause_s = pause_s
        self._latest_s = 0.0  # when the request that was answered last had been sent
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)

    @contextmanager
    def sending(self, finish_within_s: float = 60.0) -> Iterator[RequestLoop]:
        """Sends as long as the context lasts, then waits for the response that is still to come."""
        self._thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join(finish_within_s)

    def has_answered_since(self, moment_s: float) -> bool:
        """Whether a request that was sent after this moment (`time.monotonic`) is answered."""
        return self._latest_s > moment_s

    def problems(self) -> list[str]:
        """What was wrong: errors, wrong responses, and requests without one."""
        lost = self.sent - self.answered - len(self.faults)
        return [f"{self.name}: {fault}" for fault in self.faults] + [f"{self.name}: {lost} unanswered"] * bool(lost)

    def _send(self) -> None:
        with ExitStack() as stack:
            ask = self._open(stack)
            for value in itertools.count(1):
                if self._is_over.is_set():
                    return
                self.sent += 1
                sent_s = time.monotonic()
                try:
                    found = ask(value)
                except Exception as error:  # the clients' libraries raise errors of many kinds, and each counts
                    self.faults.append(f"{type(error).__name__}: {error}")
                else:
                    if found == value:
                        self.answered += 1
                        self._latest_s = sent_s
                    else:
                        self.faults.append(f"wrong: {found} for {value}")
                self._is_over.wait(self._pause_s)
