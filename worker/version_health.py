"""`VersionHealth`: which instances of a loaded version can run just now, as their backend tells.

A backend whose instances may be gone for a while, as processes of their own may, tells of it here; instances of the others
are never down. Batches then go to instances that are up, and the registry tells the truth.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol


class ReadinessProbe(Protocol):
    """Asks one instance's model whether it is ready."""

    async def ask(self) -> bool:
        """What it says; False where it fails, or does not answer in time. In the worker's event loop."""


class VersionHealth:
    """See the module. For any thread; `name` is what an instance is known by, and no other one of the worker.

    `on_change` is called after what `problem` or `asks` say has changed, in the thread that changed it.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._up: dict[str, ReadinessProbe | None] = {}
        self._down: dict[str, str] = {}
        self._passive: set[str] = set()

    def up(self, name: str, probe: ReadinessProbe | None = None) -> None:
        """The instance can run; `probe` asks its model whether it is ready, where that has a say in it."""
        self._put(name, self._up, probe)

    def down(self, name: str, reason: str) -> None:
        """The instance can't run for now."""
        self._put(name, self._down, reason)

    def gone(self, name: str) -> None:
        """The instance is no more."""
        self._passive.discard(name)
        self._put(name, None, None)

    def passive(self, name: str) -> None:
        """The instance gets no batches, so it is of no account."""
        self._passive.add(name)
        self._put(name, None, None)

    def is_down(self, name: str) -> bool:
        """Whether the instance can't run now."""
        return bool(self._down) and name in self._down

    def has_other_up(self, name: str) -> bool:
        """Whether an instance can run that is not this one."""
        with self._lock:
            return any(other != name for other in self._up)

    @property
    def problem(self) -> str:
        """Why none can run, "" while one can."""
        with self._lock:
            return "" if self._up or not self._down else next(iter(self._down.values()))

    @property
    def asks(self) -> bool:
        """Whether models of instances that are up have a say in whether they are ready."""
        with self._lock:
            return any(probe is not None for probe in self._up.values())

    def probes(self) -> Collection[ReadinessProbe]:
        """Those of the instances that are up."""
        with self._lock:
            return [probe for probe in self._up.values() if probe is not None]

    def _put(self, name: str, where: dict[str, Any] | None, what: Any) -> None:
        with self._lock:
            before = self._told()
            self._up.pop(name, None)
            self._down.pop(name, None)
            if where is not None and name not in self._passive:
                where[name] = what
            has_changed = self._told() != before
        if has_changed:
            self._on_change()

    def _told(self) -> tuple[bool, bool]:
        is_lost = bool(self._down) and not self._up
        return is_lost, any(probe is not None for probe in self._up.values())
