"""`SequenceTable`: the sequences of a version, and the slots of instances that hold their state.

A sequence is bound to one slot of one instance, where its state is, and returns it after its last request. Without a
free slot it waits in a backlog: first come, first served, live ones before events before the batch lane. A sequence
that has lost its slot and can continue elsewhere waits before all of these. Source: Triton's sequence batcher.

Thousands of sequences are live at once, so handling a request never visits other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count

from weir.scheduler.batching.ordered_queue import NEVER_US
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.sequences.sequence import (
    CorrelationId,
    ReplayBudget,
    SequenceProgress,
    SlottedInstance,
    StatefulSequence,
)
from weir.schemas.core.requests import SEQUENCE_START, Lane
from weir.schemas.wire.batches import SequencePosition

MAX_LOST = 10_000
"""Sequences that ended with their instances and are remembered, to answer requests that still arrive for them."""

QUARANTINE_US = 1_000_000
"""How long an instance that lost its sequences, but whose worker is alive, gets no new ones."""


class SequenceTable:
    """The sequences and slots of one version. Times are microseconds.

    `slots_per_instance` is the number of sequences of an instance, `idle_us` how long a slot is kept for a sequence
    without requests, `checkpoint_every` the number of requests between two checkpoints (0: none). `next_run` numbers
    the sequences that start. No other table of the scheduler may draw the same number, because instances and
    checkpoints identify a sequence by its scheduler and this number.
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
        self._memory = ReplayBudget()
        self._open: dict[CorrelationId, StatefulSequence] = {}
        self._backlogs = tuple(dict[StatefulSequence, None]() for _ in Lane)  # by the lane of the first request
        self._returning: dict[StatefulSequence, None] = {}  # lost their slots and can continue in others
        self._idle: dict[StatefulSequence, None] = {}  # in the order in which they became idle
        self._lost: dict[CorrelationId, None] = {}  # lost with their instances, unknown to callers yet
        # When sequences without a slot (None) have waited too long, and when deadlines of requests pass; stale entries
        # are skipped.
        self._expiries: list[tuple[int, int, StatefulSequence, QueuedRequest | None]] = []
        self._ordered = 0  # numbers drawn for instances and expiries
        self._next_run = next_run or count(1).__next__
        # Instances by the number of their free slots, most first; stale entries are skipped.
        self._offers: list[tuple[int, int, SlottedInstance]] = []
        self._quarantined: dict[SlottedInstance, int] = {}
        self.instances: dict[tuple[str, int], SlottedInstance] = {}
        self.runnable: dict[SlottedInstance, None] = {}  # idle instances with a ready sequence
        self.waiting_in = [0] * len(Lane)  # waiting requests of all sequences, by lane

    @property
    def open_sequences(self) -> int:
        """Sequences that have started and not ended."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Requests in the queues of all sequences."""
        return sum(self.waiting_in)

    def set_instances(self, worker: str, numbers: Collection[int]) -> list[StatefulSequence]:
        """Sets the instances of `worker`; returns the sequences that lost their slots and can not continue."""
        for number in numbers:
            if (worker, number) not in self.instances:
                slots: list[StatefulSequence | None] = [None] * self.slots_per_instance
                instance = SlottedInstance(worker, number, index=self._next_number(), slots=slots)
                self.instances[worker, number] = instance
                self._offer(instance)
        present = frozenset(numbers)
        removed = [key for key in self.instances if key[0] == worker and key[1] not in present]
        lost: list[StatefulSequence] = []
        for key in removed:
            instance = self.instances.pop(key)
            instance.present = False
            self._quarantined.pop(instance, None)
            lost += self.evict(instance)
        return lost

    def evict(self, instance: SlottedInstance) -> list[StatefulSequence]:
        """Frees the slots of an instance that lost its states; returns the sequences that can not continue elsewhere."""
        lost: list[StatefulSequence] = []
        for sequence in list(instance.sequences()):
            if sequence.progress.can_move:
                self._leave_slot(sequence)
                if sequence.queue and sequence.running is None:
                    self._returning[sequence] = None
                continue
            lost.append(sequence)
            self.lose(sequence)
        return lost

    def lose(self, sequence: StatefulSequence) -> None:
        """Ends a sequence that lost its state. The caller answers the requests in its queue."""
        if not sequence.is_closed:
            self._lost[sequence.id] = None
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
        self.forget(sequence)

    def lose_started(self) -> list[StatefulSequence]:
        """Ends all sequences that have had a slot, here or at another scheduler, and returns them.

        The caller answers the requests in their queues.
        """
        started = [sequence for sequence in self._open.values() if sequence not in self._backlogs[sequence.lane]]
        for sequence in started:
            self.lose(sequence)
        return started

    def quarantine(self, instance: SlottedInstance, now_us: int) -> None:
        """Gives the instance, which did not respond, no sequences for a while."""
        if instance.present:
            instance.is_quarantined = True
            self._quarantined[instance] = now_us + QUARANTINE_US

    def has(self, id: CorrelationId) -> bool:
        """Whether a sequence of this id accepts requests."""
        sequence = self._open.get(id)
        return sequence is not None and not sequence.is_closed

    def is_lost(self, id: CorrelationId) -> bool:
        """Whether a sequence of this id was lost with its instance and has not been started again."""
        return id in self._lost

    def has_run(self, request: QueuedRequest) -> bool:
        """Whether the request, which its gateway sent again, has run: running it again would change the state twice."""
        sequence = self._open.get(request.correlation_id)
        return sequence is not None and sequence.has_run(request)

    def find(self, request: QueuedRequest) -> StatefulSequence | None:
        """Returns the sequence of an unfinished request, or None."""
        sequence = self._open.get(request.correlation_id)
        return sequence if sequence is not None and sequence.holds(request) else None

    def add(self, request: QueuedRequest, starts: bool, ends: bool) -> bool:
        """Adds a request to its sequence; returns False if the sequence was not started and this does not start it."""
        sequence = self._open.get(request.correlation_id)
        if sequence in self._idle and sequence.last_us + self.idle_us <= request.enqueued_us:
            self.forget(sequence)  # it expired, but nothing has freed its slot yet
            sequence = None
        if not starts and (sequence is None or sequence.is_closed):
            return False
        if sequence is None:
            self._lost.pop(request.correlation_id, None)
            progress = SequenceProgress(self.checkpoint_every, self._memory)
            sequence = StatefulSequence(request.correlation_id, progress, request.lane)
            self._open[sequence.id] = sequence
            self._backlogs[sequence.lane][sequence] = None
        self._idle.pop(sequence, None)
        sequence.queue.append(request)
        self.waiting_in[request.lane] += 1
        sequence.last_us = request.enqueued_us
        # A new sequence of the same id, whose predecessor still has requests to run, continues in its slot after them.
        sequence.is_closed = ends
        if sequence.running is None:
            self._make_eligible(sequence)
        if sequence.instance is None and request.terms.timeout_us:
            self._note_expiry(request.enqueued_us + request.terms.timeout_us, sequence, None)
        if request.terms.deadline_us:
            self._note_expiry(request.terms.deadline_us, sequence, request)
        return True

    def seek(self, id: CorrelationId, lane: int) -> None:
        """Opens a sequence that started at another scheduler. Its requests wait until `found` or `forget`."""
        sequence = StatefulSequence(id, SequenceProgress(self.checkpoint_every, self._memory), lane)
        sequence.is_sought = True
        self._open[id] = sequence

    def sought(self, id: CorrelationId) -> StatefulSequence | None:
        """Returns the sequence of this id if `seek` has opened it and nothing was found of it yet."""
        sequence = self._open.get(id)
        return sequence if sequence is not None and sequence.is_sought else None

    def found(
        self, sequence: StatefulSequence, origin: tuple[str, int], checkpoint: int, history: list[QueuedRequest]
    ) -> bool:
        """Has a sought sequence continue from a checkpoint and the requests since; returns False if it can not."""
        if not sequence.progress.adopt(self._next_run(), origin, checkpoint, history):
            return False
        sequence.is_sought = False
        if sequence.queue:
            self._make_eligible(sequence)
        else:
            self._idle[sequence] = None
        return True

    def drop_waiting(self, sequence: StatefulSequence, requests: Collection[QueuedRequest]) -> None:
        """Removes waiting requests of a sequence."""
        for request in requests:
            sequence.queue.remove(request)
            self.waiting_in[request.lane] -= 1

    def put_back(self, sequence: StatefulSequence, request: QueuedRequest) -> None:
        """Queues a taken request again before the others of its sequence: to repeat it, or as its next step."""
        sequence.running = None
        sequence.queue.appendleft(request)
        self.waiting_in[request.lane] += 1
        if request.terms.deadline_us:
            self._note_expiry(request.terms.deadline_us, sequence, request)
        self._make_eligible(sequence)

    def assign_slots(self, now_us: int) -> int | None:
        """Ends idle sequences and assigns free slots to waiting ones; returns when to call again (None: no need)."""
        wake_at_us = self.forget_idle(now_us)
        for instance, until_us in list(self._quarantined.items()):
            if until_us > now_us:
                wake_at_us = until_us if wake_at_us is None else min(wake_at_us, until_us)
                continue
            del self._quarantined[instance]
            instance.is_quarantined = False
            self._offer(instance)
        for waiting in (self._returning, *self._backlogs):
            while waiting:
                roomiest = self._instance_with_most_free_slots()
                if roomiest is None:
                    return wake_at_us
                sequence = next(iter(waiting))
                del waiting[sequence]
                self._bind(sequence, roomiest)
        return wake_at_us

    def forget_idle(self, now_us: int) -> int | None:
        """Ends the sequences that were idle for too long; returns when the next one will be (None: none is idle)."""
        while self._idle:
            sequence = next(iter(self._idle))
            idle_at_us = sequence.last_us + self.idle_us
            if idle_at_us > now_us:
                return idle_at_us
            self.forget(sequence)
        return None

    def take(self, sequence: StatefulSequence) -> tuple[QueuedRequest, SequencePosition]:
        """Returns the next request of a ready sequence, which runs from now on, and its place."""
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

    def request_ended(self, sequence: StatefulSequence, now_us: int) -> None:
        """Records that the running request has ended. After the last one the slot is free."""
        sequence.running = None
        if sequence.is_over:
            return
        if sequence.queue:
            self._make_eligible(sequence)
        elif sequence.is_closed:
            self.forget(sequence)
        else:
            sequence.last_us = now_us
            self._idle[sequence] = None

    def batch_began(self, instance: SlottedInstance, batch_id: int) -> None:
        """Records that the instance runs a batch."""
        instance.batch_id = batch_id
        self.runnable.pop(instance, None)

    def batch_ended(self, instance: SlottedInstance) -> None:
        """Records that the instance's batch has ended."""
        instance.batch_id = 0
        if instance.ready and instance.present:
            self.runnable[instance] = None

    def forget(self, sequence: StatefulSequence) -> None:
        """Ends a sequence: later requests of its id belong to another. The caller answers the requests in its queue."""
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

    def drain_backlog(self, arrived_by_us: int = NEVER_US) -> list[QueuedRequest]:
        """Ends the sequences without a slot whose first request arrived by then; returns their requests in order."""
        backlogs = (sequence for backlog in self._backlogs for sequence in backlog)
        waiting = [sequence for sequence in backlogs if _arrival_us(sequence) <= arrived_by_us]
        for sequence in waiting:
            self.forget(sequence)
        return [request for sequence in waiting for request in sequence.queue]

    def drain_returning(self) -> list[StatefulSequence]:
        """Ends the started sequences that wait for another slot, and returns them."""
        waiting = list(self._returning)
        for sequence in waiting:
            self.forget(sequence)
        return waiting

    @property
    def next_expiry_us(self) -> int:
        """When `overdue` will have work if nothing else happens; `NEVER_US` if never."""
        expiries = self._expiries
        while expiries:
            at_us, _, sequence, request = expiries[0]
            if self._may_expire(sequence, request):
                return at_us
            heappop(expiries)
        return NEVER_US

    def overdue(self, now_us: int) -> list[tuple[StatefulSequence, QueuedRequest | None]]:
        """Ends sequences of which a request is late; returns each with that request.

        A request is late if its deadline passed while it waited; None stands for a sequence that waited for a slot
        for longer than a request of it allows.
        """
        found: list[tuple[StatefulSequence, QueuedRequest | None]] = []
        while self.next_expiry_us <= now_us:
            _, _, sequence, request = heappop(self._expiries)
            self.forget(sequence)
            found.append((sequence, request))
        return found

    def holds(self, worker: str) -> bool:
        """Whether an instance of `worker` holds a sequence."""
        return any(
            next(instance.sequences(), None) is not None for (of, _), instance in self.instances.items() if of == worker
        )

    def _make_eligible(self, sequence: StatefulSequence) -> None:
        """Makes a sequence with a waiting request, of which none runs, eligible to run or to get a slot."""
        instance = sequence.instance
        if sequence.is_sought:
            return
        if instance is not None:
            instance.make_ready(sequence)
            if not instance.batch_id:
                self.runnable[instance] = None
        elif sequence not in self._backlogs[sequence.lane]:
            self._idle.pop(sequence, None)
            self._returning[sequence] = None

    def _bind(self, sequence: StatefulSequence, instance: SlottedInstance) -> None:
        slot = heappop(instance.free)
        instance.slots[slot] = sequence
        sequence.instance, sequence.slot = instance, slot
        sequence.progress.move()
        self._offer(instance)
        self._make_eligible(sequence)

    def _leave_slot(self, sequence: StatefulSequence) -> None:
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
        """Records that the number of free slots of an instance has changed."""
        if not (instance.free and instance.present) or instance.is_quarantined:
            return
        heappush(self._offers, (-len(instance.free), instance.index, instance))
        if len(self._offers) > 4 * len(self.instances) + 64:
            self._offers = [(-len(each.free), each.index, each) for each in self.instances.values()]
            heapify(self._offers)

    def _instance_with_most_free_slots(self) -> SlottedInstance | None:
        """Returns the instance with the most free slots, or None."""
        while self._offers:
            free, _, instance = self._offers[0]
            if free and -free == len(instance.free) and instance.present and not instance.is_quarantined:
                return instance
            heappop(self._offers)
        return None

    def _note_expiry(self, at_us: int, sequence: StatefulSequence, request: QueuedRequest | None) -> None:
        heappush(self._expiries, (at_us, self._next_number(), sequence, request))
        if len(self._expiries) > 2 * self.waiting + 64:
            self._expiries = [entry for entry in self._expiries if self._may_expire(*entry[2:])]
            heapify(self._expiries)

    def _may_expire(self, sequence: StatefulSequence, request: QueuedRequest | None) -> bool:
        """Whether the sequence still waits for a slot, or the request still waits."""
        if request is None:
            return sequence in self._backlogs[sequence.lane]
        return not (sequence.is_over or request.is_sent)

    def _next_number(self) -> int:
        self._ordered += 1
        return self._ordered


def _arrival_us(sequence: StatefulSequence) -> int:
    return sequence.queue[0].enqueued_us if sequence.queue else 0
