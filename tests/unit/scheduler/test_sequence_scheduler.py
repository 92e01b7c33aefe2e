"""`SequenceScheduler` under random events: order, place, the right state, and exactly one end for every request.

`WEIR_SIMULATIONS` says how many lives are tried, and `-s` shows how many events they had: see `test_model_simulation`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import CONFIGS
from queued import CountingFrame
from stateful_workers import StatefulWorkers
from test_model_simulation import LIVES

from scheduler.batch import Batch
from scheduler.model_scheduler import ModelScheduler
from scheduler.queued_request import QueuedRequest, requests_of
from scheduler.sequence_progress import MAX_REPLAY_BYTES, ReplayMemory
from scheduler.version_scheduler import TIMEOUT_EXPIRED, Ended
from schemas.errors import ErrorCode
from schemas.messages import NOBODY, BatchOutcome, Part
from schemas.model_config import ModelConfig
from schemas.registry import MAX_INSTANCES
from schemas.requests import SEQUENCE_END, SEQUENCE_START

SLOTS = 3
IDLE_US = 500

EVENTS_TRIED = [0]
"""How many events the random lives have been made of."""


def config(strategy: dict[str, Any], every: int = 0) -> ModelConfig:
    batching = {**strategy, "max_sequence_idle_microseconds": IDLE_US}
    parameters = {"weir_checkpoint_every": {"string_value": str(every)}} if every else {}
    return ModelConfig.model_validate(
        {"name": "model", "max_batch_size": SLOTS, "sequence_batching": batching, "parameters": parameters}
    )


STRATEGIES: list[dict[str, Any]] = [
    {"direct": {}},
    {"direct": {"minimum_slot_utilization": 1.0, "max_queue_delay_microseconds": 50}},
    {"oldest": {"max_candidate_sequences": SLOTS}},
    {"oldest": {"max_candidate_sequences": SLOTS, "preferred_batch_size": [2], "max_queue_delay_microseconds": 50}},
]
PLAIN = [config(strategy) for strategy in STRATEGIES]
CHECKPOINTED = [config(strategy, every) for strategy in STRATEGIES for every in (1, 2, 3)]
ITERATIVE = [config({**strategy, "iterative_sequence": True}, every) for strategy in STRATEGIES for every in (0, 2)]

EVENT = st.one_of(
    st.tuples(
        st.just("send"),
        st.integers(1, 7),
        st.sampled_from([0, 0, SEQUENCE_START, SEQUENCE_END, 3]),
        st.sampled_from([0, 0, 1, 2]),
        st.sampled_from([0, 0, 0, 100, 900]),
    ),
    st.tuples(st.just("send"), st.integers(1, 4), st.sampled_from([0, 0, 0, SEQUENCE_START])),
    st.tuples(st.just("complete"), st.integers(0, 9), st.sampled_from([0, 0, 0, 0, 1]), st.integers(0, 7)),
    st.tuples(st.just("complete"), st.integers(0, 9), st.just(0), st.just(0)),
    st.tuples(st.just("advance"), st.sampled_from([1, 60, 600])),
    st.tuples(st.just("instances"), st.sampled_from("ab"), st.integers(0, 2)),
    st.tuples(st.just("reload"), st.sampled_from("ab"), st.integers(1, 2)),
    st.tuples(st.just("lose"), st.sampled_from("ab"), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)
EVENTS = st.one_of(st.lists(EVENT, max_size=30), st.lists(EVENT, min_size=40, max_size=120))


@pytest.fixture(scope="module", autouse=True)
def told() -> Iterator[None]:
    yield
    print(f"\n{EVENTS_TRIED[0]} events")


class Life:
    """Plays gateways and workers around one model, and checks what it decides."""

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
        self.history: dict[int | str, list[bytes]] = {}  # what a sequence's state must have been made of, by its START
        self.executions: dict[int, int] = defaultdict(int)
        self.moved = 0
        self.keys = 0
        self.counts: dict[str, int] = defaultdict(int)
        self.first = {"a": 0, "b": 0, "last": 0}  # numbers of workers' instances
        self.instances("a", 1)

    def send(self, sequence: int, flags: int, left_ms: int = 0, timeout_us: int = 0) -> None:
        self.keys += 1
        deadline_ms = self.now_us // 1000 + left_ms if left_ms else 0
        id = 0 if self.is_iterative else sequence
        row = Part(self.keys, -1, 1, "", 0, timeout_us, deadline_ms, id, flags, "", b"%d" % self.keys)
        (request,) = requests_of("gateway", [row], self.now_us, CountingFrame())
        self.live[self.keys] = request
        self.end(((), self.model.enqueue([request])))

    def complete(self, number: int, outcome: int, again: int) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(list(self.batches)[number % len(self.batches)])
        rescheduled = []
        if outcome == BatchOutcome.ANSWERED:
            self.workers.run(batch)
            if self.is_iterative:
                rows = [row for row in range(SLOTS) if row not in batch.null_rows]
                rescheduled = [row for row in rows[: len(batch.requests)] if again >> row & 1]
        ended = self.model.complete(self.now_us, batch.id, outcome, 5, rescheduled)
        self.end(ended)
        over = {request.key for request in ended[0]} | {failure.request.key for failure in ended[1]}
        for request in batch.requests:
            assert request.gateway == NOBODY or request.key in over or outcome or rescheduled

    def advance(self, time_us: int) -> None:
        self.now_us += time_us

    def instances(self, worker: str, count: int) -> None:
        self.end(self.model.set_instances(worker, {1: count}, {1: self.first[worker]}))

    def reload(self, worker: str, count: int) -> None:
        self.first[worker] += MAX_INSTANCES
        self.instances(worker, count)

    def lose(self, worker: str, has_run: bool) -> None:
        """Its batches may have been run and answered before it died: nobody was told."""
        for batch_id in self.model.in_flight_on(worker):
            batch = self.batches.pop(batch_id)
            if has_run:
                self.workers.run(batch)
        self.end(self.model.worker_lost(self.now_us, worker))
        self.workers.lose(worker)

    def cancel(self, number: int) -> None:
        if self.live:
            self.end(self.model.cancel("gateway", [list(self.live)[number % len(self.live)]]))

    def end(self, ended: Ended) -> None:
        answered, failures = ended
        for request in answered:
            assert self.live.pop(request.key) is request
        for request, error in failures:
            assert self.live.pop(request.key) is request
            codes = (ErrorCode.INVALID_ARG, ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED, ErrorCode.INTERNAL)
            assert error.code in codes
            deadline_us = request.terms.deadline_us
            assert error.message != TIMEOUT_EXPIRED or 0 < deadline_us <= self.now_us

    def pump(self) -> None:
        self.end(self.model.overdue(self.now_us))
        batches, wake_at_us = self.model.dispatch(self.now_us)
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
            rows = len(batch.requests) + len(batch.null_rows)
            assert rows <= SLOTS
            assert list(batch.null_rows) == sorted(set(batch.null_rows))
            # What each row must find in its slot, when it runs.
            self.workers.expect(batch, [self.expected(request) for request in batch.requests])
            self.batches[batch.id] = batch

    def check_deadlines(self, running: set[QueuedRequest], wake_at_us: int | None) -> None:
        """Nobody waits whose deadline has passed, and the next deadline is waited for."""
        for request in self.live.values():
            if request.terms.deadline_us and request not in running:
                assert self.now_us < request.terms.deadline_us
                assert wake_at_us is not None
                assert wake_at_us <= request.terms.deadline_us

    def check_request(self, request: QueuedRequest, flags: int) -> None:
        if request.gateway == NOBODY:
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
        """The requests whose effect is in the state that this one sees; None for what is checked by its run alone."""
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
                self.complete(0, BatchOutcome.ANSWERED, 0)
            else:
                self.advance(IDLE_US)
        raise AssertionError(f"{len(self.live)} requests never end")


def live(kind: type[Life], config: ModelConfig, events: list[tuple[Any, ...]]) -> Life:
    life = kind(config)
    for name, *arguments in events:
        EVENTS_TRIED[0] += 1
        getattr(life, name)(*arguments)
        life.pump()
        assert len(life.model) == len(life.live)
    life.run_out()
    assert len(life.model) == life.model.waiting == 0
    return life


@settings(max_examples=3 * LIVES, deadline=None)
@given(st.sampled_from(PLAIN), EVENTS)
def test_any_life(config: ModelConfig, events: list[tuple[Any, ...]]) -> None:
    assert live(Life, config, events).moved == 0


@settings(max_examples=4 * LIVES, deadline=None)
@given(st.sampled_from(CHECKPOINTED), EVENTS, st.sampled_from([MAX_REPLAY_BYTES, 5, 0]))
def test_any_life_with_checkpoints(config: ModelConfig, events: list[tuple[Any, ...]], replay_bytes: int) -> None:
    with mock.patch("scheduler.sequences.ReplayMemory", return_value=ReplayMemory(replay_bytes)):
        live(Life, config, events)


@settings(max_examples=2 * LIVES, deadline=None)
@given(st.sampled_from(ITERATIVE), EVENTS)
def test_any_life_of_iterative_sequences(config: ModelConfig, events: list[tuple[Any, ...]]) -> None:
    live(Life, config, events)


class ReconfiguredLife(Life):
    """A version that has sequences, or not, by its configuration of the moment: what comes must end, once, all the same."""

    def configure(self, config: ModelConfig) -> None:
        self.model.configure(1, config)
        self.model.look_ahead(frozenset(), frozenset(), False)
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
            self.end(self.model.complete(self.now_us, batch.id, outcome, 5, range(again)))

    def pump(self) -> None:
        self.end(self.model.overdue(self.now_us))
        batches, _ = self.model.dispatch(self.now_us)
        running = {request for batch in self.batches.values() for request in batch.requests}
        for batch in batches:
            assert not running.intersection(batch.requests)
            assert all(self.live[r.key] is r for r in batch.requests if r.gateway != NOBODY)
            assert batch.instance.worker in self.model.workers()
            self.batches[batch.id] = batch
        assert len(self.model) == len(self.live)

    def run_out(self) -> None:
        super().run_out()
        for batch_id in self.batches:
            self.end(self.model.complete(self.now_us, batch_id, BatchOutcome.ANSWERED, 5))
        self.model.expire(self.now_us)


RECONFIGURED = st.tuples(st.just("configure"), st.sampled_from([*CONFIGS[:4], PLAIN[0], CHECKPOINTED[1], ITERATIVE[2]]))


@settings(max_examples=2 * LIVES, deadline=None)
@given(st.lists(st.one_of(EVENT, EVENT, EVENT, EVENT, RECONFIGURED), min_size=5, max_size=80))
def test_any_life_of_a_version_that_has_sequences_at_times(events: list[tuple[Any, ...]]) -> None:
    live(ReconfiguredLife, PLAIN[0], events)


def test_null_rows_keep_each_sequence_at_its_row() -> None:
    life = Life(PLAIN[0])
    for sequence in (1, 2, 3):
        life.send(sequence, SEQUENCE_START)
    life.pump()
    life.complete(0, BatchOutcome.ANSWERED, 0)
    life.send(3, 0)
    life.pump()
    (batch,) = life.batches.values()
    assert batch.null_rows == [0, 1]


def test_a_checkpointed_sequence_goes_on_elsewhere() -> None:
    """With a checkpoint after every second request: the third is answered to nobody, the fourth is run once more."""
    life = Life(config({"direct": {}}, every=2))
    for flags in (SEQUENCE_START, 0, 0):
        life.send(1, flags)
        life.pump()
        life.complete(0, BatchOutcome.ANSWERED, 0)
    life.send(1, 0)
    life.pump()
    life.instances("b", 1)
    life.lose("a", has_run=False)
    replays = []
    for _ in range(2):
        life.pump()
        (batch,) = life.batches.values()
        replays.append((batch.requests[0].gateway, batch.requests[0].body, *batch.places[0][1:3]))
        life.complete(0, BatchOutcome.ANSWERED, 0)
    assert replays == [(NOBODY, b"3", 2, True), ("gateway", b"4", 3, False)]
    assert not life.live


def test_a_sequence_whose_instance_died_is_told_so() -> None:
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    model.set_instances("a", {1: 1})
    row = Part(1, -1, 1, "", 0, 0, 0, "s", SEQUENCE_START, "", b"")
    model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    model.dispatch(1)
    _, (failure,) = model.worker_lost(2, "a")
    assert failure.error.code is ErrorCode.UNAVAILABLE
    assert failure.error.message == (
        "the state of sequence s of model 'model' was lost with its instance: start the sequence again"
    )


def test_a_sequence_waits_for_a_slot_no_longer_than_its_timeout() -> None:
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    row = Part(1, -1, 1, "", 0, 100, 0, 5, SEQUENCE_START, "", b"")
    model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    assert model.expire(99) == ((), [])
    _, (failure,) = model.expire(100)
    assert failure.error.message == "timeout of the corresponding sequence has been expired"


def test_a_sequence_ends_with_a_request_that_its_caller_waits_for_no_more() -> None:
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    model.set_instances("a", {1: 1})
    flags = (SEQUENCE_START, 0, 0)
    rows = [Part(key, -1, 1, "", 0, 0, int(key == 2), 5, flags[key - 1], "", b"") for key in (1, 2, 3)]
    model.enqueue(requests_of("gateway", rows, 0, CountingFrame(3)))
    (batch,), wake_at_us = model.dispatch(1)
    assert wake_at_us == 1_000
    assert model.overdue(999) == ((), ())
    _, failures = model.overdue(1_000)
    assert [(failure.request.key, failure.error.message) for failure in failures] == [
        (2, "Request timeout expired"),
        (3, "the sequence 5 has ended: the timeout of another of its requests expired"),
    ]
    (answered,), _ = model.complete(1_001, batch.id, BatchOutcome.ANSWERED, 5)
    assert answered.key == 1
    (refused,) = model.enqueue(
        requests_of("gateway", [Part(4, -1, 1, "", 0, 0, 0, 5, 0, "", b"")], 1_002, CountingFrame())
    )
    assert refused.error.code is ErrorCode.INVALID_ARG
    assert len(model) == 0


def test_deadlines_of_requests_that_were_answered_do_not_pile_up() -> None:
    life = Life(PLAIN[0])
    for _ in range(300):
        life.send(1, SEQUENCE_START, left_ms=1_000_000)
        life.pump()
        life.complete(0, BatchOutcome.ANSWERED, 0)
    assert len(life.model.versions()[1]._table._expiries) < 100


def test_a_request_that_kills_workers_is_given_up() -> None:
    life = Life(config({"direct": {}}, every=1))
    life.send(1, SEQUENCE_START)
    for _ in range(4):
        life.pump()
        assert life.live
        life.lose("a", has_run=False)
        life.instances("a", 1)
    assert not life.live
