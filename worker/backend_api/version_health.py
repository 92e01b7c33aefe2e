"""`VersionHealth`: which instances of a loaded version are available now, according to their backend.

A backend whose instances may become unavailable (because they are processes, for example) reports that here; instances of
other backends are always available. Batches go to available instances, and the registry has the version's state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, Protocol


class ReadinessProbe(Protocol):
    """Asks the model of one instance whether it is ready."""

    async def ask(self) -> bool:
        """The model's reply; False if it fails or times out. Called in the worker's event loop."""


class VersionHealth:
    """The availability of a version's instances. Thread-safe; the `name` of an instance is unique in the worker.

    `on_change` is called after `problem` or `has_readiness_checks` have changed, in the thread that changed them.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._up: dict[str, ReadinessProbe | None] = {}
        self._down: dict[str, str] = {}
        self._passive: set[str] = set()

    def up(self, name: str, probe: ReadinessProbe | None = None) -> None:
        """Records that the instance is available. `probe` asks its model for its readiness, if the model has that check."""
        self._put(name, self._up, probe)

    def down(self, name: str, reason: str) -> None:
        """Records that the instance is unavailable for now."""
        self._put(name, self._down, reason)

    def remove(self, name: str) -> None:
        """Removes the instance."""
        self._passive.discard(name)
        self._put(name, None, None)

    def passive(self, name: str) -> None:
        """Records that the instance gets no batches, so that its availability does not count."""
        self._passive.add(name)
        self._put(name, None, None)

    def is_down(self, name: str) -> bool:
        """Whether the instance is unavailable."""
        return bool(self._down) and name in self._down

    def has_other_up(self, name: str) -> bool:
        """Whether another instance is available."""
        with self._lock:
            return any(other != name for other in self._up)

    @property
    def problem(self) -> str:
        """Why no instance is available; "" if one is."""
        with self._lock:
            return "" if self._up or not self._down else next(iter(self._down.values()))

    @property
    def has_readiness_checks(self) -> bool:
        """Whether a model of an available instance has a readiness check."""
        with self._lock:
            return any(probe is not None for probe in self._up.values())

    def probes(self) -> Collection[ReadinessProbe]:
        """The readiness checks of the available instances."""
        with self._lock:
            return [probe for probe in self._up.values() if probe is not None]

    def _put(self, name: str, state: dict[str, Any] | None, value: Any) -> None:
        with self._lock:
            before = self._summary()
            self._up.pop(name, None)
            self._down.pop(name, None)
            if state is not None and name not in self._passive:
                state[name] = value
            has_changed = self._summary() != before
        if has_changed:
            self._on_change()

    def _summary(self) -> tuple[bool, bool]:
        is_unavailable = bool(self._down) and not self._up
        return is_unavailable, any(probe is not None for probe in self._up.values())
