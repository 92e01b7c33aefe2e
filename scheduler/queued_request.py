"""`QueuedRequest`: one request while a scheduler is responsible for it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Protocol

from schemas.frames import Row
from schemas.wire import MalformedMessage


class Frame(Protocol):
    """A bus message that brought requests; told once of each of them, when it has had its terminal answer."""

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """The ack subject, if this batch with so many of the frame's requests ends it."""

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """So many requests of the frame have ended, in this batch (0: without having run)."""


class BothFrames:
    """What a request holds in the place of its frame once it was sent again: one frame that stands for two."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Frame, second: Frame) -> None:
        self._first = first
        self._second = second

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """See `Frame`: never, the scheduler acknowledges each of the two when it ends."""
        return None

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """See `Frame`."""
        self._first.requests_ended(requests, batch_id)
        self._second.requests_ended(requests, batch_id)


class QueuedRequest:
    """A request and what the scheduler knows of it; made by `requests_of`.

    `key` (unique within `gateway`), `version` (-1: the latest), `batch_size`, `shape_key` and `body` are those of
    `schemas.messages.Part`. `enqueued_us` is the policy clock when it came. `attempts` counts the batches that were lost
    with it in them. Only requests with equal shape keys share a batch. `correlation_id`, `sequence_flags` and
    `timeout_us` are those of the part; whoever reads them has checked nothing but their types.
    """

    __slots__ = (
        "attempts",
        "batch_size",
        "body",
        "cancelled",
        "correlation_id",
        "enqueued_us",
        "frame",
        "gateway",
        "key",
        "sequence_flags",
        "shape_key",
        "timeout_us",
        "version",
    )

    gateway: str
    key: int
    version: int
    batch_size: int
    shape_key: object
    timeout_us: int
    correlation_id: int | str
    sequence_flags: int
    body: bytes
    enqueued_us: int
    frame: Frame
    attempts: int
    cancelled: bool

    def __repr__(self) -> str:
        return f"QueuedRequest({self.gateway}, {self.key})"

    def run_alone(self) -> None:
        """From now on it shares its batch with nobody: its shape is like no other."""
        self.shape_key = object()


_TYPES = (int, int, int, str, int, int, bytes)
_CORRELATION_ID_TYPES = (int, str)


def requests_of(gateway: str, rows: Iterable[Row], enqueued_us: int, frame: Frame) -> list[QueuedRequest]:
    """The requests that `frame` brought, one for each row. Raises MalformedMessage if one is none.

    One loop and no constructor: this runs for every request of the cluster, and a call costs as much as the rest of it.
    """
    requests: list[QueuedRequest] = []
    for row in rows:
        try:
            key, version, batch_size, shape_key, _, timeout_us, _, correlation_id, flags, _, body = row
        except (TypeError, ValueError) as error:
            raise MalformedMessage(f"not a request: {error}") from error
        types = (type(key), type(version), type(batch_size), type(shape_key), type(timeout_us), type(flags), type(body))
        if types != _TYPES or batch_size < 1 or type(correlation_id) not in _CORRELATION_ID_TYPES:
            raise MalformedMessage("not a request: wrong types or no batch size")
        request = QueuedRequest()
        request.gateway = gateway
        request.key = key
        request.version = version
        request.batch_size = batch_size
        request.shape_key = shape_key
        request.timeout_us = timeout_us
        request.correlation_id = correlation_id
        request.sequence_flags = flags
        request.body = body
        request.enqueued_us = enqueued_us
        request.frame = frame
        request.attempts = 0
        request.cancelled = False
        requests.append(request)
    return requests


arrival = attrgetter("enqueued_us", "key")
"""Orders requests as they came: those of one frame came at once, in the order of their keys."""

frame_of = attrgetter("frame")
