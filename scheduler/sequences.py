"""`SequenceTable`: the sequences of a version, and the slots of instances that hold them: who keeps the state of whom.

A sequence is bound to one slot of one instance from the moment it gets it, for that is where its state is, and gives it
back after its last request. One that finds no free slot waits in a backlog, first come, first served, live ones before
events before offline jobs; one that has lost its slot and can go on elsewhere waits before all others. Source: Triton's
sequence batcher.

Thousands of sequences are live at once, so what is done for each request looks at no others than its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count

from scheduler.ordered_queue import NEVER_US
from scheduler.queued_request import QueuedRequest
from scheduler.sequence import CorrelationId, Sequence, SlottedInstance
from scheduler.sequence_progress import ReplayMemory, SequenceProgress
from schemas.lanes import Lane
from schemas.messages import SequencePlace
from schemas.requests import SEQUENCE_START

MAX_LOST = 10_000
"""Sequences that ended with their instances, and are remembered for the sake of what is still sent for them."""

REST_US = 1_000_000
"""How long an instance that has lost its sequences, but not gone with its worker, gets no others."""


class SequenceTable:
    """See the module. Times are microseconds.

    `slots_per_instance` is how many sequences an instance holds; `idle_us` how long a slot is kept for a sequence of
    which nothing comes; `checkpoint_every` after how many requests a sequence's state is checkpointed, 0 for never.
    `next_run` numbers the sequences that begin: no other table of the scheduler may draw the same, for instances and
    checkpoints know a sequence by its scheduler and this number.
    """

    def __init__(
        self,
        slots_per_instance: int,
        idle_us: int,
        checkpoint_every: int = 0,
        next_run: Callable[[], int] | None = None,
    ) -> None:
        self.slots_per_instance = slots_per_instance
        self.idle_us = idle_us
        self.checkpoint_every = checkpoint_every
        self._memory = ReplayMemory()
        self._open: dict[CorrelationId, Sequence] = {}
        self._backlogs = tuple(dict[Sequence, None]() for _ in Lane)  # by the lanes of their first requests
        self._returning: dict[Sequence, None] = {}  # have begun, lost their slots, and can go on in others
        self._idle: dict[Sequence, None] = {}  # in the order in which they became idle
        self._lost: dict[CorrelationId, None] = {}  # ended with their instances, and their callers may not know
        # When sequences without a slot (None) have waited for too long, and when deadlines of requests pass; entries
        # that are not true any more are passed over.
        self._expiries: list[tuple[int, int, Sequence, QueuedRequest | None]] = []
        self._ordered = 0  # instances and expiries so far: a number for each
        self._next_run = next_run or count(1).__next__
        # Instances by the number of their free slots, most first; entries that are not true any more are passed over.
        self._offers: list[tuple[int, int, SlottedInstance]] = []
        self._resting: dict[SlottedInstance, int] = {}
        self.instances: dict[tuple[str, int], SlottedInstance] = {}
        self.runnable: dict[SlottedInstance, None] = {}  # idle, and with a sequence that is ready
        self.waiting_in = [0] * len(Lane)  # requests in the queues of all sequences, by lane

    @property
    def open_sequences(self) -> int:
        """Sequences that have begun and not ended."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Requests in the queues of all sequences."""
        return sum(self.waiting_in)

    def set_instances(self, worker: str, numbers: Collection[int]) -> list[Sequence]:
        """`worker` has these instances now; returns the sequences that lost their slots and can't go on."""
        for number in numbers:
            if (worker, number) not in self.instances:
                instance = SlottedInstance(worker, number, self.slots_per_instance, self._next_number())
                self.instances[worker, number] = instance
                self._offer(instance)
        there = frozenset(numbers)
        gone = [key for key in self.instances if key[0] == worker and key[1] not in there]
        lost: list[Sequence] = []
        for key in gone:
            instance = self.instances.pop(key)
            instance.present = False
            self._resting.pop(instance, None)
            lost += self.evict(instance)
        return lost

    def evict(self, instance: SlottedInstance) -> list[Sequence]:
        """The instance has lost its states: its slots are free. Returns the sequences that can't go on elsewhere."""
        lost: list[Sequence] = []
        for sequence in list(instance.sequences()):
            if sequence.progress.can_move:
                self._leave_slot(sequence)
                if sequence.queue and sequence.running is None:
                    self._returning[sequence] = None
                continue
            lost.append(sequence)
            self.lose(sequence)
        return lost

    def lose(self, sequence: Sequence) -> None:
        """The sequence has lost its state, and can't go on. Its queue is the caller's to answer."""
        if not sequence.is_closed:
            self._lost[sequence.id] = None
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
        self.forget(sequence)

    def rest(self, instance: SlottedInstance, now_us: int) -> None:
        """The instance could not be asked: it gets no sequences for a while."""
        if instance.present:
            instance.is_resting = True
            self._resting[instance] = now_us + REST_US

    def is_lost(self, id: CorrelationId) -> bool:
        """Whether a sequence of this id lost its instance and was not started again since."""
        return id in self._lost

    def has_run(self, request: QueuedRequest) -> bool:
        """Whether the request, which its gateway sent again, has run in its sequence: it would change the state twice."""
        sequence = self._open.get(request.correlation_id)
        return sequence is not None and sequence.has_run(request)

    def find(self, request: QueuedRequest) -> Sequence | None:
        """The sequence that the request, which has not ended, belongs to."""
        sequence = self._open.get(request.correlation_id)
        return sequence if sequence is not None and sequence.holds(request) else None

    def add(self, request: QueuedRequest, starts: bool, ends: bool) -> bool:
        """Takes a request into its sequence; False where that was not started (and this does not start it)."""
        sequence = self._open.get(request.correlation_id)
        if sequence in self._idle and sequence.last_us + self.idle_us <= request.enqueued_us:
            self.forget(sequence)  # also where nothing has happened since that freed its slot
            sequence = None
        if not starts and (sequence is None or sequence.is_closed):
            return False
        if sequence is None:
            self._lost.pop(request.correlation_id, None)
            progress = SequenceProgress(self.checkpoint_every, self._memory)
            sequence = Sequence(request.correlation_id, progress, request.lane)
            self._open[sequence.id] = sequence
            self._backlogs[sequence.lane][sequence] = None
        self._idle.pop(sequence, None)
        sequence.queue.append(request)
        self.waiting_in[request.lane] += 1
        sequence.last_us = request.enqueued_us
        # A new sequence of the same id, whose predecessor still has requests to run, goes on in its slot after them.
        sequence.is_closed = ends
        if sequence.running is None:
            self._wants_to_run(sequence)
        if sequence.instance is None and request.timeout_us:
            self._note_expiry(request.enqueued_us + request.timeout_us, sequence, None)
        if request.terms.deadline_us:
            self._note_expiry(request.terms.deadline_us, sequence, request)
        return True

    def put_back(self, sequence: Sequence, request: QueuedRequest) -> None:
        """The request, which was taken, is to run before the others of its sequence: again, or as its next step."""
        sequence.running = None
        sequence.queue.appendleft(request)
        self.waiting_in[request.lane] += 1
        if request.terms.deadline_us:
            self._note_expiry(request.terms.deadline_us, sequence, request)
        self._wants_to_run(sequence)

    def settle(self, now_us: int) -> int | None:
        """Frees slots that were idle for too long, gives free ones to the backlog; when to call again (None: no need)."""
        wake_at_us = self.forget_idle(now_us)
        for instance, until_us in list(self._resting.items()):
            if until_us > now_us:
                wake_at_us = until_us if wake_at_us is None else min(wake_at_us, until_us)
                continue
            del self._resting[instance]
            instance.is_resting = False
            self._offer(instance)
        for waiting in (self._returning, *self._backlogs):
            while waiting:
                roomiest = self._roomiest()
                if roomiest is None:
                    return wake_at_us
                sequence = next(iter(waiting))
                del waiting[sequence]
                self._bind(sequence, roomiest)
        return wake_at_us

    def forget_idle(self, now_us: int) -> int | None:
        """Ends the sequences that were idle for too long; when the next one will be (None: none is idle)."""
        while self._idle:
            sequence = next(iter(self._idle))
            idle_at_us = sequence.last_us + self.idle_us
            if idle_at_us > now_us:
                return idle_at_us
            self.forget(sequence)
        return None

    def take(self, sequence: Sequence) -> tuple[QueuedRequest, SequencePlace]:
        """The sequence's next request, which runs from now on, and where it stands; it is ready."""
        assert sequence.instance is not None  # noqa: S101 - only sequences with a slot are ready
        sequence.instance.make_unready(sequence)
        request = sequence.next_request
        if request is sequence.queue[0]:
            sequence.queue.popleft()
            self.waiting_in[request.lane] -= 1
        if request.sequence_flags & SEQUENCE_START and request is not sequence.progress.next_replay:
            sequence.progress.begin(self._next_run())
        sequence.running = request
        return request, sequence.progress.place(sequence.slot, request.sequence_flags)

    def ran(self, sequence: Sequence, now_us: int) -> None:
        """The request that was taken has ended. After its last one the slot is free."""
        sequence.running = None
        if sequence.is_over:
            return
        if sequence.queue:
            self._wants_to_run(sequence)
        elif sequence.is_closed:
            self.forget(sequence)
        else:
            sequence.last_us = now_us
            self._idle[sequence] = None

    def began(self, instance: SlottedInstance, batch_id: int) -> None:
        """The instance runs a batch."""
        instance.batch_id = batch_id
        self.runnable.pop(instance, None)

    def is_free(self, instance: SlottedInstance) -> None:
        """The instance's batch has ended."""
        instance.batch_id = 0
        if instance.ready and instance.present:
            self.runnable[instance] = None

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over: what comes for its id belongs to another. Its queue is the caller's to answer."""
        sequence.is_over = True
        sequence.progress.forget()
        for request in sequence.queue:
            self.waiting_in[request.lane] -= 1
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        self._backlogs[sequence.lane].pop(sequence, None)
        self._returning.pop(sequence, None)
        self._idle.pop(sequence, None)
        self._leave_slot(sequence)

    def drain_backlog(self, came_by_us: int = NEVER_US) -> list[QueuedRequest]:
        """Forgets the sequences that have not begun, and whose first request came by then; their requests, in order."""
        backlogs = (sequence for backlog in self._backlogs for sequence in backlog)
        waiting = [sequence for sequence in backlogs if _came_us(sequence) <= came_by_us]
        for sequence in waiting:
            self.forget(sequence)
        return [request for sequence in waiting for request in sequence.queue]

    def drain_returning(self) -> list[Sequence]:
        """Forgets the sequences that have begun and wait for another slot."""
        waiting = list(self._returning)
        for sequence in waiting:
            self.forget(sequence)
        return waiting

    @property
    def next_expiry_us(self) -> int:
        """When `overdue` will have something to do, if nothing else happens; NEVER_US: not at all."""
        expiries = self._expiries
        while expiries:
            at_us, _, sequence, request = expiries[0]
            if self._may_expire(sequence, request):
                return at_us
            heappop(expiries)
        return NEVER_US

    def overdue(self, now_us: int) -> list[tuple[Sequence, QueuedRequest | None]]:
        """Forgets sequences that a request was late for; returns each with that request.

        Those whose deadline has passed while they waited; None where the sequence has waited for a slot for longer than a
        request of it allows.
        """
        found: list[tuple[Sequence, QueuedRequest | None]] = []
        while self.next_expiry_us <= now_us:
            _, _, sequence, request = heappop(self._expiries)
            self.forget(sequence)
            found.append((sequence, request))
        return found

    def holds(self, worker: str) -> bool:
        """Whether an instance of `worker` has a sequence."""
        return any(
            next(instance.sequences(), None) is not None for (of, _), instance in self.instances.items() if of == worker
        )

    def _wants_to_run(self, sequence: Sequence) -> None:
        """A request of the sequence waits, and none of it runs."""
        instance = sequence.instance
        if instance is not None:
            instance.make_ready(sequence)
            if not instance.batch_id:
                self.runnable[instance] = None
        elif sequence not in self._backlogs[sequence.lane]:
            self._idle.pop(sequence, None)
            self._returning[sequence] = None

    def _bind(self, sequence: Sequence, instance: SlottedInstance) -> None:
        slot = heappop(instance.free)
        instance.slots[slot] = sequence
        sequence.instance, sequence.slot = instance, slot
        sequence.progress.move()
        self._offer(instance)
        self._wants_to_run(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        instance = sequence.instance
        if instance is not None:
            instance.slots[sequence.slot] = None
            heappush(instance.free, sequence.slot)
            instance.make_unready(sequence)
            if not instance.ready:
                self.runnable.pop(instance, None)
            sequence.instance = None
            self._offer(instance)

    def _offer(self, instance: SlottedInstance) -> None:
        """The number of its free slots has changed."""
        if not (instance.free and instance.present) or instance.is_resting:
            return
        heappush(self._offers, (-len(instance.free), instance.index, instance))
        if len(self._offers) > 4 * len(self.instances) + 64:
            self._offers = [(-len(each.free), each.index, each) for each in self.instances.values()]
            heapify(self._offers)

    def _roomiest(self) -> SlottedInstance | None:
        """The instance with the most free slots, if any has one."""
        while self._offers:
            free, _, instance = self._offers[0]
            if free and -free == len(instance.free) and instance.present and not instance.is_resting:
                return instance
            heappop(self._offers)
        return None

    def _note_expiry(self, at_us: int, sequence: Sequence, request: QueuedRequest | None) -> None:
        heappush(self._expiries, (at_us, self._next_number(), sequence, request))
        if len(self._expiries) > 2 * self.waiting + 64:
            self._expiries = [entry for entry in self._expiries if self._may_expire(*entry[2:])]
            heapify(self._expiries)

    def _may_expire(self, sequence: Sequence, request: QueuedRequest | None) -> bool:
        """Whether the sequence still waits for a slot, or the request still waits."""
        if request is None:
            return sequence in self._backlogs[sequence.lane]
        return not (sequence.is_over or request.is_sent)

    def _next_number(self) -> int:
        self._ordered += 1
        return self._ordered


def _came_us(sequence: Sequence) -> int:
    return sequence.queue[0].enqueued_us if sequence.queue else 0
