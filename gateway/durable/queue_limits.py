"""`QueueLevels`: how much waits on disk for each model, and what is refused because it would be too much.

What waits is told by whoever sees it: `observe` sets what the broker says, `added` and `ended` keep it up to date in
between. Only models for which something waits are remembered.
"""

from __future__ import annotations

from collections.abc import Callable

from schemas.errors import WeirError, queue_full
from schemas.queue_bounds import QueueBounds


class QueueLevels:
    """See the module. `bounds_of(model)` says what may wait for a model: `schemas.queue_bounds`."""

    def __init__(self, bounds_of: Callable[[str], QueueBounds]) -> None:
        self._bounds_of = bounds_of
        self._levels: dict[str, _Level] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def waiting(self, model: str) -> tuple[int, int]:
        """(messages, bytes) that wait for `model`."""
        level = self._levels.get(model)
        return (0, 0) if level is None else (level.messages, level.size_bytes)

    def admit(self, model: str, count: int = 1, size_bytes: int = 0) -> WeirError | None:
        """Why `count` more messages of `size_bytes` together may not wait for `model`; None where they may.

        The error is RESOURCE_EXHAUSTED (HTTP 429). Nothing is counted yet: that is for `added`.
        """
        return over_bounds(model, self._bounds_of(model), *self.waiting(model), count, size_bytes)

    def added(self, model: str, count: int = 1, size_bytes: int = 0) -> None:
        """So much more waits for `model`."""
        level = self._levels.setdefault(model, _Level())
        self._set(model, level, level.messages + count, level.size_bytes + size_bytes)

    def ended(self, model: str, count: int = 1, size_bytes: int = 0) -> None:
        """So much less waits for `model`."""
        level = self._levels.get(model)
        if level is not None:
            self._set(model, level, level.messages - count, level.size_bytes - size_bytes)

    def observe(self, model: str, messages: int, size_bytes: int) -> None:
        """So much waits for `model`, whatever was counted before."""
        self._set(model, self._levels.setdefault(model, _Level()), messages, size_bytes)

    def _set(self, model: str, level: _Level, messages: int, size_bytes: int) -> None:
        level.messages, level.size_bytes = max(0, messages), max(0, size_bytes)
        if not level.messages:
            self._levels.pop(model, None)


def over_bounds(
    model: str, bounds: QueueBounds, messages: int, waiting_bytes: int, count: int, size_bytes: int
) -> WeirError | None:
    """Why `count` more messages of `size_bytes` may not wait for `model` besides those that do; None where they may."""
    if messages + count > bounds.max_messages:
        return queue_full(model, f"{messages} requests wait, and {bounds.max_messages} may")
    if waiting_bytes + size_bytes > bounds.max_bytes:
        return queue_full(
            model, f"{waiting_bytes} bytes wait, and with {size_bytes} more they would exceed {bounds.max_bytes}"
        )
    return None


class _Level:
    """What waits for one model."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages = 0
        self.size_bytes = 0
