"""`LogLimiter`: at most one log line per second and cause, with the number of lines it left out.

Under overload, or while a peer sends garbage, the same condition occurs thousands of times a second. Each line then costs
more than the request it is about, and hides every other line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 1.0
MAX_CAUSES = 1000
"""Causes remembered at once. Beyond that the oldest ones are forgotten, and may be logged again early."""


class LogLimiter:
    """Logs through `logger`, at most once in `interval_s` seconds for each cause. Safe to call from any thread.

    A cause is a short constant text, such as "frame refused". Never derive it from what a client sent.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._causes: dict[str, tuple[float, int]] = {}  # when the cause was logged last, lines left out since

    def log(
        self, level: int, cause: str, message: str, *arguments: object, exc_info: BaseException | None = None
    ) -> bool:
        """Logs `message % arguments` if the cause is due. Returns whether it was logged."""
        now_s = self._clock()
        last_s, left_out = self._causes.get(cause, (-self._interval_s, 0))
        if now_s - last_s < self._interval_s:
            self._causes[cause] = last_s, left_out + 1
            return False
        self._causes.pop(cause, None)  # the newest one is kept at the end
        while len(self._causes) >= MAX_CAUSES:
            self._causes.pop(next(iter(self._causes)), None)
        self._causes[cause] = now_s, 0
        if left_out:
            message += " (%d more like this in the last %.0f s)"
            arguments = (*arguments, left_out, now_s - last_s)
        self._logger.log(level, message, *arguments, exc_info=exc_info)
        return True

    def warning(self, cause: str, message: str, *arguments: object) -> bool:
        """`log` at level WARNING."""
        return self.log(logging.WARNING, cause, message, *arguments)
