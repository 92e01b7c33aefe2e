"""`TraceSampler`: which requests under one trace setting are traced. Source of semantics: Triton's `SampleTrace`."""

from __future__ import annotations


class TraceSampler:
    """Takes every `rate`-th request, `count` times (-1: without end); with rate 0 it takes none of itself.

    A request whose caller traces it (`is_propagated`) is always traced. It is one of those that are counted off, but
    only one that was the rate's turn anyway lessens the count.
    """

    __slots__ = ("_rate", "_seen", "remaining")

    def __init__(self, rate: int, count: int) -> None:
        self._rate = rate
        self._seen = 0
        self.remaining = count

    def sample(self, is_propagated: bool = False) -> bool:
        """Whether the request that comes now is traced."""
        if self._rate and self.remaining:
            self._seen += 1
            if self._seen == self._rate:
                self._seen = 0
                if self.remaining > 0:
                    self.remaining -= 1
                return True
        return is_propagated
