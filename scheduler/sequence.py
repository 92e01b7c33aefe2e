"""`Sequence`, all requests with one correlation id between START and END, and `SlottedInstance`, which holds sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from scheduler.placement import Instance
from scheduler.queued_request import QueuedRequest
from scheduler.sequence_progress import SequenceProgress
from schemas.messages import NOBODY
from schemas.requests import SEQUENCE_START

CorrelationId = int | str


class Sequence:
    """One sequence: the requests that wait (`queue`), the one that is `running`, and its slot (`instance` None: none).

    `is_closed` once its END has come: no more requests are its own. `is_over` when it was forgotten. `ended` is the
    gateway and key of the last request of a gateway's that has ended. `lane` is that of its first request.
    """

    __slots__ = (
        "ended",
        "id",
        "instance",
        "is_closed",
        "is_over",
        "lane",
        "last_us",
        "progress",
        "queue",
        "running",
        "shape",
        "slot",
    )

    def __init__(self, id: CorrelationId, progress: SequenceProgress, lane: int = 0) -> None:
        self.id = id
        self.progress = progress
        self.lane = lane
        self.queue: deque[QueuedRequest] = deque()
        self.running: QueuedRequest | None = None
        self.instance: SlottedInstance | None = None
        self.slot = 0
        self.shape: object = ""
        self.is_closed = False
        self.is_over = False
        self.last_us = 0
        self.ended: tuple[str, int] = (NOBODY, 0)

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, waiting={len(self.queue)})"

    @property
    def next_request(self) -> QueuedRequest:
        """What runs next: the first that waits, unless others must bring the state to it again. One waits."""
        first, progress = self.queue[0], self.progress
        if progress.state_at == progress.number or first.sequence_flags & SEQUENCE_START:
            return first
        return progress.next_replay or first

    def has_run(self, request: QueuedRequest) -> bool:
        """Whether the request, which its gateway sent again, has ended here: a gateway counts its keys up."""
        gateway, key = self.ended
        return request.gateway == gateway and request.key <= key

    def holds(self, request: QueuedRequest) -> bool:
        """Whether the request is one of this sequence's that has not ended."""
        return request is self.running or request in self.queue


class SlottedInstance(Instance):
    """An instance with slots for sequences: `slots` and the numbers of the `free` ones, lowest first.

    `ready` are the sequences with a request that could run now, in the order in which they came to be so; `batch_id` is
    the batch it runs, 0 when it is idle. `index` tells it from the others of its version. `is_resting`: it has just lost
    its sequences, and may not be there.
    """

    __slots__ = ("_alike", "batch_id", "free", "index", "is_resting", "ready", "slots")

    def __init__(self, worker: str, number: int, slots: int, index: int) -> None:
        super().__init__(worker, number)
        self.index = index
        self.slots: list[Sequence | None] = [None] * slots
        self.free = list(range(slots))
        self.ready: dict[Sequence, None] = {}
        self._alike: dict[object, dict[Sequence, None]] = {}  # those of `ready` by the shape of their next request
        self.batch_id = 0
        self.is_resting = False

    def sequences(self) -> Iterator[Sequence]:
        """Those it holds."""
        return (sequence for sequence in self.slots if sequence is not None)

    def make_ready(self, sequence: Sequence) -> None:
        """The sequence, one of its own, has a request that could run now."""
        if sequence not in self.ready:
            sequence.shape = sequence.next_request.shape_key
            self.ready[sequence] = None
            self._alike.setdefault(sequence.shape, {})[sequence] = None

    def make_unready(self, sequence: Sequence) -> None:
        """The sequence has none any more; it need not have had one."""
        if sequence in self.ready:
            del self.ready[sequence]
            alike = self._alike[sequence.shape]
            del alike[sequence]
            if not alike:
                del self._alike[sequence.shape]

    def first_alike(self, most: int) -> list[Sequence]:
        """The ready sequence that is so for longest, and those behind it whose requests can share its batch."""
        return list(islice(self._alike[next(iter(self.ready)).shape], most))
