"""When a process that died comes back: backoff and budget, as plain arithmetic on times it is given.

For the roles of `weir serve` and for the processes of Python models.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `longest_delay_s`, and start over after `healthy_s` of being ready.

    With `is_first_at_once` a delay of 0 comes before those. `budget` deaths within `window_s` are too many; None: it comes
    back for ever.
    """

    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    healthy_s: float = 30.0
    is_first_at_once: bool = False
    budget: int | None = 10
    window_s: float = 60.0


class RestartHistory:
    """The deaths of one process and its successors. Times are seconds of any one clock."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._delay = self._first_delay
        self._deaths: deque[float] = deque(maxlen=policy.budget or 0)

    @property
    def _first_delay(self) -> float:
        return 0.0 if self._policy.is_first_at_once else self._policy.first_delay_s

    def died(self, now: float, ready_since: float | None) -> float | None:
        """Count a death; return the seconds to wait before the next start, None when the budget is spent.

        `ready_since` is when the life that ended became ready, None if it never did.
        """
        policy = self._policy
        if ready_since is not None and now - ready_since >= policy.healthy_s:
            self._delay = self._first_delay
        self._deaths.append(now)
        if policy.budget and len(self._deaths) == policy.budget and now - self._deaths[0] <= policy.window_s:
            return None
        delay = self._delay
        self._delay = min(max(2 * delay, policy.first_delay_s), policy.longest_delay_s)
        return delay
