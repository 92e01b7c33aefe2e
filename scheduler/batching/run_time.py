"""`RunTimeEstimate`: how long a model needs for a request, whatever else the machine does."""

from __future__ import annotations

_FALL, _RISE = 0.2, 0.1


class RunTimeEstimate:
    """The time that a request of a model takes on an instance, in microseconds; 0 while it is unknown.

    If the machine is short of processors, most executions take far longer than their model needs, and low overhead
    matters most. So the estimate follows fast executions quickly and slow ones slowly.
    """

    __slots__ = ("us_each",)

    def __init__(self) -> None:
        self.us_each = 0.0

    def record(self, requests: int, busy_us: int) -> None:
        """Updates the estimate: `requests` requests kept their instance busy for `busy_us`."""
        each_us, estimate = busy_us / requests, self.us_each
        if not estimate or each_us < estimate:
            self.us_each = estimate + _FALL * (each_us - estimate) if estimate else each_us
        else:
            self.us_each = estimate + _RISE * min(each_us - estimate, estimate)
