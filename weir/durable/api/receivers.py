"""`Receivers`: how many responses are posted to one receiver at a time. No IO; not thread-safe.

A receiver is the first part of a path on a host: `https://hooks.example.com/team`. Promises:
- A receiver has at most `MAX_POSTS_TO_ONE` posts at a time, and a host `MAX_POSTS_TO_HOST`, so that one that hangs leaves
  places for others.
- After `FAILURES` posts in a row without a response, a receiver has one post at a time, each after a pause that doubles
  up to `MAX_PAUSE_S`. A response of any status ends that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

MAX_POSTS_TO_ONE = 8
"""Responses that a process posts to one receiver at the same time."""

MAX_POSTS_TO_HOST = 24
"""The same, to all receivers of a host."""

FAILURES = 3
"""Posts in a row without a response, after which a receiver has pauses."""

PAUSE_S = 5.0
"""The first pause, in seconds."""

MAX_PAUSE_S = 300.0
"""The longest pause, in seconds."""

MAX_KNOWN = 10_000
"""Receivers that are kept after a failure."""


class ReceiverName(NamedTuple):
    """The scheme, host and port of a receiver, and the first part of its path."""

    host: str
    part: str

    @classmethod
    def of(cls, host: str, path: str) -> ReceiverName:
        """The receiver that a path on a host belongs to."""
        return cls(host, path.lstrip("/").partition("/")[0])


class Turn(Enum):
    """Whether a response may be posted to a receiver."""

    NOW = auto()
    """It may: `Receivers.end` follows."""

    LATER = auto()
    """The share is full of other posts, which get responses."""

    CLOSED = auto()
    """The receiver did not respond, and has a pause."""


@dataclass(slots=True)
class _Receiver:
    posts: int = 0
    failures: int = 0
    closed_until_s: float = 0.0


class Receivers:
    """The receivers of one process. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._receivers: dict[ReceiverName, _Receiver] = {}
        self._of_host: Counter[str] = Counter()

    def begin(self, name: ReceiverName, now_s: float) -> Turn:
        """Counts a post to a receiver until `end`, if it may be made now."""
        receiver = self._receivers.get(name) or _Receiver()
        if receiver.failures >= FAILURES:
            if receiver.posts or now_s < receiver.closed_until_s:
                return Turn.CLOSED
        elif receiver.posts >= MAX_POSTS_TO_ONE:
            return Turn.LATER
        if self._of_host[name.host] >= MAX_POSTS_TO_HOST:
            return Turn.LATER
        receiver.posts += 1
        self._of_host[name.host] += 1
        self._receivers[name] = receiver
        return Turn.NOW

    def end(self, name: ReceiverName, has_responded: bool, now_s: float) -> None:
        """A post has ended; `has_responded` if a response came, whatever its status."""
        receiver = self._receivers[name]
        receiver.posts -= 1
        self._of_host[name.host] -= 1
        if not self._of_host[name.host]:
            del self._of_host[name.host]
        if has_responded:
            receiver.failures = 0
        else:
            receiver.failures += 1
            doublings = min(max(0, receiver.failures - FAILURES), 10)
            receiver.closed_until_s = now_s + min(PAUSE_S * 2**doublings, MAX_PAUSE_S)
        if not (receiver.posts or receiver.failures):
            del self._receivers[name]
        elif len(self._receivers) > MAX_KNOWN:
            self._forget_one()

    def _forget_one(self) -> None:
        """Forgets the receiver without posts that failed first."""
        idle = next((name for name, receiver in self._receivers.items() if not receiver.posts), None)
        if idle is not None:
            del self._receivers[idle]
