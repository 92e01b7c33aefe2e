"""`LiveQueue`: where frames of live requests wait, and all names that follow from it.

A model has one such queue, which one scheduler owns; a model hotter than one scheduler has several, its *partitions*.
The first of them goes by the model's name alone. The stream that its frames lie in, and so the subject that they are
published on, is the matter of `bus.live_layout`.
"""

from __future__ import annotations

from typing import NamedTuple

from bus import subjects


class LiveQueue(NamedTuple):
    """One queue: its model's identity, and which of the model's partitions it is."""

    model: str
    partition: int = 0

    @property
    def consumer(self) -> str:
        """Name of the durable consumer through which its owner pulls."""
        return subjects.live_consumer(self.model, self.partition)

    @property
    def cancel_subject(self) -> str:
        """Where callers tell which of its requests they have abandoned."""
        return subjects.cancel(self.model, self.partition)

    @property
    def drain_subject(self) -> str:
        """Where workers ask its owner whether they may unload versions of the model."""
        return subjects.drain(self.model)

    def inbox(self, scheduler: str) -> str:
        """Where `scheduler` has its frames delivered."""
        return f"{subjects.inbox(scheduler)}.{subjects.queue_token(self.model, self.partition)}"

    def __str__(self) -> str:
        return f"{self.model} (partition {self.partition})" if self.partition else self.model
