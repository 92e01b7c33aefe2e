"""Requests as they come to policies, in frames that count what they are told."""

from __future__ import annotations

from itertools import count

from scheduler.queued_request import QueuedRequest, requests_of
from schemas.messages import Part

LATEST = -1
BODY = b"body"


class CountingFrame:
    """A frame that remembers how many of its requests have ended, and in which batches."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.ended = 0
        self.batch_ids: list[int] = []

    def delegate(self, batch_id: int, requests: int) -> str | None:
        return "ack" if requests == self.size - self.ended else None

    def requests_ended(self, requests: int, batch_id: int) -> None:
        self.ended += requests
        self.batch_ids.append(batch_id)


def part(
    key: int,
    version: int = LATEST,
    batch_size: int = 1,
    shape_key: str = "",
    body: bytes = BODY,
    priority: int = 0,
    timeout_us: int = 0,
    deadline_ms: int = 0,
    lane: int = 0,
) -> Part:
    return Part(key, version, batch_size, shape_key, priority, timeout_us, deadline_ms, 0, 0, "", body, lane)


_keys = count(1)


def request(
    now_us: int = 0,
    *,
    key: int | None = None,
    gateway: str = "gateway",
    version: int = LATEST,
    batch_size: int = 1,
    shape_key: str = "",
    body: bytes = BODY,
    priority: int = 0,
    timeout_us: int = 0,
    deadline_ms: int = 0,
    lane: int = 0,
) -> QueuedRequest:
    """One request in a frame of its own. The policy clock is unix time."""
    number = next(_keys) if key is None else key
    row = part(number, version, batch_size, shape_key, body, priority, timeout_us, deadline_ms, lane)
    return requests_of(gateway, [row], now_us, CountingFrame())[0]


def keys(requests: list[QueuedRequest] | None) -> list[int] | None:
    return None if requests is None else [request.key for request in requests]
