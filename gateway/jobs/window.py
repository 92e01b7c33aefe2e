"""`Window`: how many items of a job are in flight. It grows while that makes the job faster, and no further.

More in flight than its workers can be busy with only wait, and take memory. A sans-IO state machine.
"""

from __future__ import annotations

_EPOCH_S = 0.5
_GROWTH = 1.5
_GAIN = 1.07
"""How much faster it must have become for the last step to have been right."""

_EPOCHS_BETWEEN_PROBES = 20


class Window:
    """See the module. `size` is between 1 and `most`."""

    def __init__(self, start: int, most: int) -> None:
        self._most = max(1, most)
        self.size = max(1, min(start, self._most))
        self._before = self.size  # the size before the last step
        self._rate_before = 0.0
        self._epoch_began_s: float | None = None
        self._answers = 0
        self._was_full = False
        self._resting = 0

    def answered(self, now_s: float, in_flight: int) -> None:
        """An item was answered, while so many were in flight, itself among them."""
        if self._epoch_began_s is None:
            self._epoch_began_s = now_s
            return
        self._answers += 1
        self._was_full = self._was_full or in_flight >= self.size
        elapsed_s = now_s - self._epoch_began_s
        if elapsed_s >= _EPOCH_S and self._answers >= self.size:
            self._end_epoch(self._answers / elapsed_s)
            self._epoch_began_s, self._answers, self._was_full = now_s, 0, False

    def refused(self) -> None:
        """There was no room for so many."""
        self.size = self._before = max(1, self.size // 2)
        self._rate_before, self._epoch_began_s, self._answers = 0.0, None, 0
        self._resting = _EPOCHS_BETWEEN_PROBES

    def _end_epoch(self, rate: float) -> None:
        if self.size > self._before and rate < self._rate_before * _GAIN:
            self.size = self._before  # the last step was of no use
            self._resting = _EPOCHS_BETWEEN_PROBES
        elif self._resting:
            self._resting -= 1
        elif self._was_full and self.size < self._most:
            self._before, self._rate_before = self.size, rate
            self.size = min(self._most, max(self.size + 1, int(self.size * _GROWTH)))
        else:
            self._before = self.size
