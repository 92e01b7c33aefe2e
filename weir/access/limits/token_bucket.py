"""`TokenBucket`: `rate` tokens a second, of which so many may be taken at once."""

from __future__ import annotations


class TokenBucket:
    """Sans-IO; `now_s` is the time in seconds of any clock that does not go back. It begins with `level` tokens.

    It holds at most `burst` tokens: by default those of a second, or one where the rate is smaller.
    """

    __slots__ = ("_level", "_since_s", "burst", "rate")

    def __init__(self, rate: float, now_s: float, level: float = 0.0, burst: float = 0.0) -> None:
        self.rate = rate
        self.burst = burst or max(1.0, rate)
        self._level = min(level, self.burst)
        self._since_s = now_s

    def level(self, now_s: float) -> float:
        """How many tokens there are; less than 0 while more was taken at once than a burst."""
        if now_s > self._since_s:
            self._level = min(self.burst, self._level + (now_s - self._since_s) * self.rate)
            self._since_s = now_s
        return self._level

    def change_rate(self, rate: float, now_s: float) -> None:
        """Fills by another rate from now on, with the burst of it, up to which the tokens that there are stay."""
        level = self.level(now_s)
        self.rate, self.burst = rate, max(1.0, rate)
        self._level = min(level, self.burst)

    def take(self, wanted: float, least: float, now_s: float) -> float:
        """Takes up to `wanted` tokens, and returns how many: 0 if there are fewer than `least`.

        If `least` is more than a burst, a full bucket gives it, and owes what it lacks: the rate stays right.
        """
        level = self.level(now_s)
        if level >= least:
            taken = min(wanted, max(0.0, level))
        elif level >= self.burst:
            taken = least
        else:
            return 0.0
        self._level -= taken
        return taken

    def spend(self, tokens: float, now_s: float) -> None:
        """Takes tokens whether there are as many or not: what was used already."""
        self._level = self.level(now_s) - tokens

    def give_back(self, tokens: float, now_s: float) -> None:
        """Puts tokens back that were taken and not used."""
        self._level = min(self.burst, self.level(now_s) + tokens)

    def wait_s(self, least: float, now_s: float) -> float:
        """In how many seconds `take` gives `least`, if nothing is taken meanwhile."""
        return max(0.0, min(least, self.burst) - self.level(now_s)) / self.rate
