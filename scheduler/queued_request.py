"""`QueuedRequest`: one request while a scheduler is responsible for it."""

from __future__ import annotations

from typing import Protocol

from schemas.messages import Part


class Frame(Protocol):
    """The bus message a request came in; told once when that request has had its terminal answer."""

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """The ack subject, if this batch with so many of the frame's requests ends it."""

    def request_ended(self, batch_id: int) -> None:
        """One request of the frame has ended, in this batch (0: without having run)."""


class QueuedRequest:
    """A request and what the scheduler knows of it.

    `enqueued_us` is the policy clock when it came. `attempts` counts the batches that were lost with it in them;
    `alone` asks that it shares its next batch with nobody. `frames` are the messages that brought it: more than one when
    it was sent again.
    """

    __slots__ = (
        "alone",
        "attempts",
        "batch_size",
        "cancelled",
        "enqueued_us",
        "frames",
        "gateway",
        "part",
        "shape_key",
    )

    def __init__(self, gateway: str, part: Part, enqueued_us: int, frame: Frame | None = None) -> None:
        self.gateway = gateway
        self.part = part
        self.batch_size = part.batch_size
        self.shape_key = part.shape_key
        self.enqueued_us = enqueued_us
        self.attempts = 0
        self.alone = False
        self.cancelled = False
        self.frames: list[Frame] = [] if frame is None else [frame]

    def __repr__(self) -> str:
        return f"QueuedRequest({self.gateway}, {self.part.key})"

    @property
    def identity(self) -> tuple[str, int]:
        """(gateway, key): unique over the cluster."""
        return self.gateway, self.part.key

    def end(self, batch_id: int = 0) -> None:
        """The request has had its terminal answer, from the worker that ran this batch (0: not from a worker)."""
        for frame in self.frames:
            frame.request_ended(batch_id)
        self.frames = []
