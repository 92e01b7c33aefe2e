"""`StatefulSequence`: the requests with one correlation id from START to END; `SlottedInstance`: holds sequences in
slots.

`SequenceProgress` tracks how far a sequence has come, and how far the state in its slot has. While a sequence stays
in its slot both are the same. If its state is checkpointed, it may continue in another slot: the worker there fetches
the last checkpoint, and the requests since then run again without a response. Their bodies are kept for this, within
a limit; beyond it, and for payloads stored elsewhere, a sequence that loses its slot ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from weir.scheduler.batching.request import NO_FRAME, NO_TERMS, QueuedRequest
from weir.scheduler.placement.instances import Instance
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import NO_REPLY, SequencePosition

CorrelationId = int | str


@dataclass(slots=True, eq=False)
class StatefulSequence:
    """One sequence: its waiting requests (`queue`), the one that is `running`, and its slot (`instance` None: none).

    `is_closed`: its END has arrived, so it accepts no more requests. `is_over`: it was forgotten. `is_sought`: it started
    at another scheduler, and what is stored of it is being looked up. `ended` is the gateway and key of the last request of
    a gateway that has ended. `lane` is the lane of its first request.
    """

    id: CorrelationId
    progress: SequenceProgress
    lane: int = 0
    queue: deque[QueuedRequest] = field(default_factory=deque)
    running: QueuedRequest | None = None
    instance: SlottedInstance | None = None
    slot: int = 0
    shape: object = ""
    is_closed: bool = False
    is_over: bool = False
    is_sought: bool = False
    last_us: int = 0
    ended: tuple[str, int] = (NO_REPLY, 0)

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, waiting={len(self.queue)})"

    @property
    def next_request(self) -> QueuedRequest:
        """The request to run next: the first waiting one, unless others must first rebuild the state. One waits."""
        first, progress = self.queue[0], self.progress
        if progress.state_at == progress.number or first.sequence_flags & SEQUENCE_START:
            return first
        return progress.next_replay or first

    def has_run(self, request: QueuedRequest) -> bool:
        """Whether the request, which its gateway sent again, has already ended here: gateways number requests upwards."""
        gateway, key = self.ended
        return request.gateway == gateway and request.key <= key

    def holds(self, request: QueuedRequest) -> bool:
        """Whether the request is an unfinished one of this sequence."""
        return request is self.running or request in self.queue


@dataclass(slots=True, eq=False, kw_only=True)
class SlottedInstance(Instance):
    """An instance with slots for sequences: `slots`, and the numbers of the `free` ones, lowest first.

    `ready` are the sequences with a request that could run now, in the order in which they became ready. `batch_id`
    is the batch that runs, 0 when idle. `index` distinguishes the instances of a version. `is_quarantined`: it has
    just lost its sequences and may be gone.
    """

    index: int
    slots: list[StatefulSequence | None]
    free: list[int] = field(default_factory=list)
    ready: dict[StatefulSequence, None] = field(default_factory=dict)
    batch_id: int = 0
    is_quarantined: bool = False
    # Ready sequences by the shape of their next request.
    _alike: dict[object, dict[StatefulSequence, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Instance.__post_init__(self)
        self.free = list(range(len(self.slots)))

    def sequences(self) -> Iterator[StatefulSequence]:
        """Returns the sequences it holds."""
        return (sequence for sequence in self.slots if sequence is not None)

    def make_ready(self, sequence: StatefulSequence) -> None:
        """Marks a sequence of this instance as ready."""
        if sequence not in self.ready:
            sequence.shape = sequence.next_request.shape_key
            self.ready[sequence] = None
            self._alike.setdefault(sequence.shape, {})[sequence] = None

    def make_unready(self, sequence: StatefulSequence) -> None:
        """Marks a sequence as not ready; it need not have been ready."""
        if sequence in self.ready:
            del self.ready[sequence]
            alike = self._alike[sequence.shape]
            del alike[sequence]
            if not alike:
                del self._alike[sequence.shape]

    def first_alike(self, most: int) -> list[StatefulSequence]:
        """Returns the sequence that has been ready longest, and those behind it whose requests can share its batch."""
        return list(islice(self._alike[next(iter(self.ready)).shape], most))


MAX_REPLAY_BYTES = 64 << 20
"""Bodies of one version kept for running again, of all sequences together."""


class ReplayBudget:
    """The memory for request bodies that the sequences of a version share."""

    __slots__ = ("left_bytes",)

    def __init__(self, limit_bytes: int = MAX_REPLAY_BYTES) -> None:
        self.left_bytes = limit_bytes


@dataclass(slots=True, eq=False)
class SequenceProgress:
    """The progress of one sequence and of its state. A checkpoint follows every `every` requests; 0 means never.

    `run` numbers the sequence, so that one of the same id that is started again is distinguishable. `number` counts
    the requests that have ended, `state_at` those whose effect is in the slot's state. `origin` are the scheduler and the
    run with which it started, None if it did here.
    """

    _every: int
    _memory: ReplayBudget
    _checkpoint: int = 0  # the last checkpoint holds the state after this many requests
    _history: list[QueuedRequest] | None = field(default_factory=list)  # requests since then; None: they were not kept
    _needs_restore: bool = False
    origin: tuple[str, int] | None = None
    run: int = 0
    number: int = 0
    state_at: int = 0

    @property
    def is_checkpointed(self) -> bool:
        """Whether checkpoints are taken."""
        return self._every > 0

    def adopt(self, run: int, origin: tuple[str, int], checkpoint: int, history: list[QueuedRequest]) -> bool:
        """Continues a sequence of another scheduler, from a checkpoint and the requests since; False for want of memory."""
        size_bytes = sum(len(request.body) for request in history)
        if size_bytes > self._memory.left_bytes:
            return False
        self._memory.left_bytes -= size_bytes
        self.run, self.origin = run, origin
        self._checkpoint = self.state_at = checkpoint
        self._history, self.number = history, checkpoint + len(history)
        return True

    def begin(self, run: int) -> None:
        """Starts the sequence, or starts it again."""
        self.forget()
        self._history = []
        self.run, self.origin = run, None
        self.number = self.state_at = self._checkpoint = 0
        self._needs_restore = False

    @property
    def can_move(self) -> bool:
        """Whether the sequence could continue in a slot without its state."""
        return self._every > 0 and (self._checkpoint == self.number or self._history is not None)

    @property
    def next_replay(self) -> QueuedRequest | None:
        """The request that must run again before new ones can; None if the state is complete."""
        if self.state_at == self.number or self._history is None:
            return None
        return self._history[self.state_at - self._checkpoint]

    def move(self) -> None:
        """Records that the sequence got a slot without its state."""
        self.state_at = self._checkpoint
        self._needs_restore = self._checkpoint > 0

    def place(self, slot: int, flags: int) -> SequencePosition:
        """Returns the place of the sequence's next request. Call it once for each request."""
        restore, self._needs_restore = self._needs_restore, False
        return SequencePosition(slot, self.state_at, restore, self.run, flags)

    def ended(self, request: QueuedRequest) -> None:
        """Records that a sent request has ended: its effect is in the state."""
        self.state_at += 1
        if request.gateway == NO_REPLY:
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
        """Releases the kept requests."""
        for request in self._history or ():
            self._memory.left_bytes += len(request.body)
        self._history = None


def replay_of(stored: tuple[int, bytes], version: int, id: CorrelationId) -> QueuedRequest:
    """A request that ran at another scheduler, from its flags and body, to run again without a response.

    Its shape is not known, so it shares a batch with none.
    """
    flags, body = stored
    terms = NO_TERMS._replace(correlation_id=id, sequence_flags=flags)
    return QueuedRequest(NO_REPLY, 0, version, 1, f"\0{id}", terms, body, "", 0, NO_FRAME)


def _replay_of(request: QueuedRequest) -> QueuedRequest:
    terms = NO_TERMS._replace(correlation_id=request.correlation_id, sequence_flags=request.sequence_flags)
    kind = request.version, request.batch_size, request.shape_key
    return QueuedRequest(NO_REPLY, 0, *kind, terms, request.body, "", request.enqueued_us, NO_FRAME)
