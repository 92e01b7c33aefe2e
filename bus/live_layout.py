"""`LiveLayout`: in which streams the queues of live requests lie.

One stream serves a few dozen models well, and costs the more for each message the more consumers it has. So a cluster of
many models may have several: how many is recorded in the metadata of stream LIVE, by whoever makes it. All others take what
is recorded there, whatever they were told, for callers and schedulers must agree.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import lru_cache

from bus import subjects
from bus.live_queues import LiveQueue

logger = logging.getLogger("weir.bus")

MAX_LIVE_STREAMS = 64
"""Streams that the queues of live requests may be spread over."""

_COUNT = "weir-live-streams"


class LiveLayout:
    """The layout as one process knows it. `wanted` is what it was told, None where it was told nothing."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self._learnt: int | None = None
        self._warned = False

    @property
    def streams(self) -> int:
        """How many there are, as far as is known: 1 at first."""
        return self._learnt or 1

    @property
    def to_make(self) -> int:
        """How many there are to be, if there are none: as many as there were before they were lost, else as wanted."""
        return self._learnt or self.wanted or 1

    def to_record(self) -> dict[str, str]:
        """Metadata for stream LIVE, if it is to be made."""
        return {_COUNT: str(self.to_make)}

    def learn(self, metadata: Mapping[str, str] | None) -> None:
        """Takes what is recorded in stream LIVE; a stream without a record of ours is the only one."""
        text = (metadata or {}).get(_COUNT, "1")
        recorded = int(text) if text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= MAX_LIVE_STREAMS else 1
        if self._learnt not in (None, recorded):
            logger.warning("the live requests lie in %d streams now, not in %d any more", recorded, self._learnt)
        elif self.wanted not in (None, recorded) and not self._warned:
            self._warned = True
            logger.warning(
                "the live requests lie in %d streams, not in %d: what holds was recorded by whoever made them",
                recorded,
                self.wanted,
            )
        self._learnt = recorded

    def stream(self, queue: LiveQueue) -> str:
        """The stream that the queue's frames lie in."""
        return subjects.live_stream(_number(queue.model, queue.partition, self.streams))

    def subject(self, queue: LiveQueue) -> str:
        """Where callers publish the queue's frames."""
        return _subject(queue.model, queue.partition, self._learnt or 1)

    def subject_of(self, model: str) -> str:
        """Where callers publish the frames of a model's first queue."""
        return _subject(model, 0, self._learnt or 1)


def _number(model: str, partition: int, streams: int) -> int:
    if streams == 1:
        return 0
    home = int.from_bytes(hashlib.blake2s(model.encode(), digest_size=8).digest(), "big")
    # Partitions lie side by side: a model that is hot for a scheduler is hot for a stream as well.
    return (home + partition) % streams


@lru_cache(maxsize=8192)
def _subject(model: str, partition: int, streams: int) -> str:
    return subjects.live(model, partition, _number(model, partition, streams))
