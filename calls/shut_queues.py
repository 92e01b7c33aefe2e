"""`ShutQueues`: the queues that take nothing for now, as a caller knows; it refuses by itself what they would refuse.

A scheduler that refuses a request for the wait it would have (`scheduler.admission`) says for how long it will refuse
others like it: for the same queue and version, of the same priority. For so long, from when that is heard, those are turned
away before they cost anybody anything. Who asks for nothing hears nothing, and nothing need be taken back: what is heard is
forgotten within `MAX_SHUT_US`, also when the queue gets another owner meanwhile.

What a scheduler doesn't refuse for its wait is never turned away: what is not live, and what goes on with a sequence.
Requests turned away are told to the queue's owner now and then, or it would know of no demand that its workers can't meet.

A state machine without a clock. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from typing import NamedTuple

from bus.live_queues import LiveQueue
from calls.partition_choice import AnyQueue, Destination
from schemas.errors import WeirError
from schemas.lanes import Lane
from schemas.requests import SEQUENCE_START, InferRequest

MAX_SHUT = 1_000
"""Kinds of requests that are known to be refused; more are sent, and refused by their scheduler."""

_LIVE = Lane.LIVE.value


class Kind(NamedTuple):
    """Requests that a scheduler treats alike: `version` is -1 for the latest."""

    queue: str | LiveQueue
    version: int
    priority: int


class _Shut(NamedTuple):
    until_s: float
    error: WeirError


class ShutQueues:
    """See the module. `known` is empty while nothing is known to be shut, which is all that need be looked at then.

    `turned_away` counts requests.
    """

    __slots__ = ("_untold", "known", "turned_away")

    def __init__(self) -> None:
        self.known: dict[Kind, _Shut] = {}
        self.turned_away = 0
        self._untold: dict[str | LiveQueue, int] = {}

    def learn(self, now_s: float, queue: Destination, request: InferRequest, error: WeirError) -> None:
        """The owner of `queue` has refused `request`. From here on the error speaks of that request alone."""
        shut_us, error.shut_us = error.shut_us, 0
        if isinstance(queue, AnyQueue) or not shut_us:
            return
        kind = Kind(queue, _version(request.model_version), request.priority)
        until_s = now_s + shut_us / 1e6
        if kind not in self.known and len(self.known) >= MAX_SHUT:
            self.known = {kind: shut for kind, shut in self.known.items() if shut.until_s > now_s}
            if len(self.known) >= MAX_SHUT:
                return
        self.known[kind] = _Shut(until_s, error)

    def check(self, now_s: float, queue: Destination, request: InferRequest) -> None:
        """Raises the WeirError with which the scheduler would refuse the request, if that is known."""
        if request.lane != _LIVE:
            return
        if (request.correlation_id or request.sequence_flags) and not request.sequence_flags & SEQUENCE_START:
            return
        self.check_any(now_s, queue, request.model_version, request.priority)

    def check_any(self, now_s: float, queue: Destination, version: str, priority: int = 0) -> None:
        """As `check`, for a live request of which no more is known than this, and that it goes on with no sequence."""
        queues: list[str | LiveQueue]
        if isinstance(queue, AnyQueue):
            queues = [LiveQueue(queue.model, partition) for partition in range(queue.partitions)]
        else:
            queues = [queue]
        shut = None
        for each in queues:
            shut = self._look(now_s, Kind(each, _version(version), priority))
            if shut is None:
                return  # where there is room in one partition its owner may take it
        if shut is None:
            return
        self.turned_away += 1
        self._untold[queues[0]] = self._untold.get(queues[0], 0) + 1
        # Raised anew each time: an error that is kept would keep the frames that it was raised in.
        raise WeirError(shut.error.code, shut.error.message, shut.error.retry_after_s)

    def take_untold(self) -> dict[str | LiveQueue, int]:
        """How many requests were turned away since this was asked last, by queue."""
        untold, self._untold = self._untold, {}
        return untold

    def _look(self, now_s: float, kind: Kind) -> _Shut | None:
        shut = self.known.get(kind)
        if shut is not None and shut.until_s <= now_s:
            del self.known[kind]
            return None
        return shut


def _version(text: str) -> int:
    return int(text) if text else -1
