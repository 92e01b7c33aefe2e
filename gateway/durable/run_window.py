"""`RunWindow`: how many durable requests of one lane of a model are submitted and have no answer.

What is submitted runs in the order in which it was: who comes later waits for all of it, and it is not taken back.
So there are no more than keep the workers busy: what their instances hold, a batch that runs and one that is staged,
and what is answered in a tenth of a second, for that may be on its way. A sans-IO state machine.
"""

from __future__ import annotations

WINDOW = 1024
"""Durable requests of one lane of a model that are submitted and have no answer, at most."""

_SPARE = 64
_ON_THE_WAY_S = 0.15
_DECAY = 0.5


class RunWindow:
    """See the module. `size` is how many there may be."""

    def __init__(self) -> None:
        self.size = _SPARE
        self._answered = 0
        self._rate = 0.0
        self._since_s: float | None = None

    def answered(self) -> None:
        """A request has its answer."""
        self._answered += 1

    def tick(self, now_s: float, places: int | None) -> None:
        """Reckons anew; called some ten times a second.

        `places` is how many requests the model's instances run at once, None where nobody can tell.
        """
        if self._since_s is not None and now_s > self._since_s:
            self._rate = max(self._answered / (now_s - self._since_s), self._rate * _DECAY)
        self._since_s, self._answered = now_s, 0
        if places is None:
            self.size = WINDOW
        else:
            self.size = min(WINDOW, 2 * places + _SPARE + int(self._rate * _ON_THE_WAY_S))
