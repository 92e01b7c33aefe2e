"""`SequenceScheduler`: the batches of a version whose model keeps state between requests.

In the place of a `VersionScheduler` where the configuration has `sequence_batching`. Promises, besides its promises:
- the requests of a sequence run on one instance, one after another, in the order they came;
- a sequence whose instance is lost ends: each of its requests is answered with an error that names it, and what comes
  for it later is refused as not started. It never goes on with a state that is not its own;
- where states are checkpointed, it goes on elsewhere instead: from its last checkpoint, after what ran since has run
  again for nobody.

Which of them run together is the matter of `scheduler.sequence_strategy`. With `iterative_sequence` a request is a whole
sequence, and runs again for as long as its model reschedules it. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from scheduler.batch import Batch, BatchesInFlight
from scheduler.ordered_queue import NEVER_US
from scheduler.patience import Patience
from scheduler.queued_request import QueuedRequest
from scheduler.retry import RetryPolicy
from scheduler.sequence import Sequence as StatefulSequence
from scheduler.sequence import SlottedInstance
from scheduler.sequence_errors import answer_lost, cancelled_earlier, lateness, not_started, state_lost
from scheduler.sequence_strategy import SequenceBatch, SequenceStrategy
from scheduler.sequences import SequenceTable
from scheduler.version_scheduler import (
    GIVEN_UP,
    NOTHING_ENDED,
    UNAVAILABLE_TIMEOUT_US,
    Ended,
    Failure,
)
from schemas.errors import Reason, WeirError, internal, overloaded
from schemas.messages import NOBODY, BatchOutcome
from schemas.model_config import ModelConfig
from schemas.requests import SEQUENCE_END, SEQUENCE_START

MAX_WAITING = 100_000
"""Requests of one lane that may wait for one version, of all sequences together."""


class SequenceScheduler:
    """See the module. `config` has `sequence_batching`; the other arguments are those of `VersionScheduler`.

    `is_heir`: another scheduler had the queue before, and sequences that this one knows nothing of.
    """

    def __init__(
        self,
        version: int,
        config: ModelConfig,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
        is_heir: bool = False,
    ) -> None:
        self.version = version
        self._is_heir = is_heir
        self._next_batch_id = next_batch_id or count(1).__next__
        self._table = SequenceTable(0, 0, next_run=self._next_batch_id)
        self.use_config(config)
        self._patience = Patience(unavailable_timeout_us)
        self._retry = RetryPolicy()
        self._own_ids = 0  # given to iterative sequences so far
        self._in_flight = BatchesInFlight()
        self.is_decoupled = config.is_decoupled  # what may have been seen in part is never done again here
        self.failures = {"REJECTED": 0, "CANCELED": 0}
        self.refused = {"queue": 0, "wait": 0}
        self.served = 0
        self.busy_us = 0
        self.is_given_up = False

    def use_config(self, config: ModelConfig) -> None:
        """From now on the version is configured like this. Instances keep the slots they came with."""
        batching = config.sequence_batching
        assert batching is not None  # noqa: S101 - that is what this class is chosen for
        self._model = config.name
        self._is_iterative = batching.iterative_sequence
        self._strategy = SequenceStrategy(config)
        self._table.slots_per_instance = self._strategy.slots
        self._table.idle_us = batching.max_sequence_idle_microseconds
        self._table.checkpoint_every = config.checkpoint_every

    @property
    def is_timed(self) -> bool:
        """See `VersionScheduler`."""
        return self._table.next_expiry_us < NEVER_US

    @property
    def waiting(self) -> int:
        """Requests in the queues of all sequences."""
        return self._table.waiting

    def waiting_in(self, lane: int) -> int:
        """Requests of one lane in those queues."""
        return self._table.waiting_in[lane]

    @property
    def open_sequences(self) -> int:
        """Sequences that have begun and not ended."""
        return self._table.open_sequences

    @property
    def is_idle(self) -> bool:
        """See `VersionScheduler`."""
        return not (self._in_flight or self.waiting)

    @property
    def staged(self) -> int:
        """Requests that wait at their instance: none, for one batch at a time is sent there."""
        return 0

    @property
    def instance_count(self) -> int:
        """Instances of all live workers."""
        return len(self._table.instances)

    @property
    def busy_instances(self) -> int:
        """See `VersionScheduler`."""
        return len({batch.instance for batch in self._in_flight if not batch.released})

    def workers(self) -> set[str]:
        """Workers that hold an instance."""
        return {worker for worker, _ in self._table.instances}

    def in_flight_on(self, worker: str) -> list[int]:
        """See `VersionScheduler`."""
        return self._in_flight.on(worker)

    def batch(self, batch_id: int) -> Batch | None:
        """See `VersionScheduler`."""
        return self._in_flight.get(batch_id)

    def needs(self, worker: str) -> bool:
        """Whether something runs on `worker`, one of its instances holds a sequence, or others wait for it alone."""
        if self._in_flight.on(worker) or self._table.holds(worker):
            return True
        return bool(self.waiting) and self.workers() <= {worker}

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Requests have come; returns those that are refused, as Triton refuses them."""
        refused: list[Failure] = []
        waiting_in = self._table.waiting_in
        for request in requests:
            has_room = waiting_in[request.lane] < MAX_WAITING
            error = self._refusal(request) if has_room else overloaded()
            self.refused["queue"] += not has_room
            if error is not None:
                refused.append(Failure(request, error))
        return refused

    def put_back(self, requests: Iterable[QueuedRequest]) -> list[Failure]:
        """Requests have come that waited elsewhere."""
        return self.enqueue(list(requests))

    def drain(self) -> list[QueuedRequest]:
        """Takes the requests of sequences that have not begun out of the queue; those that have are bound to stay."""
        return self._table.drain_backlog()

    def drop_cancelled(self, cancelled: Iterable[QueuedRequest]) -> list[Failure]:
        """A cancelled request takes the rest of its sequence with it: what would follow makes no sense without it."""
        failures: list[Failure] = []
        for request in cancelled:
            sequence = self._table.find(request)
            if sequence is None:
                continue
            self._table.forget(sequence)
            rest = [request for request in sequence.queue if not request.cancelled]
            self.failures["CANCELED"] += len(sequence.queue)
            sequence.queue.clear()
            error = cancelled_earlier(sequence)
            failures += [Failure(request, error) for request in rest]
        return failures

    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """See `VersionScheduler`."""
        wake_at_us = self._table.settle(now_us)
        expiry_us = self._table.next_expiry_us
        if expiry_us < NEVER_US and (wake_at_us is None or expiry_us < wake_at_us):
            wake_at_us = expiry_us
        batches: list[Batch] = []
        for instance in list(self._table.runnable):
            chosen, due_us = self._strategy.choose(instance, now_us)
            if chosen:
                batches.append(self._batch(instance, chosen))
            elif wake_at_us is None or due_us < wake_at_us:
                wake_at_us = due_us
        return batches, wake_at_us

    def complete(
        self, now_us: int, batch_id: int, outcome: int, busy_us: int, rescheduled: Sequence[int] = ()
    ) -> Ended | None:
        """See `VersionScheduler`; an instance that did not answer has lost the state of all its sequences.

        One that is released while its batch goes on gets no other: the next request of a sequence comes after the last
        answer to the one before. `rescheduled` are the rows of the batch whose requests run again.
        """
        if outcome == BatchOutcome.RELEASED:
            return None if self._in_flight.get(batch_id) is None else NOTHING_ENDED
        batch = self._in_flight.pop(batch_id)
        if batch is None:
            return None
        assert isinstance(batch, SequenceBatch)  # noqa: S101 - no others are sent here
        if outcome != BatchOutcome.ANSWERED:
            return self._instance_lost(now_us, batch)
        self.served += len(batch.requests)
        self.busy_us += max(0, busy_us)
        again = batch.requests_at(rescheduled) if rescheduled and self._is_iterative else ()
        answered: list[QueuedRequest] = []
        failures: list[Failure] = []
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.progress.ended(request)
            if not (sequence.is_over or sequence.instance or sequence.progress.can_move):
                # It lost its slot while the request ran, which could not be kept for being run again.
                self._table.lose(sequence)
                failures += self._lost((), [sequence])[1]
            is_replay = request.gateway == NOBODY
            if request in again and not (is_replay or request.cancelled):
                failures += self._run_again(now_us, request, sequence)
                continue
            if not is_replay:
                sequence.ended = (request.gateway, request.key)
                answered.append(request)
                self.failures["CANCELED"] += request in again
            self._table.ran(sequence, now_us)
        self._table.is_free(batch.instance)
        return answered, failures

    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """Nobody knows whether these batches ran, so nobody knows the state of their sequences: those end."""
        answered: list[QueuedRequest] = []
        failures: list[Failure] = []
        for batch_id in batch_ids:
            ended = self.complete(now_us, batch_id, BatchOutcome.UNANSWERED, 0)
            if ended is not None:
                answered += ended[0]
                failures += ended[1]
        return answered, failures

    def set_instances(self, worker: str, instances: int, numbers: Sequence[int] | None = None) -> list[Failure]:
        """`worker` holds so many instances now, of these `numbers` (else from 0 on): those it had and has no more are gone.

        What runs on them may end, their sequences can't go on there.
        """
        numbered = range(instances) if numbers is None else numbers
        failures = list(self._lost((), self._table.set_instances(worker, numbered))[1])
        if self.instance_count:
            self._patience.renew()
        return failures

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """`worker` is gone, and with it the state of its sequences."""
        running = self.batches_lost(now_us, self.in_flight_on(worker))
        self._in_flight.forget(worker)
        waiting = self.set_instances(worker, 0)
        return running[0], [*running[1], *waiting]

    def expire(self, now_us: int) -> list[QueuedRequest]:
        """Expires what has waited too long, and ends idle sequences, which would keep their worker for ever."""
        self._table.forget_idle(now_us)
        if not self._is_deserted(now_us):
            return []
        return self.drain() if self.is_given_up else self._table.drain_backlog(self._patience.lost_us(now_us))

    def overdue(self, now_us: int) -> list[Failure]:
        """Ends sequences that have waited for a slot for longer than a request of theirs allows (`timeout`).

        And those with a request that its caller waits for no more, as with a cancelled one, and those that wait for
        another slot when there will be none.
        """
        failures: list[Failure] = []
        for sequence, late in self._table.overdue(now_us):
            requests = [*sequence.queue]
            sequence.queue.clear()
            failures += [Failure(request, lateness(request, sequence, late, now_us)) for request in requests]
        self.failures["REJECTED"] += len(failures)
        if self._is_deserted(now_us):
            failures += self._lost((), self._table.drain_returning())[1]
        return failures

    def _is_deserted(self, now_us: int) -> bool:
        return self.instance_count == 0 and (self.is_given_up or self._patience.is_over(now_us))

    def _refusal(self, request: QueuedRequest) -> WeirError | None:
        flags = request.sequence_flags
        if self._is_iterative:
            id = request.correlation_id
            if not id or (isinstance(id, int) and id < 0):
                # Below zero, where no caller's id is; one that waited elsewhere may have the number of another here.
                flags = SEQUENCE_START
                self._own_ids += 1
                id = -self._own_ids
                request.terms = request.terms._replace(correlation_id=id, sequence_flags=flags)
            flags |= SEQUENCE_END
        elif self._table.has_run(request):
            return answer_lost(request, self._model)
        if self._table.add(request, bool(flags & SEQUENCE_START), bool(flags & SEQUENCE_END)):
            return None
        if self._table.is_lost(request.correlation_id):
            return state_lost(request, self._model)
        return not_started(request, self._model, self._is_heir)

    def _run_again(self, now_us: int, request: QueuedRequest, sequence: StatefulSequence) -> list[Failure]:
        """Its model has rescheduled the request. Returns it where its sequence has gone meanwhile."""
        if sequence.is_over:
            return [Failure(request, state_lost(request, self._model))]
        if now_us - sequence.last_us < self._table.idle_us:
            request.terms = request.terms._replace(sequence_flags=0)
            sequence.last_us = now_us
            request.place = self
            self._table.put_back(sequence, request)
            return []
        self._table.forget(sequence)
        rest = [request, *sequence.queue]
        sequence.queue.clear()
        return [Failure(other, not_started(other, self._model, self._is_heir)) for other in rest]

    def _instance_lost(self, now_us: int, batch: SequenceBatch) -> Ended:
        """The instance is gone that ran the batch: what becomes of its requests, and of all sequences there."""
        instance = batch.instance
        over: list[QueuedRequest] = []
        given_up: list[QueuedRequest] = []
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.running = None
            if sequence.is_over or self.is_decoupled or not sequence.progress.can_move:
                over.append(request)
                continue
            again, _ = self._retry.after_loss([request])
            if not again:
                given_up.append(request)
                self._table.forget(sequence)
                over += sequence.queue
                sequence.queue.clear()
            elif request.gateway != NOBODY:
                request.place = self
                self._table.put_back(sequence, request)
            else:
                self._table.ran(sequence, now_us)
        lost = self._lost(
            [request for request in (*over, *given_up) if request.gateway != NOBODY], self._table.evict(instance)
        )
        self._table.is_free(instance)
        self._table.rest(instance, now_us)
        return lost

    def _lost(self, running: Iterable[QueuedRequest], sequences: Iterable[StatefulSequence]) -> Ended:
        over = list(running)
        for sequence in sequences:
            over += sequence.queue
            sequence.queue.clear()
        failures = [Failure(request, self._loss(request)) for request in over if not request.cancelled]
        cancelled = [request for request in over if request.cancelled]
        self.failures["CANCELED"] += len(cancelled)
        return cancelled, failures

    def _loss(self, request: QueuedRequest) -> WeirError:
        if self._retry.is_given_up(request):
            return internal(GIVEN_UP.format(request.attempts), Reason.KILLED_WORKERS)
        return state_lost(request, self._model)

    def _batch(self, instance: SlottedInstance, chosen: list[StatefulSequence]) -> Batch:
        slots = [sequence.slot for sequence in chosen]
        taken = [self._table.take(sequence) for sequence in chosen]
        batch = SequenceBatch(self._next_batch_id(), self.version, instance, [request for request, _ in taken], chosen)
        batch.places = [place for _, place in taken]
        batch.null_rows = self._strategy.null_rows(slots)
        for request in batch.requests:
            request.place = batch.id
        self._table.began(instance, batch.id)
        self._in_flight.add(batch)
        return batch
