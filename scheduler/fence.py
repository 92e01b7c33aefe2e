"""`Fence`: a scheduler that could not tell of itself decides nothing until it knows what it still owns.

A process that was stopped goes on in the middle of what it did, with the picture of the world it had. Others may have
taken its queues meanwhile. So whatever comes in is looked at only while the last sign of life that the broker has
confirmed is younger than `SURE_S`, which is less than after what others take it for gone; what comes later is kept, and
looked at once the owner of this fence has checked its records. It costs one comparison a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from runtime.containment import contained

SURE_S = 0.75
"""After a sign of life others leave alone what this process owns for so long, and longer."""


class Fence:
    """See the module. Open for ever until it is first told of a sign of life."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sure_until_s = float("inf")
        self._kept: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_open(self) -> bool:
        """Whether what comes is looked at."""
        return self._clock() <= self._sure_until_s

    def guard(self, act: Callable[..., None]) -> Callable[..., None]:
        """`act`, which is put off while the fence is shut."""

        def guarded(*arguments: Any) -> None:
            if self._clock() <= self._sure_until_s:
                act(*arguments)
            else:
                # As much as was asked for before can come, no more: nothing is asked for while it is shut.
                self._kept.append((act, arguments))

        return guarded

    def shut(self) -> None:
        """Something has happened after which what is owned must be checked."""
        self._sure_until_s = float("-inf")

    def confirmed(self, told_s: float) -> bool:
        """The broker has what was told at this time; False where that doesn't open a fence that is shut."""
        if self.is_open:
            self._sure_until_s = told_s + SURE_S
        return self.is_open

    def open(self, told_s: float) -> bool:
        """What is owned was checked, and told again at this time: what was kept is looked at now.

        False where that took too long: then it is to be done again.
        """
        self._sure_until_s = told_s + SURE_S
        while self._kept and self.is_open:
            kept, self._kept = self._kept, []
            for position, (act, arguments) in enumerate(kept):
                if not self.is_open:
                    self._kept = kept[position:] + self._kept
                    break
                self._act(act, arguments)
        return self.is_open

    @contained()
    def _act(self, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        act(*arguments)
