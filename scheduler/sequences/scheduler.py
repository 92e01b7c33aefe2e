"""`SequenceScheduler`: the batches of a version whose model keeps state between requests.

It replaces `VersionQueue` if the configuration has `sequence_batching`. In addition to its promises:
- the requests of a sequence run on one instance, one after another, in the order of arrival;
- a sequence whose instance is lost ends: each of its requests gets an error that names it, and so do later ones
  until it is started again. It never continues with a foreign state;
- a sequence of a former owner of the queue ends in the same way;
- if states are checkpointed, the sequence continues elsewhere instead: from its last checkpoint, after the requests
  since then have run again without a response.

`SequenceStrategy` chooses which sequences of an instance run together, and at which rows of the batch. Source:
Triton's sequence batcher. *Direct* keeps each sequence at the row of its slot and fills the rows of idle ones before
it with padding; *oldest* takes the ready ones, the oldest first. With `iterative_sequence` a request is a whole
sequence, and runs again as long as its model reschedules it. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.custom_strategy import GuardedStrategy
from weir.scheduler.batching.ordered_queue import NEVER_US
from weir.scheduler.batching.outcome import NOTHING_ENDED, TIMEOUT_EXPIRED, Ended, Failure
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.retry import RetryPolicy, too_many_losses
from weir.scheduler.batching.version import UNAVAILABLE_TIMEOUT_US, Version
from weir.scheduler.sequences.sequence import CorrelationId, SlottedInstance, StatefulSequence
from weir.scheduler.sequences.table import MAX_LOST, SequenceTable
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, Reason, WeirError, invalid, overloaded, unavailable
from weir.schemas.core.request_limits import cancelled_error
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, shown_id
from weir.schemas.wire.batches import NO_REPLY, BatchCompletion, BatchEnded, BatchLost, BatchReleased
from weir.schemas.wire.observation import BatchReason

MAX_WAITING = 100_000
"""Requests of one lane that may wait for one version, of all sequences together."""


TAKEOVER_US = 2_000_000
"""How long a queue may have had no owner: a sequence that was idle for longer before has ended before its owner."""


class FormerSequence(NamedTuple):
    """One of them: the age and the number of its last request, which was request `key` of `gateway`."""

    age_us: int
    number: int
    gateway: str
    key: int


class FormerSequences(NamedTuple):
    """The sequences that a former owner of the queue had when it died.

    `ids` are those that are known, by version and correlation id. `taken_over_us` is when the queue was taken over, None if
    it had no former owner. `is_complete`: it had no other sequences.
    """

    ids: dict[int, dict[CorrelationId, FormerSequence]]
    taken_over_us: int | None
    is_complete: bool


class SoughtSequence(NamedTuple):
    """A sequence to look up: how often its state is checkpointed, and how many requests it has had at least."""

    version: int
    id: CorrelationId
    checkpoint_every: int
    number: int


class FoundSequence(NamedTuple):
    """What is stored of a sequence that started at another scheduler, in run `origin_run` of `origin_scheduler`.

    Its state is checkpointed after `checkpoint` requests, and `requests` have run since, the last one `age_us` ago:
    `last_key` of `last_gateway`.
    """

    origin_scheduler: str
    origin_run: int
    checkpoint: int
    last_gateway: str
    last_key: int
    age_us: int
    requests: Sequence[QueuedRequest]


NO_FORMER_SEQUENCES = FormerSequences({}, None, is_complete=True)
"""The queue had no former owner."""


class SequenceScheduler(Version):
    """Schedules one version of a stateful model. `config` has `sequence_batching`.

    `former` are the sequences of a former owner of the queue, which were lost with it. The other arguments are those of
    `Version`.
    """

    is_stateful = True

    def __init__(  # noqa: PLR0913 - what all versions have, and two of its own
        self,
        version: int,
        config: ModelConfig,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
        retry: RetryPolicy | None = None,
        former: FormerSequences = NO_FORMER_SEQUENCES,
    ) -> None:
        super().__init__(version, next_batch_id, unavailable_timeout_us, retry)
        self._table = SequenceTable(0, 0, next_run=self._next_batch_id)
        self.use_config(config)
        longest_us = self._table.idle_us + TAKEOVER_US
        former_ids = former.ids.get(version, {})
        self._former = {id: former for id, former in former_ids.items() if former.age_us <= longest_us}
        self._sought: list[SoughtSequence] = []
        self._unfound: dict[CorrelationId, None] = {}  # of which nothing was found
        self._taken_over_us = former.taken_over_us
        self._knows_all_former = former.is_complete
        self._own_ids = 0  # ids assigned to iterative sequences so far
        self.is_decoupled = config.is_decoupled

    def use_config(self, config: ModelConfig, strategy: GuardedStrategy | None = None) -> None:
        """Applies a new configuration; sequences have no custom rule. Existing instances keep their number of slots."""
        batching = config.sequence_batching
        assert batching is not None  # noqa: S101 - this class is chosen for such configurations
        self._model = config.name
        self._is_iterative = batching.iterative_sequence
        self._strategy = SequenceStrategy(config)
        self._table.slots_per_instance = self._strategy.slots
        self._table.idle_us = batching.max_sequence_idle_microseconds
        self._table.checkpoint_every = config.checkpoint_every

    @property
    def is_timed(self) -> bool:
        """Whether any waiting request or sequence may become overdue."""
        return self._table.next_expiry_us < NEVER_US

    @property
    def waiting(self) -> int:
        """Requests in the queues of all sequences."""
        return self._table.waiting

    def waiting_in(self, lane: int) -> int:
        """Returns the number of requests of one lane in those queues."""
        return self._table.waiting_in[lane]

    @property
    def open_sequences(self) -> int:  # type: ignore[override]
        """Sequences that have started and not ended."""
        return self._table.open_sequences

    @property
    def instance_count(self) -> int:
        """Instances of all live workers."""
        return len(self._table.instances)

    @property
    def busy_instances(self) -> int:
        """Instances that hold a batch."""
        return len({batch.instance for batch in self._in_flight if not batch.released})

    def workers(self) -> set[str]:
        """Returns the workers that hold an instance."""
        return {worker for worker, _ in self._table.instances}

    def has_sequence(self, id: CorrelationId) -> bool:
        """Whether a sequence with this id accepts requests here, or did at a former owner of the queue."""
        return self._table.has(id) or id in self._former

    def has_lost(self, id: CorrelationId) -> bool:
        """Whether a sequence with this id was lost with its instance."""
        return self._table.is_lost(id)

    def needs(self, worker: str) -> bool:
        """Whether `worker` runs something, holds a sequence, or is the only one that could run what waits."""
        return self._table.holds(worker) or super().needs(worker)

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests to their sequences; returns those that are rejected, by Triton's rules."""
        refused: list[Failure] = []
        waiting_in = self._table.waiting_in
        for request in requests:
            has_room = waiting_in[request.lane] < MAX_WAITING
            error = self._refusal(request) if has_room else overloaded()
            self.refused["queue"] += not has_room
            if error is not None:
                refused.append(Failure(request, error))
        return refused

    def put_back(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests that waited elsewhere."""
        return self.enqueue(requests)

    def drain(self) -> list[QueuedRequest]:
        """Takes out the requests of sequences that have not started; started ones stay bound here."""
        return self._table.drain_backlog()

    def end_sequences(self) -> list[Failure]:
        """Ends all started sequences, even those that could continue elsewhere; returns their waiting requests.

        Running requests end with their batches.
        """
        return list(self._lost((), self._table.lose_started())[1])

    def cancel_running(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Ends the sequences of running requests, which were cancelled."""
        return self.drop_cancelled(requests)

    def drop_cancelled(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Ends the sequences of cancelled requests: later requests would make no sense without them."""
        failures: list[Failure] = []
        for request in requests:
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
        """Returns the batches to send now, and when to call again if nothing else happens (None: never)."""
        wake_at_us = self._table.assign_slots(now_us)
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

    def complete(self, now_us: int, completion: BatchCompletion) -> Ended | None:
        """Handles the end of a batch; returns None if it is not of this version.

        An instance that did not respond has lost the state of all its sequences. An instance that is released while
        its batch goes on gets no other: the next request of a sequence follows the last response to the one before.
        """
        if isinstance(completion, BatchReleased):
            return None if self._in_flight.get(completion.batch_id) is None else NOTHING_ENDED
        batch = self._in_flight.pop(completion.batch_id)
        if batch is None:
            return None
        assert isinstance(batch, SequenceBatch)  # noqa: S101 - this class sends no others
        if not isinstance(completion, BatchEnded):
            return self._instance_lost(now_us, batch)
        self.cost.record(len(batch.requests), max(0, completion.busy_us))
        rescheduled = completion.rescheduled
        repeated = batch.requests_at(rescheduled) if rescheduled and self._is_iterative else ()
        completed: list[QueuedRequest] = []
        failures: list[Failure] = []
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.progress.ended(request)
            if not (sequence.is_over or sequence.instance or sequence.progress.can_move):
                # It lost its slot while the request ran, and the request could not be kept for a replay.
                self._table.lose(sequence)
                failures += self._lost((), [sequence])[1]
            is_replay = request.gateway == NO_REPLY
            if request in repeated and not (is_replay or request.cancelled):
                failures += self._run_again(now_us, request, sequence)
                continue
            if not is_replay:
                sequence.ended = (request.gateway, request.key)
                completed.append(request)
                self.failures["CANCELED"] += request in repeated
            self._table.request_ended(sequence, now_us)
        self._table.batch_ended(batch.instance)
        return completed, failures

    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """Ends the sequences of batches that may or may not have run, because their state is unknown."""
        completed: list[QueuedRequest] = []
        failures: list[Failure] = []
        for batch_id in batch_ids:
            ended = self.complete(now_us, BatchLost(batch_id))
            if ended is not None:
                completed += ended[0]
                failures += ended[1]
        return completed, failures

    def set_instances(self, worker: str, instances: int, numbers: Sequence[int] | None = None) -> list[Failure]:
        """Sets the instances of `worker`, with these `numbers` (default: from 0 on); returns requests that fail.

        Running batches may end, but sequences on removed instances can not continue there.
        """
        numbered = range(instances) if numbers is None else numbers
        failures = list(self._lost((), self._table.set_instances(worker, numbered))[1])
        if self.instance_count:
            self._unserved.renew()
        return failures

    def expire(self, now_us: int) -> list[QueuedRequest]:
        """Takes out requests that waited too long, and ends idle sequences, which would occupy their worker forever."""
        self._table.forget_idle(now_us)
        return super().expire(now_us)

    def _take_arrived_by(self, arrived_by_us: int) -> list[QueuedRequest]:
        return self._table.drain_backlog(arrived_by_us)

    def overdue(self, now_us: int) -> list[Failure]:
        """Ends sequences that waited for a slot longer than a request of theirs allows (`timeout`).

        It also ends those with a request whose deadline passed, as after a cancellation, and those that wait for
        another slot if there will be none.
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
        return self.instance_count == 0 and (self.is_withdrawn or self._unserved.is_over(now_us))

    def _refusal(self, request: QueuedRequest) -> WeirError | None:
        flags = request.sequence_flags
        if self._is_iterative:
            id = request.correlation_id
            if not id or (isinstance(id, int) and id < 0):
                # Negative, unlike callers' ids. A request that waited elsewhere gets a new id, to be unique here.
                flags = SEQUENCE_START
                self._own_ids += 1
                id = -self._own_ids
                request.terms = request.terms._replace(correlation_id=id, sequence_flags=flags)
            flags |= SEQUENCE_END
        elif self._table.has_run(request) or (self._former and self._has_run_before(request)):
            return response_lost(request, self._model)
        if self._table.add(request, bool(flags & SEQUENCE_START), bool(flags & SEQUENCE_END)):
            is_new = flags & SEQUENCE_START and (self._former or self._unfound)
            if is_new and self._table.sought(request.correlation_id) is None:
                self._former.pop(request.correlation_id, None)
                self._unfound.pop(request.correlation_id, None)
            return None
        if self._table.is_lost(request.correlation_id):
            return state_lost(request, self._model)
        may_be_former = request.correlation_id in self._former or self._is_recent(request)
        if may_be_former and self._table.checkpoint_every and request.correlation_id not in self._unfound:
            self._seek(request)
            return None
        return self._not_found(request)

    def _has_run_before(self, request: QueuedRequest) -> bool:
        """Whether the request has run at the former owner: if it starts its sequence, that would begin again unnoticed."""
        former = self._former.get(request.correlation_id)
        return former is not None and former.gateway == request.gateway and request.key <= former.key

    def _is_recent(self, request: QueuedRequest) -> bool:
        """Whether since the takeover no more time has passed than a sequence of the former owner may be idle."""
        if self._taken_over_us is not None and request.enqueued_us - self._taken_over_us > self._table.idle_us:
            self._taken_over_us = None
        return self._taken_over_us is not None

    def _not_found(self, request: QueuedRequest) -> WeirError:
        """The error for a request of a sequence that is not here: the former owner had it, may have had it, or had not."""
        if request.correlation_id in self._former or (not self._knows_all_former and self._is_recent(request)):
            return lost_with_scheduler(request, self._model)
        return not_started(request, self._model)

    def _seek(self, request: QueuedRequest) -> None:
        """Queues a request of a sequence that may continue from its checkpoint, which the shell looks up."""
        id = request.correlation_id
        former = self._former.get(id)
        self._table.seek(id, request.lane)
        self._table.add(request, False, bool(request.sequence_flags & SEQUENCE_END))
        self._sought.append(
            SoughtSequence(self.version, id, self._table.checkpoint_every, former.number if former else 0)
        )

    def take_sought(self) -> list[SoughtSequence]:
        """Returns the sequences to look up, for each of which `sequence_found` is to be called."""
        sought, self._sought = self._sought, []
        return sought

    def sequence_found(self, id: CorrelationId, found: FoundSequence | None) -> list[Failure]:
        """Has a sought sequence continue; None: nothing is stored from which it could. Returns the requests that fail."""
        sequence = self._table.sought(id)
        if sequence is None:
            return []
        longest_us = self._table.idle_us + TAKEOVER_US
        if found is not None and (id in self._former or found.age_us <= longest_us):
            sequence.ended = found.last_gateway, found.last_key
            have_run = [request for request in sequence.queue if sequence.has_run(request)]
            self._table.drop_waiting(sequence, have_run)
            if self._table.found(
                sequence, (found.origin_scheduler, found.origin_run), found.checkpoint, list(found.requests)
            ):
                self._former.pop(id, None)
                return [Failure(request, response_lost(request, self._model)) for request in have_run]
        else:
            have_run = []
        waiting = [*sequence.queue]
        self._table.forget(sequence)
        sequence.queue.clear()
        self._unfound[id] = None
        if len(self._unfound) > MAX_LOST:
            del self._unfound[next(iter(self._unfound))]
        for position, request in enumerate(waiting):
            if request.sequence_flags & SEQUENCE_START:  # it has been started again meanwhile
                lost, again = waiting[:position], waiting[position:]
                break
        else:
            lost, again = waiting, []
        failures = [Failure(request, self._not_found(request)) for request in (*have_run, *lost)]
        return failures + self.enqueue(again)

    def _run_again(self, now_us: int, request: QueuedRequest, sequence: StatefulSequence) -> list[Failure]:
        """Queues a request that its model rescheduled; returns it as failed if its sequence ended meanwhile."""
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
        return [Failure(other, not_started(other, self._model)) for other in rest]

    def _instance_lost(self, now_us: int, batch: SequenceBatch) -> Ended:
        """Handles the loss of the instance that ran the batch: its requests, and all sequences there."""
        instance = batch.instance
        over: list[QueuedRequest] = []
        exhausted: list[QueuedRequest] = []
        for request, sequence in zip(batch.requests, batch.sequences, strict=True):
            sequence.running = None
            if sequence.is_over or self.is_decoupled or not sequence.progress.can_move:
                over.append(request)
                continue
            repeated, _ = self._retry.after_loss([request])
            if not repeated:
                exhausted.append(request)
                self._table.forget(sequence)
                over += sequence.queue
                sequence.queue.clear()
            elif request.gateway != NO_REPLY:
                request.place = self
                self._table.put_back(sequence, request)
            else:
                self._table.request_ended(sequence, now_us)
        lost = self._lost(
            [request for request in (*over, *exhausted) if request.gateway != NO_REPLY], self._table.evict(instance)
        )
        self._table.batch_ended(instance)
        self._table.quarantine(instance, now_us)
        return lost

    def _lost(self, running: Iterable[QueuedRequest], sequences: Iterable[StatefulSequence]) -> Ended:
        over = list(running)
        for sequence in sequences:
            over += sequence.queue
            sequence.queue.clear()
        self.failures["CANCELED"] += sum(request.cancelled for request in over)
        return (), [Failure(request, self._loss(request)) for request in over]

    def _loss(self, request: QueuedRequest) -> WeirError:
        if request.cancelled:
            return cancelled_error()  # a caller may still listen to how its stream of responses ends
        if self._retry.is_exhausted(request):
            return too_many_losses(request)
        return state_lost(request, self._model)

    def _batch(self, instance: SlottedInstance, chosen: list[StatefulSequence]) -> Batch:
        taken = [self._table.take(sequence) for sequence in chosen]
        batch = SequenceBatch(
            self._next_batch_id(),
            self.version,
            instance,
            [request for request, _ in taken],
            self._strategy.padding_rows([sequence.slot for sequence in chosen]),
            [place for _, place in taken],
            sequences=chosen,
        )
        for request in batch.requests:
            request.place = batch.id
        self._table.batch_began(instance, batch.id)
        self._in_flight.add(batch)
        return batch


def not_started(request: QueuedRequest, model: str) -> WeirError:
    """The error if no sequence of this id has started."""
    return invalid(
        f"inference request for sequence {_name(request)} to model '{model}' must specify the START "
        "flag on the first request of the sequence"
    )


def lost_with_scheduler(request: QueuedRequest, model: str) -> WeirError:
    """The error if the sequence was lost with the former owner of the queue, which had its requests in order."""
    return unavailable(
        f"the state of sequence {_name(request)} of model '{model}' was lost with the scheduler that had it: start the "
        "sequence again",
        Reason.SEQUENCE_LOST,
    )


def state_lost(request: QueuedRequest, model: str) -> WeirError:
    """The error if the sequence's state was lost with its instance."""
    return unavailable(
        f"the state of sequence {_name(request)} of model '{model}' was lost with its instance: start the sequence again",
        Reason.SEQUENCE_LOST,
    )


def response_lost(request: QueuedRequest, model: str) -> WeirError:
    """The error if the request has run but its response was lost; it is not run again."""
    return unavailable(
        f"the response to a request of sequence {_name(request)} of model '{model}' was lost with the broker: "
        "the request has run",
        Reason.NOT_REPEATABLE,
    )


def cancelled_earlier(sequence: StatefulSequence) -> WeirError:
    """The error if an earlier request of the sequence was cancelled."""
    return WeirError(ErrorCode.CANCELLED, f"the sequence {_name(sequence)} was cancelled by an earlier request")


def lateness(request: QueuedRequest, sequence: StatefulSequence, late: QueuedRequest | None, now_us: int) -> WeirError:
    """The error of a request whose sequence ended because `late`, or the sequence itself (None), was late."""
    if late is None:
        return unavailable("timeout of the corresponding sequence has been expired", Reason.SEQUENCE_LOST)
    if 0 < request.terms.deadline_us <= now_us:
        return overloaded(TIMEOUT_EXPIRED, reason=Reason.TIMED_OUT)
    return unavailable(
        f"the sequence {_name(sequence)} has ended: the timeout of another of its requests expired",
        Reason.SEQUENCE_LOST,
    )


def _name(of: QueuedRequest | StatefulSequence) -> int | str:
    """Returns the id as callers know it: the id of an iterative sequence was assigned here and is negative."""
    id = of.correlation_id if isinstance(of, QueuedRequest) else of.id
    return abs(id) if isinstance(id, int) else shown_id(id)


class SequenceBatch(Batch):
    """A batch with the sequence of each of its requests."""

    instance: SlottedInstance
    sequences: Sequence[StatefulSequence] = ()
    reason: BatchReason = BatchReason.SEQUENCE

    def requests_at(self, rows: Iterable[int]) -> list[QueuedRequest]:
        """Returns the requests at these rows, counting padding rows."""
        found: list[QueuedRequest] = []
        for row in rows:
            index = row - sum(padding_row < row for padding_row in self.padding_rows)
            if row not in self.padding_rows and 0 <= index < len(self.requests):
                found.append(self.requests[index])
        return found


class SequenceStrategy:
    """The sequence batching strategy of `config`; an instance has `slots` slots. Times are microseconds."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.sequence_batching
        assert batching is not None  # noqa: S101 - only stateful models have a strategy
        self._max_batch_size = self.slots = max(1, config.max_batch_size)
        self._oldest = batching.oldest
        self._direct = batching.direct
        if self._oldest is not None:
            self.slots = self._oldest.max_candidate_sequences or self._max_batch_size
            self._preferred = frozenset(self._oldest.preferred_batch_size or (self._max_batch_size,))

    def choose(self, instance: SlottedInstance, now_us: int) -> tuple[list[StatefulSequence], int]:
        """Returns the sequences whose next requests run now on the idle instance; or none, and when to call again."""
        alike = instance.first_alike(self._max_batch_size)
        oldest_us = min(sequence.queue[0].enqueued_us for sequence in alike)
        if self._oldest is None:
            wanted = (self._direct.minimum_slot_utilization if self._direct else 0.0) * len(instance.slots)
            due_us = oldest_us + (self._direct.max_queue_delay_microseconds if self._direct else 0)
            is_due = len(alike) >= wanted or now_us >= due_us
            return (sorted(alike, key=lambda sequence: sequence.slot), 0) if is_due else ([], due_us)
        due_us = oldest_us + self._oldest.max_queue_delay_microseconds
        if len(alike) >= max(self._preferred) or now_us >= due_us:
            return alike, 0
        fitting = [size for size in self._preferred if size <= len(alike)]
        return (alike[: max(fitting)], 0) if fitting else ([], due_us)

    def padding_rows(self, slots: Sequence[int]) -> list[int]:
        """Returns the rows without a request in a batch of the sequences in these slots, ascending."""
        if self._oldest is not None or self._max_batch_size == 1:
            return []
        # A model may keep its states by row, so each sequence stays at the row of its slot.
        return [row for row in range(slots[-1]) if row not in slots]
