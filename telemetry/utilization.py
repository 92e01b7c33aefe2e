"""`Utilization`: the share of the time in which instances were busy, smoothed over the last seconds. It knows no clock."""

from __future__ import annotations

_SMOOTHING = 0.3


class Utilization:
    """`value` is from 0 to 1, as of the last look."""

    def __init__(self) -> None:
        self.value = 0.0
        self._last_us = 0
        self._last_busy_us = 0

    def look(self, now_us: int, busy_us: int, busy: int, instances: int) -> None:
        """Looks, about once a second: `busy` of so many `instances` run something now, and `busy_us` have all together
        spent on what has ended, ever.
        """
        elapsed_us, self._last_us = now_us - self._last_us, now_us
        spent_us, self._last_busy_us = busy_us - self._last_busy_us, busy_us
        if not instances:
            self.value = 0.0
            return
        # Batches are told of when they end: where one lasts for longer than from look to look, what is busy now tells more.
        share = spent_us / (elapsed_us * instances) if spent_us > 0 and elapsed_us > 0 else busy / instances
        self.value += _SMOOTHING * (min(1.0, share) - self.value)
