"""`Window`: how many batches one instance may hold, the executing one included.

Two keep the instance busy: one executes, one is staged behind it. Where each request is a batch of its own, as with
Triton's default scheduler, and the model is fast, the way there and back costs many times what a request takes. Then an
instance may hold as many as it executes in `MAX_WINDOW_US`, and the messages between scheduler and worker carry several
batches. No request loses by it: instances are filled breadth-first, and the window narrows as soon as a batch is slow,
lost, or calls other models.
"""

from __future__ import annotations

from weir.schemas.config.model_config import ModelConfig

SLOTS = 2
"""Batches of an instance whose window is not wide: one executes, one is staged."""

MAX_WINDOW = 32
"""Batches of one instance; this limits how many a worker that dies may have started."""

MAX_WINDOW_US = 2_000
"""The expected time of all batches in the window of one instance."""

SLOW_US = 50_000
"""A batch that takes this long shows that the model's requests differ; a fast one must not wait behind a slow one."""

NARROW_BATCHES = 20
"""This many batches must end before a window that was narrowed becomes wide again."""


def runs_singly(config: ModelConfig) -> bool:
    """Whether each request of the model is a batch of its own, and has exactly one response, so that windows help."""
    is_default = config.dynamic_batching is None and config.sequence_batching is None
    takes_turns = any(group.rate_limiter is not None for group in config.instance_group)
    return is_default and not (config.is_ensemble or config.is_decoupled or takes_turns)


class Window:
    """The window of all instances of one version. Times are microseconds.

    `narrow_left` batches must end before a window that was narrowed is wide again.
    """

    __slots__ = ("_limit", "narrow_left")

    def __init__(self) -> None:
        self._limit = SLOTS
        self.narrow_left = 0

    def size(self, us_each: float, is_wide: bool) -> int:
        """Returns how many batches an instance may hold, if one takes `us_each` (0: unknown) and windows may be wide."""
        if self.narrow_left:
            return self._limit
        if not (is_wide and us_each):
            return SLOTS
        return max(SLOTS, min(MAX_WINDOW, int(MAX_WINDOW_US / us_each)))

    def batch_ended(self, busy_us: int) -> None:
        """Records that a batch kept its instance busy for `busy_us`."""
        if busy_us >= SLOW_US:
            self.narrow()
        elif self.narrow_left:
            self.narrow_left -= 1

    def narrow(self, limit: int = SLOTS) -> None:
        """Lets each instance hold only `limit` batches for a while."""
        self._limit = limit
        self.narrow_left = NARROW_BATCHES
