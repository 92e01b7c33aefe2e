"""`LiveQueue`: the names of a queue of live requests. `LiveLayout`: the streams that hold the queues.

A model has one queue, which one scheduler owns, or several, its *partitions*, if it has more requests than one scheduler
can serve. The first partition has the model's name alone.

One stream serves a few dozen models well; the cost of a message grows with the number of consumers. So a cluster of many
models may have several streams. The role that creates stream LIVE records their number in its metadata, and all others use
that number, whatever their options say, because callers and schedulers must agree.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from weir.bus.naming import subjects

logger = logging.getLogger("weir.bus")


class LiveQueue(NamedTuple):
    """One queue: the identity of its model, and the number of its partition."""

    model: str
    partition: int = 0

    @property
    def consumer(self) -> str:
        """The name of the durable consumer that its owner pulls from."""
        return subjects.live_consumer(self.model, self.partition)

    @property
    def cancel_subject(self) -> str:
        """The subject of cancellations of its requests."""
        return subjects.cancel(self.model, self.partition)

    @property
    def drain_subject(self) -> str:
        """The subject on which workers ask its owner whether they may unload versions of the model."""
        return subjects.drain(self.model)

    def inbox(self, scheduler: str) -> str:
        """The subject of its frames for `scheduler`."""
        return f"{subjects.inbox(scheduler)}.{subjects.queue_token(self.model, self.partition)}"

    def __str__(self) -> str:
        return f"{self.model} (partition {self.partition})" if self.partition else self.model


MAX_LIVE_STREAMS = 64
"""Streams that the queues of live requests may be spread over."""

_STREAM_COUNT_KEY = "weir-live-streams"


class LiveLayout:
    """The layout as one process knows it. `wanted` is the number of streams by its options, None without the option."""

    def __init__(self, wanted: int | None = None) -> None:
        self.wanted = wanted
        self._learnt: int | None = None
        self._warned = False

    @property
    def streams(self) -> int:
        """The number of streams, 1 before the record is read."""
        return self._learnt or 1

    @property
    def to_create(self) -> int:
        """The number of streams to create if none exist: as before they were lost, else by the options."""
        return self._learnt or self.wanted or 1

    def to_record(self) -> dict[str, str]:
        """Metadata for stream LIVE when it is created."""
        return {_STREAM_COUNT_KEY: str(self.to_create)}

    def learn(self, metadata: Mapping[str, str] | None) -> None:
        """Takes the number recorded in stream LIVE; a stream without a record is the only one."""
        text = (metadata or {}).get(_STREAM_COUNT_KEY, "1")
        recorded = int(text) if text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= MAX_LIVE_STREAMS else 1
        if self._learnt not in (None, recorded):
            logger.warning("the number of streams of live requests changed to %d (it was %d)", recorded, self._learnt)
        elif self.wanted not in (None, recorded) and not self._warned:
            self._warned = True
            logger.warning(
                "the cluster has %d streams of live requests, not %d as in --live-streams: their creator's number applies",
                recorded,
                self.wanted,
            )
        self._learnt = recorded

    def stream(self, queue: LiveQueue) -> str:
        """The stream of the queue's frames."""
        return subjects.live_stream(_stream_number(queue.model, queue.partition, self.streams))

    def subject(self, queue: LiveQueue) -> str:
        """The subject to publish the queue's frames on."""
        return _live_subject(queue.model, queue.partition, self._learnt or 1)

    def subject_of(self, model: str) -> str:
        """The same for the first queue of a model."""
        return _live_subject(model, 0, self._learnt or 1)


def _stream_number(model: str, partition: int, streams: int) -> int:
    if streams == 1:
        return 0
    home = int.from_bytes(hashlib.blake2s(model.encode(), digest_size=8).digest(), "big")
    # Partitions are spread: a model that is too much for one scheduler is a burden for one stream as well.
    return (home + partition) % streams


@lru_cache(maxsize=8192)
def _live_subject(model: str, partition: int, streams: int) -> str:
    return subjects.live(model, partition, _stream_number(model, partition, streams))
