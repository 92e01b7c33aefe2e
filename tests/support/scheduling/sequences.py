"""`Life`: gateways and workers around one stateful model, which check the decisions of its scheduler.

`StatefulWorkers` computes the results of the batches with the state in each slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.scheduling.completions import (
    Outcome,
    completion,
)
from tests.support.scheduling.requests import CountingFrame
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.outcome import TIMEOUT_EXPIRED, Ended
from weir.scheduler.batching.request import QueuedRequest, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.placement.instances import Instance
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import NO_REPLY, BatchEnded
from weir.schemas.wire.calls import RequestEnvelope
from weir.schemas.wire.registry import MAX_INSTANCES

SLOTS = 3
IDLE_US = 500


class Life:
    """Simulates gateways and workers around one model, and checks its decisions."""

    forgets_idle = True
    """Whether a sequence that was idle for too long must be gone."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        assert config.sequence_batching is not None
        self.is_iterative = config.sequence_batching.iterative_sequence
        self.model = ModelScheduler("model")
        self.model.configure(1, config)
        self.workers = StatefulWorkers(config.checkpoint_every)
        self.now_us = 1_000
        self.live: dict[int, QueuedRequest] = {}
        self.batches: dict[int, Batch] = {}
        self.sent: dict[int | str, list[int]] = defaultdict(list)  # keys by sequence, in the order sent to workers
        self.history: dict[int | str, list[bytes]] = {}  # the requests that a sequence's state must contain
        self.executions: dict[int, int] = defaultdict(int)
        self.moved = 0
        self.keys = 0
        self.counts: dict[str, int] = defaultdict(int)
        self.cancelled = 0  # requests that ended unanswered because they, or one before them in their sequence, were
        self.wake_at_us: int | None = None
        self.active_us: dict[int | str, int] = {}  # when a request of a sequence came or ended last
        self.first = {"a": 0, "b": 0, "last": 0}  # where the numbers of workers' instances begin in their last load
        self.numbers: dict[str, list[int]] = defaultdict(list)
        self.instances("a", 1)

    def send(self, sequence: int, flags: int, left_ms: int = 0, timeout_us: int = 0) -> None:
        self.keys += 1
        deadline_ms = self.now_us // 1000 + left_ms if left_ms else 0
        id = 0 if self.is_iterative else sequence
        # The first two are live, then come two by events, two by jobs.
        row = RequestEnvelope(
            self.keys, -1, 1, "", 0, timeout_us, deadline_ms, id, flags, "", b"%d" % self.keys, (sequence - 1) // 2 % 3
        )
        (request,) = requests_of("gateway", [row], self.now_us, CountingFrame())
        is_idle = (
            self.forgets_idle
            and not self.is_iterative
            and all(other.correlation_id != id for other in self.live.values())
        )
        is_gone = is_idle and self.now_us - self.active_us.get(id, 0) >= IDLE_US
        self.live[self.keys] = request
        refused = self.model.enqueue([request])
        assert refused or flags & SEQUENCE_START or not is_gone, "it was idle for too long"
        self.active_us[id] = self.now_us
        self.end(((), refused))

    def complete(self, number: int, outcome: int, again: int) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(list(self.batches)[number % len(self.batches)])
        rescheduled = []
        if outcome == Outcome.ANSWERED:
            self.workers.run(batch)
            if self.is_iterative:
                rows = [row for row in range(SLOTS) if row not in batch.padding_rows]
                rescheduled = [row for row in rows[: len(batch.requests)] if again >> row & 1]
        ended = self.model.complete(self.now_us, completion(batch.id, outcome, 5, rescheduled))
        again_requests = [request for row, request in self.rows_of(batch) if row in rescheduled]
        self.end(ended, (ended[0] if outcome else [r for r in ended[0] if r in again_requests]))
        over = {request.key for request in ended[0]} | {failure.request.key for failure in ended[1]}
        for request in batch.requests:
            assert request.gateway == NO_REPLY or request.key in over or outcome or rescheduled

    def rows_of(self, batch: Batch) -> list[tuple[int, QueuedRequest]]:
        rows = [row for row in range(SLOTS + len(batch.padding_rows)) if row not in batch.padding_rows]
        return list(zip(rows, batch.requests, strict=False))

    def advance(self, time_us: int) -> None:
        self.now_us += time_us

    def instances(self, worker: str, count: int) -> None:
        self.number(worker, list(range(self.first[worker], self.first[worker] + count)))

    def number(self, worker: str, numbers: list[int]) -> None:
        self.numbers[worker] = numbers
        self.end(self.model.set_instances(worker, {1: len(numbers)}, {1: numbers}))

    def update(self, worker: str, kept: int, count: int) -> None:
        """In place: instances whose bit is in `kept` stay, and `count` others come."""
        left = [number for at, number in enumerate(self.numbers[worker]) if kept >> at & 1]
        self.first[worker] += MAX_INSTANCES
        self.number(worker, [*left, *range(self.first[worker], self.first[worker] + count)])

    def reload(self, worker: str, count: int) -> None:
        self.first[worker] += MAX_INSTANCES
        self.instances(worker, count)

    def lose(self, worker: str, has_run: bool) -> None:
        """Its batches may have run and been answered before it died, unknown to the scheduler."""
        for batch_id in self.model.in_flight_on(worker):
            batch = self.batches.pop(batch_id)
            if has_run:
                self.workers.run(batch)
        ended = self.model.worker_lost(self.now_us, worker)
        self.end(ended, ended[0])
        self.workers.lose(worker)

    def cancel(self, number: int) -> None:
        if self.live:
            ended = self.model.cancel("gateway", [list(self.live)[number % len(self.live)]])
            self.end(ended, ended[0])

    def end(self, ended: Ended, unanswered: Sequence[QueuedRequest] = ()) -> None:
        """These requests have ended; `unanswered` are those that no worker has answered, for they were cancelled."""
        answered, failures = ended
        assert all(request.cancelled for request in unanswered)
        self.cancelled += len(unanswered) + sum(error.code is ErrorCode.CANCELLED for _, error in failures)
        for request in (*answered, *(failure.request for failure in failures)):
            self.active_us[request.correlation_id] = self.now_us
        for request in answered:
            assert self.live.pop(request.key) is request
        for request, error in failures:
            assert self.live.pop(request.key) is request
            codes = (ErrorCode.INVALID_ARG, ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED, ErrorCode.INTERNAL)
            assert error.code in codes
            deadline_us = request.terms.deadline_us
            assert error.message != TIMEOUT_EXPIRED or 0 < deadline_us <= self.now_us

    def react(self, event: str) -> None:
        """Dispatches where `ServedQueues` does: not when its alarm is silent, nor when nothing waits."""
        if event == "advance":
            is_due = self.wake_at_us is not None and self.wake_at_us <= self.now_us
        else:
            is_due = event not in ("complete", "cancel") or self.model.waiting > 0
        if is_due:
            self.pump()

    def pump(self) -> None:
        self.end(self.model.overdue(self.now_us))
        batches, wake_at_us = self.model.dispatch(self.now_us)
        self.wake_at_us = wake_at_us
        assert wake_at_us is None or wake_at_us > self.now_us
        self.check_deadlines({r for batch in [*self.batches.values(), *batches] for r in batch.requests}, wake_at_us)
        running = [r for batch in self.batches.values() for r in batch.requests]
        busy = {place.run for batch in self.batches.values() for place in batch.places}
        for batch in batches:
            assert all(running_batch.instance is not batch.instance for running_batch in self.batches.values())
            sequences = [request.correlation_id for request in batch.requests]
            assert len(set(sequences)) == len(sequences) == len(batch.places) <= SLOTS
            assert not busy.intersection(place.run for place in batch.places), "one of a sequence at a time"
            for request, place in zip(batch.requests, batch.places, strict=True):
                assert request not in running
                assert not request.cancelled
                self.check_request(request, place.flags)
                self.moved += place.restore
            rows = len(batch.requests) + len(batch.padding_rows)
            assert rows <= SLOTS
            assert list(batch.padding_rows) == sorted(set(batch.padding_rows))
            # The state that each row must find in its slot when it runs.
            self.workers.expect(batch, [self.expected(request) for request in batch.requests])
            self.batches[batch.id] = batch

    def check_deadlines(self, running: set[QueuedRequest], wake_at_us: int | None) -> None:
        """No overdue request waits, and the next deadline is in the wake time."""
        for request in self.live.values():
            if request.terms.deadline_us and request not in running:
                assert self.now_us < request.terms.deadline_us
                assert wake_at_us is not None
                assert wake_at_us <= request.terms.deadline_us

    def check_request(self, request: QueuedRequest, flags: int) -> None:
        if request.gateway == NO_REPLY:
            assert self.config.checkpoint_every > 1
            return
        if self.is_iterative:
            assert flags in ((0, SEQUENCE_START) if request.attempts else (request.sequence_flags,))
            assert flags == SEQUENCE_START or self.executions[request.key]
            self.executions[request.key] += 1
            return
        keys = self.sent[request.correlation_id]
        assert not keys or keys[-1] < request.key or (keys[-1] == request.key and request.attempts), "out of order"
        if flags & SEQUENCE_START:
            self.history[request.correlation_id] = []
        if not (keys and keys[-1] == request.key and not flags & SEQUENCE_START):
            self.history[request.correlation_id].append(request.body)
        keys.append(request.key)

    def expected(self, request: QueuedRequest) -> list[bytes] | None:
        """The requests whose effect is in the state that this one sees; None if only its run is checked."""
        if self.is_iterative:
            return None
        history = self.history[request.correlation_id]
        return history[: history.index(request.body)]

    def run_out(self) -> None:
        self.instances("last", 1)
        for _ in range(10_000):
            self.pump()
            if not self.live:
                return
            if self.batches:
                self.complete(0, Outcome.ANSWERED, 0)
            else:
                self.advance(IDLE_US)
        raise AssertionError(f"{len(self.live)} requests never end")


class ReconfiguredLife(Life):
    """A version whose configuration alternates between stateful and stateless: each request still ends once."""

    forgets_idle = False

    def configure(self, config: ModelConfig) -> None:
        self.model.configure(1, config)
        self.model.set_lifecycle(frozenset(), frozenset(), False)
        for worker in self.first:
            self.instances(worker, self.counts[worker])

    def instances(self, worker: str, count: int) -> None:
        self.counts[worker] = count
        super().instances(worker, count)

    def lose(self, worker: str, has_run: bool) -> None:
        self.counts[worker] = 0
        super().lose(worker, has_run=False)

    def complete(self, number: int, outcome: int, again: int) -> None:
        if self.batches:
            batch = self.batches.pop(list(self.batches)[number % len(self.batches)])
            self.end(self.model.complete(self.now_us, completion(batch.id, outcome, 5, list(range(again)))))

    def pump(self) -> None:
        self.end(self.model.overdue(self.now_us))
        batches, self.wake_at_us = self.model.dispatch(self.now_us)
        running = {request for batch in self.batches.values() for request in batch.requests}
        for batch in batches:
            assert not running.intersection(batch.requests)
            assert all(self.live[r.key] is r for r in batch.requests if r.gateway != NO_REPLY)
            assert batch.instance.worker in self.model.workers()
            self.batches[batch.id] = batch
        assert len(self.model) == len(self.live)

    def run_out(self) -> None:
        super().run_out()
        for batch_id in self.batches:
            self.end(self.model.complete(self.now_us, BatchEnded(batch_id, 5)))
        self.model.expire(self.now_us)


class _State(NamedTuple):
    run: int
    number: int
    made_of: list[bytes]


class StatefulWorkers:
    """The state of a sequence is the bodies of the requests that made it; checkpoints are written `every` so many."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._slots: dict[tuple[Instance, int], _State] = {}
        self._checkpoints: dict[tuple[int, int], _State] = {}
        self._expected: dict[int, list[list[bytes] | None]] = {}

    def expect(self, batch: Batch, states: list[list[bytes] | None]) -> None:
        """The requests of the batch must find states that are made of these."""
        self._expected[batch.id] = states

    def run(self, batch: Batch) -> None:
        """Runs the batch; asserts that each request follows those whose state it finds."""
        for request, place, expected in zip(batch.requests, batch.places, self._expected.pop(batch.id), strict=True):
            where = (batch.instance, place.slot)
            if place.number == 0:
                assert not place.restore
                self._slots[where] = _State(place.run, 0, [])
            elif place.restore:
                state = self._checkpoints[place.run, place.number // self._every % 2]
                assert state.number == place.number, "this checkpoint is not there"
                self._slots[where] = state
            state = self._slots[where]
            assert (state.run, state.number) == (place.run, place.number), "not the state of this sequence"
            assert expected is None or state.made_of == expected
            after = _State(place.run, place.number + 1, [*state.made_of, request.body])
            self._slots[where] = after
            if self._every and after.number % self._every == 0:
                self._checkpoints[place.run, after.number // self._every % 2] = after

    def lose(self, worker: str) -> None:
        """The worker is gone, and so are its states."""
        self._slots = {where: state for where, state in self._slots.items() if where[0].worker != worker}
