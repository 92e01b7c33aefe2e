"""`Lane`: by which of three ways a request came to its model's queue, which says who goes first."""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    """The lanes, the most urgent one first."""

    LIVE = 0
    """Somebody waits on a connection: HTTP, gRPC, NATS request-reply, and the calls of models."""
    EVENT = 1
    """Published to `event.<model>`, or asked for over HTTP or gRPC to be fetched later: accepted on disk."""
    BATCH = 2
    """Offline work: it takes what the others leave."""
