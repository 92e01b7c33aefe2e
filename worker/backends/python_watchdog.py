"""`Watchdog`: one thread that looks after the processes of all Python models of a worker that have limits.

So a limit costs a batch nothing but noting when it began, and holds whatever the model's process does, or does not do.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger("weir.worker")


class Watched(Protocol):
    """Whatever is looked after, every so often."""

    @property
    def look_every_s(self) -> float:
        """How often; it stays the same."""

    def look(self, now_s: float) -> None:
        """Looks, and does what is called for, at once; `now_s` is `time.monotonic()`."""


class Watchdog:
    """See the module. Its thread starts with the first to be watched. For any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s: dict[Watched, float] = {}
        self._thread: threading.Thread | None = None

    def watch(self, watched: Watched) -> None:
        """It is looked after from now on."""
        with self._changed:
            self._due_s[watched] = time.monotonic() + watched.look_every_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="python-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, watched: Watched) -> None:
        """It is no longer looked after; a look may still be under way."""
        with self._changed:
            self._due_s.pop(watched, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                due = [watched for watched, due_s in self._due_s.items() if due_s <= now_s]
                for watched in due:
                    self._due_s[watched] = now_s + watched.look_every_s
                if not due:
                    moment_s = min(self._due_s.values(), default=None)
                    self._changed.wait(None if moment_s is None else max(0.0, moment_s - now_s))
            for watched in due:
                try:
                    watched.look(time.monotonic())
                except Exception:
                    # The others are to be looked after all the same.
                    logger.exception("a process of a Python model could not be looked after")


WATCHDOG = Watchdog()
"""The worker's."""
