"""`Patience`: for how long requests wait for a model version that nobody serves."""

from __future__ import annotations


class Patience:
    """Runs out when nobody has served for `timeout_us`, counted from the first look at a time without anybody."""

    def __init__(self, timeout_us: int) -> None:
        self._timeout_us = timeout_us
        self._unserved_since_us: int | None = None

    def renew(self) -> None:
        """Somebody serves."""
        self._unserved_since_us = None

    def lost_us(self, now_us: int) -> int:
        """What came by then has waited for too long, given that nobody serves now; -1 for nothing.

        Who came later waits as long as the others did: a worker may be on its way.
        """
        return now_us - self._timeout_us if self.is_over(now_us) else -1

    def is_over(self, now_us: int) -> bool:
        """Whether nobody has served for too long, given that nobody does now."""
        if self._unserved_since_us is None:
            self._unserved_since_us = now_us
        return now_us - self._unserved_since_us >= self._timeout_us
