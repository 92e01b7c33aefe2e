"""Sequences, and the slots of instances that hold them: who keeps the state of whom.

A sequence is all requests with one correlation id between START and END. It is bound to one slot of one instance from
the moment it gets it, for that is where its state is, and gives it back after its last request. A sequence that finds no
free slot waits in a backlog, first come, first served. Source: Triton's sequence batcher.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from scheduler.placement import Instance
from scheduler.queued_request import QueuedRequest

CorrelationId = int | str

MAX_LOST = 10_000
"""Sequences that ended with their instances, and are remembered for the sake of what is still sent for them."""


class Sequence:
    """One sequence: the requests that wait (`queue`), and the slot it has (`instance` None: it waits for one).

    `is_busy` while one of its requests runs; `is_closed` once its END has come: no more requests are its own.
    """

    __slots__ = ("id", "instance", "is_busy", "is_closed", "last_us", "queue", "slot")

    def __init__(self, id: CorrelationId) -> None:
        self.id = id
        self.queue: deque[QueuedRequest] = deque()
        self.instance: SlottedInstance | None = None
        self.slot = 0
        self.is_busy = False
        self.is_closed = False
        self.last_us = 0

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, waiting={len(self.queue)})"


class SlottedInstance(Instance):
    """An instance with slots for sequences: `slots` and the numbers of the `free` ones, lowest first.

    `ready` are the sequences with a request that could run now, in the order in which they came to be so; `batch_id` is
    the batch it runs, 0 when it is idle.
    """

    __slots__ = ("batch_id", "free", "ready", "slots")

    def __init__(self, worker: str, number: int, slots: int) -> None:
        super().__init__(worker, number)
        self.slots: list[Sequence | None] = [None] * slots
        self.free = list(range(slots))
        self.ready: dict[Sequence, None] = {}
        self.batch_id = 0

    def sequences(self) -> Iterator[Sequence]:
        """Those it holds."""
        return (sequence for sequence in self.slots if sequence is not None)


class SequenceTable:
    """All sequences of one model version and all slots for them. Times are microseconds.

    `slots_per_instance` is how many sequences an instance holds; `idle_us` how long a slot is kept for a sequence of
    which nothing comes.
    """

    def __init__(self, slots_per_instance: int, idle_us: int) -> None:
        self._slots_per_instance = slots_per_instance
        self._idle_us = idle_us
        self._open: dict[CorrelationId, Sequence] = {}
        self._backlog: dict[Sequence, None] = {}
        self._idle: dict[Sequence, None] = {}  # in the order in which they became idle
        self._lost: dict[CorrelationId, None] = {}  # ended with their instances, and their callers may not know
        self.instances: dict[tuple[str, int], SlottedInstance] = {}
        self.waiting = 0  # requests in the queues of all sequences

    def set_instances(self, worker: str, numbers: range) -> list[Sequence]:
        """`worker` has these instances now; returns the sequences that lost their slots, which are forgotten."""
        for number in numbers:
            if (worker, number) not in self.instances:
                self.instances[worker, number] = SlottedInstance(worker, number, self._slots_per_instance)
        gone = [key for key in self.instances if key[0] == worker and key[1] not in numbers]
        return [sequence for key in gone for sequence in self.evict(self.instances.pop(key))]

    def evict(self, instance: SlottedInstance) -> list[Sequence]:
        """Forgets every sequence of the instance; its slots are free."""
        evicted = list(instance.sequences())
        for sequence in evicted:
            if not sequence.is_closed:
                self._lost[sequence.id] = None
            self.forget(sequence)
        while len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        return evicted

    def is_lost(self, id: CorrelationId) -> bool:
        """Whether a sequence of this id lost its instance and was not started again since."""
        return id in self._lost

    def add(self, request: QueuedRequest, starts: bool, ends: bool) -> bool:
        """Takes a request into its sequence; False where that was not started (and this does not start it)."""
        sequence = self._open.get(request.correlation_id)
        if not starts and (sequence is None or sequence.is_closed):
            return False
        if sequence is None:
            self._lost.pop(request.correlation_id, None)
            sequence = self._open[request.correlation_id] = Sequence(request.correlation_id)
            self._backlog[sequence] = None
        self._idle.pop(sequence, None)
        sequence.queue.append(request)
        self.waiting += 1
        sequence.last_us = request.enqueued_us
        # A new sequence of the same id, whose predecessor still has requests to run, goes on in its slot after them.
        sequence.is_closed = ends
        if sequence.instance is not None and not sequence.is_busy:
            sequence.instance.ready[sequence] = None
        return True

    def settle(self, now_us: int) -> int | None:
        """Frees slots that were idle for too long, gives free ones to the backlog; when to call again (None: no need)."""
        wake_at_us: int | None = None
        for sequence in list(self._idle):
            due_us = sequence.last_us + self._idle_us
            if due_us > now_us:
                wake_at_us = due_us
                break
            self.forget(sequence)
        while self._backlog and self.instances:
            instance = max(self.instances.values(), key=lambda instance: len(instance.free))
            if not instance.free:
                break
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            slot = heappop(instance.free)
            instance.slots[slot] = sequence
            sequence.instance, sequence.slot = instance, slot
            instance.ready[sequence] = None
        return wake_at_us

    def take(self, sequence: Sequence) -> QueuedRequest:
        """The sequence's next request, which runs from now on. After its last one the slot is free at once."""
        request = sequence.queue.popleft()
        self.waiting -= 1
        assert sequence.instance is not None  # noqa: S101 - only sequences with a slot are ready
        del sequence.instance.ready[sequence]
        sequence.is_busy = True
        if sequence.is_closed and not sequence.queue:
            self.forget(sequence)
        return request

    def ran(self, sequence: Sequence, now_us: int) -> None:
        """The request that was taken has ended."""
        sequence.is_busy = False
        if sequence.instance is None:
            return
        if sequence.queue:
            sequence.instance.ready[sequence] = None
        else:
            sequence.last_us = now_us
            self._idle[sequence] = None

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over: what comes for its id belongs to another. Its queue is the caller's to answer."""
        self.waiting -= len(sequence.queue)
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        self._backlog.pop(sequence, None)
        self._idle.pop(sequence, None)
        self._leave_slot(sequence)

    def drain_backlog(self) -> list[QueuedRequest]:
        """Forgets the sequences that have no slot; their requests, in order."""
        waiting = list(self._backlog)
        for sequence in waiting:
            self.forget(sequence)
        return [request for sequence in waiting for request in sequence.queue]

    def holds(self, worker: str) -> bool:
        """Whether an instance of `worker` has a sequence."""
        return any(
            next(instance.sequences(), None) is not None for (of, _), instance in self.instances.items() if of == worker
        )

    def backlog(self) -> list[Sequence]:
        """The sequences without a slot, first come first."""
        return list(self._backlog)

    def sequences(self) -> list[Sequence]:
        """Every sequence that has a slot or waits for one."""
        held = [sequence for instance in self.instances.values() for sequence in instance.sequences()]
        return [*held, *self._backlog]

    def _leave_slot(self, sequence: Sequence) -> None:
        instance = sequence.instance
        if instance is not None:
            instance.slots[sequence.slot] = None
            heappush(instance.free, sequence.slot)
            instance.ready.pop(sequence, None)
            sequence.instance = None
