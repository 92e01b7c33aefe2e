"""`OwnedModel`: a model whose queue this scheduler owns, with what the policy itself does not know of: pull and timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus.pull import FramePull
from scheduler.model_scheduler import ModelScheduler

MAX_HELD_BYTES = 256 << 20
"""Frames of one model held in memory; beyond it they stay in the stream, whose limits refuse publishes."""


class LiveFrame:
    """A frame that was pulled: acknowledged when the last of its requests has ended.

    Where one batch ends it, the worker is asked to acknowledge it together with the answers (`delegate`), which saves
    the broker and this scheduler a message of its own.
    """

    __slots__ = ("_ack_subject", "_delegated_to", "_owned", "_size_bytes", "_unanswered")

    def __init__(self, owned: OwnedModel, ack_subject: str, size_bytes: int, requests: int) -> None:
        self._owned = owned
        self._ack_subject = ack_subject
        self._size_bytes = size_bytes
        self._unanswered = requests
        self._delegated_to = 0

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """The ack subject for the worker that runs `requests` requests of this frame, if no others are left."""
        if requests != self._unanswered:
            return None
        self._delegated_to = batch_id
        return self._ack_subject

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """See `scheduler.queued_request.Frame`."""
        self._unanswered -= requests
        if self._unanswered == 0:
            if batch_id == 0 or batch_id != self._delegated_to:
                self._owned.pull.ack(self._ack_subject)
            self._owned.released(self._size_bytes)


class OwnedModel:
    """One model: its policy, its pull, its timer, and the bytes held for it."""

    def __init__(self, scheduler: ModelScheduler, pull: FramePull) -> None:
        self.name = scheduler.name
        self.scheduler = scheduler
        self.pull = pull
        self._held_bytes = 0
        self._full = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0

    def close(self) -> None:
        """Asks for no more frames; what is held is still served."""
        self._closed = True
        self.pull.pause()

    def took(self, size_bytes: int) -> None:
        """A frame of this size is in memory now."""
        self._held_bytes += size_bytes
        if self._held_bytes > MAX_HELD_BYTES and not self._full:
            self._full = True
            self.pull.pause()

    def released(self, size_bytes: int) -> None:
        """A frame of this size has gone."""
        self._held_bytes -= size_bytes
        if self._full and self._held_bytes <= MAX_HELD_BYTES // 2:
            self._full = False
            if not self._closed:
                self.pull.resume()

    def arm(self, wake_at_us: int | None, now_us: int, wake: Callable[[OwnedModel], None]) -> None:
        """Calls `wake` with this model at that time, instead of the time set before."""
        if self._timer is not None:
            if wake_at_us == self._timer_us:
                return
            self._timer.cancel()
            self._timer = None
        if wake_at_us is not None:
            self._timer_us = wake_at_us
            self._timer = asyncio.get_running_loop().call_later(max(0, wake_at_us - now_us) / 1e6, self._fire, wake)

    def _fire(self, wake: Callable[[OwnedModel], None]) -> None:
        self._timer = None
        wake(self)
