"""`ExecutionTurns`: the rate limiter between the threads of instances, each of which waits here for its turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from worker.rate_limiter import GLOBAL, Needs, RateLimiter, Resource, explicit_amounts

logger = logging.getLogger("weir.worker")


def execution_turns(mode: str, resources: Sequence[str]) -> ExecutionTurns | None:
    """Those of a worker by its options `--rate-limit` and `--rate-limit-resource`; None when instances run as they like."""
    return None if mode == "off" else ExecutionTurns(RateLimiter(explicit_amounts(resources)))


class ExecutionTurns:
    """The turns of all instances of a worker, by one `RateLimiter`; for any thread."""

    def __init__(self, limiter: RateLimiter[ExecutionTurn]) -> None:
        self._limiter = limiter
        self._lock = threading.Lock()

    def join(self, needs: Needs) -> ExecutionTurn | None:
        """The turns of one more instance; None where it needs nothing, and so never waits.

        Raises WeirError when it could never have a turn.
        """
        if not needs.resources:
            return None
        turn = ExecutionTurn(self._limiter, self._lock)
        with self._lock:
            before = dict(self._limiter.amounts)
            self._limiter.add(turn, needs)
            _log_changes(before, self._limiter.amounts)
        return turn


class ExecutionTurn:
    """The turns of one instance: its thread takes one for each batch and gives it back, and leaves in the end."""

    def __init__(self, limiter: RateLimiter[ExecutionTurn], lock: threading.Lock) -> None:
        self._limiter = limiter
        self._lock = lock
        self._has_asked = False
        self._granted = threading.Event()

    def take(self) -> None:
        """Returns when the instance may execute."""
        if not self._has_asked:
            with self._lock:
                _grant(self._limiter.ask(self))
        self._granted.wait()
        self._granted.clear()
        self._has_asked = False

    def give_back(self, wants_more: bool) -> None:
        """The instance has executed; `wants_more` says that it will take the next turn at once."""
        self._has_asked = wants_more
        with self._lock:
            _grant(self._limiter.give_back(self, wants_more))

    def leave(self) -> None:
        """The instance takes none any more."""
        with self._lock:
            before = dict(self._limiter.amounts)
            _grant(self._limiter.remove(self))
            _log_changes(before, self._limiter.amounts)


def _grant(turns: Iterable[ExecutionTurn]) -> None:
    for turn in turns:
        turn._granted.set()


def _log_changes(before: Mapping[Resource, int], amounts: Mapping[Resource, int]) -> None:
    """Logs how much there is of the resources whose amounts have changed, as Triton's verbose log names them."""
    for (name, device), count in amounts.items():
        if before.get((name, device)) != count:
            place = "GLOBAL" if device == GLOBAL else device
            logger.debug("rate limiter: Device: %s, Resource: %s\t Count: %d", place, name, count)
