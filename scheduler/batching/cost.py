"""`Cost`: how long a model version needs for its requests, as estimated from those that have run."""

from __future__ import annotations

from dataclasses import dataclass

MIN_SAMPLES = 16
"""Requests that must have run before the mean cost is updated."""

_FALL, _RISE = 0.2, 0.1
_SMOOTHING = 0.2


@dataclass(slots=True, eq=False)
class Cost:
    """The requests that one version has `served`, for how long they kept instances busy, and what one of them takes.

    Times are microseconds of one instance, and 0 while they are unknown:

    - `us_each`, of a request, whatever else the machine does, for windows and requests that workers start themselves. If
      the machine is short of processors, most executions take far longer than their model needs, and low overhead
      matters most. So it follows fast executions quickly and slow ones slowly.
    - `us_per_row`, the smoothed mean, for staging. If larger batches are cheaper per row, it predicts too long a time and
      a batch is staged a little late: that costs a hop, whereas a batch cut short costs rows.
    - `us_per_request`, as `update` last computed it from the totals, for admission and the expected wait.
    """

    served: int = 0
    busy_us: int = 0
    us_each: float = 0.0
    us_per_row: float = 0.0
    us_per_request: float = 0.0
    _known_served: int = 0  # what `us_per_request` is from
    _known_busy_us: int = 0

    def record(self, requests: int, busy_us: int, rows: int = 0) -> None:
        """Records that `requests` requests, of `rows` rows (0: unknown), kept an instance busy for `busy_us`, above 0."""
        self.served += requests
        self.busy_us += busy_us
        latest, estimate = busy_us / requests, self.us_each
        if not estimate:
            self.us_each = latest
        elif latest < estimate:
            self.us_each = estimate + _FALL * (latest - estimate)
        else:
            self.us_each = estimate + _RISE * min(latest - estimate, estimate)
        if rows > 0:
            latest, estimate = busy_us / rows, self.us_per_row
            self.us_per_row = estimate + _SMOOTHING * (latest - estimate) if estimate else latest

    def update(self) -> float:
        """Updates and returns `us_per_request`."""
        requests = self.served - self._known_served
        # The first requests may include a cold start, but a batch of them is the only estimate.
        if requests >= MIN_SAMPLES or (requests > 0 and not self.us_per_request):
            latest, estimate = (self.busy_us - self._known_busy_us) / requests, self.us_per_request
            self.us_per_request = (estimate + latest) / 2 if estimate else latest
            self._known_served, self._known_busy_us = self.served, self.busy_us
        return self.us_per_request
