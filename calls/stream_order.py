"""`StreamOrder`: which responses to one request are passed on: those of one run of the model, all of them, in order.

A request is run twice where it was delivered again, and a message may be lost with the broker. A caller must see neither:
the stream it reads is whole, or ends with an error.
"""

from __future__ import annotations

from enum import Enum, auto

from schemas.messages import Answer


class Place(Enum):
    """What an answer is to the stream of its request."""

    NEXT = auto()
    """The one that follows."""
    OTHER = auto()
    """Of another run, which goes on."""
    BROKEN = auto()
    """Proof that what should follow will not come."""


class StreamOrder:
    """The run that was heard of first, and how many responses of it."""

    __slots__ = ("_heard", "_run")

    def __init__(self, run: str) -> None:
        self._run = run
        self._heard = 0

    def place(self, answer: Answer) -> Place:
        """What `answer` is; it counts as heard if it is the next one."""
        if answer.run != self._run:
            # Had the first run not gone with its worker, it would have ended before.
            return Place.BROKEN if answer.is_final else Place.OTHER
        if answer.number != self._heard:
            return Place.BROKEN
        self._heard += 1
        return Place.NEXT
