"""`OwnedModel`: a model whose queue this scheduler owns, with what the policy itself does not know of: pull and timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.pull import FramePull
from scheduler.model_scheduler import ModelScheduler

MAX_HELD_BYTES = 256 << 20
"""Frames of one model held in memory; beyond it they stay in the stream, whose limits refuse publishes."""


class LiveFrame:
    """A frame that was pulled: acknowledged when the last of its requests has ended."""

    __slots__ = ("_ack_subject", "_pull", "_unanswered", "on_end")

    def __init__(self, pull: FramePull, ack_subject: str, requests: int) -> None:
        self._pull = pull
        self._ack_subject = ack_subject
        self._unanswered = requests
        self.on_end: Callable[[], None] = lambda: None

    def request_ended(self) -> None:
        """See `scheduler.queued_request.Frame`."""
        self._unanswered -= 1
        if self._unanswered == 0:
            self._pull.ack(self._ack_subject)
            self.on_end()


class OwnedModel:
    """One model: its policy, its pull, its timer, and the bytes held for it."""

    def __init__(self, name: str, scheduler: ModelScheduler, pull: FramePull) -> None:
        self.name = name
        self.scheduler = scheduler
        self.pull = pull
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0

    def took(self, size_bytes: int) -> None:
        """A frame of this size is in memory now."""
        self._held_bytes += size_bytes
        if self._held_bytes > MAX_HELD_BYTES:
            self.pull.pause()

    def released(self, size_bytes: int) -> None:
        """A frame of this size has gone."""
        self._held_bytes -= size_bytes
        if self._held_bytes <= MAX_HELD_BYTES // 2:
            self.pull.resume()

    def arm(self, wake_at_us: int | None, now_us: int, wake: Callable[[str], None]) -> None:
        """Calls `wake(name)` at that time, instead of the time set before."""
        if self._timer is not None:
            if wake_at_us == self._timer_us and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if wake_at_us is not None:
            self._timer_us = wake_at_us
            self._timer = asyncio.get_running_loop().call_later(max(0, wake_at_us - now_us) / 1e6, self._fire, wake)

    def _fire(self, wake: Callable[[str], None]) -> None:
        self._timer = None
        wake(self.name)
