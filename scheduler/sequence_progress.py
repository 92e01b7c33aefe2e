"""`SequenceProgress`: how far a sequence has come, how far the state in its slot has, and what brings the two together.

While a sequence stays in its slot both are the same. Where its state is checkpointed, it may go on in another slot: the
worker there fetches the last checkpoint, and what ran since runs again, answered to nobody. The bodies of those requests
are kept here for it, within a limit; beyond it, and for bodies that lie elsewhere, a sequence that loses its slot ends.
"""

from __future__ import annotations

from scheduler.queued_request import NO_FRAME, NO_TERMS, QueuedRequest
from schemas.messages import NOBODY, SequencePlace

MAX_REPLAY_BYTES = 64 << 20
"""Bodies of one version kept for being run again, of all sequences together."""


class ReplayMemory:
    """The room that the sequences of a version share for what they may have to run again."""

    __slots__ = ("left_bytes",)

    def __init__(self, limit_bytes: int = MAX_REPLAY_BYTES) -> None:
        self.left_bytes = limit_bytes


class SequenceProgress:
    """See the module. `every` is how many requests lie between two checkpoints, 0 for none.

    `run` numbers this sequence among all, so that one of the same id that is started again is another. `number` counts
    the requests that have ended, `state_at` those whose effect is in the slot's state.
    """

    __slots__ = ("_checkpoint", "_every", "_history", "_memory", "_needs_restore", "number", "run", "state_at")

    def __init__(self, every: int, memory: ReplayMemory) -> None:
        self._every = every
        self._memory = memory
        self._checkpoint = 0  # the state after so many requests can be had
        self._history: list[QueuedRequest] | None = []  # ended since then; None: they could not be kept
        self._needs_restore = False
        self.run = 0
        self.number = 0
        self.state_at = 0

    def begin(self, run: int) -> None:
        """The sequence starts, or starts again."""
        self.forget()
        self._history = []
        self.run = run
        self.number = self.state_at = self._checkpoint = 0
        self._needs_restore = False

    @property
    def can_move(self) -> bool:
        """Whether the sequence could go on in another slot than the one that has its state."""
        return self._every > 0 and (self._checkpoint == self.number or self._history is not None)

    @property
    def next_replay(self) -> QueuedRequest | None:
        """The request that must run again before others can; None where the state is where it belongs."""
        if self.state_at == self.number or self._history is None:
            return None
        return self._history[self.state_at - self._checkpoint]

    def move(self) -> None:
        """The sequence has a slot that does not have its state."""
        self.state_at = self._checkpoint
        self._needs_restore = self._checkpoint > 0

    def place(self, slot: int, flags: int) -> SequencePlace:
        """Where the next request of the sequence stands; called once for each."""
        restore, self._needs_restore = self._needs_restore, False
        return SequencePlace(slot, self.state_at, restore, self.run, flags)

    def ended(self, request: QueuedRequest) -> None:
        """A request that was sent has ended: its effect is in the state."""
        self.state_at += 1
        if request.gateway == NOBODY:
            return
        self.number += 1
        if not self._every:
            return
        if self.number % self._every == 0:
            self.forget()
            self._checkpoint, self._history = self.number, []
        elif self._history is not None:
            if len(request.body) > self._memory.left_bytes:
                self.forget()
                self._history = None
            else:
                self._memory.left_bytes -= len(request.body)
                self._history.append(_replay_of(request))

    def forget(self) -> None:
        """What was kept is not needed any more."""
        for request in self._history or ():
            self._memory.left_bytes += len(request.body)
        self._history = None


def _replay_of(request: QueuedRequest) -> QueuedRequest:
    replay = QueuedRequest()
    replay.payload_host = ""
    replay.gateway = NOBODY
    replay.key = 0
    replay.version = request.version
    replay.batch_size = request.batch_size
    replay.shape_key = request.shape_key
    replay.terms = NO_TERMS._replace(correlation_id=request.correlation_id, sequence_flags=request.sequence_flags)
    replay.body = request.body
    replay.enqueued_us = request.enqueued_us
    replay.frame = NO_FRAME
    replay.attempts = 0
    replay.cancelled = False
    replay.place = None
    return replay
