"""`SequenceScheduler` under random events: order, place, and exactly one end for every request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from queued import CountingFrame

from scheduler.model_scheduler import ModelScheduler
from scheduler.placement import Instance
from scheduler.queued_request import QueuedRequest, requests_of
from scheduler.version_scheduler import Batch, Ended
from schemas.errors import ErrorCode
from schemas.messages import BatchOutcome, Part
from schemas.model_config import ModelConfig
from schemas.registry import MAX_INSTANCES
from schemas.requests import SEQUENCE_END, SEQUENCE_START

SLOTS = 3
IDLE_US = 500


def config(strategy: dict[str, Any]) -> ModelConfig:
    batching = {**strategy, "max_sequence_idle_microseconds": IDLE_US}
    return ModelConfig.model_validate({"name": "model", "max_batch_size": SLOTS, "sequence_batching": batching})


CONFIGS = [
    config({"direct": {}}),
    config({"direct": {"minimum_slot_utilization": 1.0, "max_queue_delay_microseconds": 50}}),
    config({"oldest": {"max_candidate_sequences": SLOTS}}),
    config(
        {"oldest": {"max_candidate_sequences": SLOTS, "preferred_batch_size": [2], "max_queue_delay_microseconds": 50}}
    ),
]

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 7), st.sampled_from([0, 0, SEQUENCE_START, SEQUENCE_END, 3])),
        st.tuples(st.just("complete"), st.integers(0, 9), st.sampled_from([0, 0, 0, 0, 1])),
        st.tuples(st.just("advance"), st.sampled_from([1, 60, 600])),
        st.tuples(st.just("instances"), st.sampled_from("ab"), st.integers(0, 2)),
        st.tuples(st.just("reload"), st.sampled_from("ab"), st.integers(1, 2)),
        st.tuples(st.just("lose"), st.sampled_from("ab")),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    max_size=80,
)


class Life:
    """Plays gateways and workers around one model, and checks what it decides."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.model = ModelScheduler("model")
        self.model.configure(1, config)
        self.now_us = 1_000
        self.live: dict[int, QueuedRequest] = {}
        self.batches: dict[int, Batch] = {}
        self.sent: dict[int, list[int]] = defaultdict(list)  # keys by sequence, in the order sent to workers
        self.places: dict[int, Instance] = {}  # where a sequence runs, until it ends or is lost
        self.keys = 0
        self.first = {"a": 0, "b": 0, "last": 0}  # numbers of workers' instances
        self.instances("a", 1)

    def send(self, sequence: int, flags: int) -> None:
        self.keys += 1
        row = Part(self.keys, -1, 1, "", 0, 0, 0, sequence, flags, "", b"body")
        (request,) = requests_of("gateway", [row], self.now_us, CountingFrame())
        self.live[self.keys] = request
        self.end(((), self.model.enqueue([request])))

    def complete(self, number: int, outcome: int) -> None:
        if self.batches:
            batch = self.batches.pop(list(self.batches)[number % len(self.batches)])
            self.end(self.model.complete(self.now_us, batch.id, outcome, 5))
            if outcome == BatchOutcome.UNANSWERED:
                self.forget_places(lambda at: at is batch.instance)

    def advance(self, time_us: int) -> None:
        self.now_us += time_us

    def instances(self, worker: str, count: int) -> None:
        first = self.first[worker]
        self.end(self.model.set_instances(worker, {1: count}, {1: first}))
        self.forget_places(lambda at: at.worker == worker and not first <= at.number < first + count)

    def reload(self, worker: str, count: int) -> None:
        self.first[worker] += MAX_INSTANCES
        self.instances(worker, count)

    def lose(self, worker: str) -> None:
        for batch_id in self.model.in_flight_on(worker):
            del self.batches[batch_id]
        self.end(self.model.worker_lost(self.now_us, worker))
        self.forget_places(lambda at: at.worker == worker)

    def cancel(self, number: int) -> None:
        if self.live:
            self.end(self.model.cancel("gateway", [list(self.live)[number % len(self.live)]]))

    def forget_places(self, are_gone: Callable[[Instance], bool]) -> None:
        self.places = {sequence: at for sequence, at in self.places.items() if not are_gone(at)}

    def end(self, ended: Ended) -> None:
        answered, failures = ended
        for request in answered:
            assert self.live.pop(request.key) is request
        for request, error in failures:
            assert self.live.pop(request.key) is request
            assert error.code in (ErrorCode.INVALID_ARG, ErrorCode.UNAVAILABLE, ErrorCode.CANCELLED)

    def pump(self) -> None:
        batches, wake_at_us = self.model.dispatch(self.now_us)
        assert wake_at_us is None or wake_at_us > self.now_us
        running = [r for batch in self.batches.values() for r in batch.requests]
        for batch in batches:
            assert all(running_batch.instance is not batch.instance for running_batch in self.batches.values())
            sequences = [request.correlation_id for request in batch.requests]
            assert len(set(sequences)) == len(sequences) <= SLOTS
            for request in batch.requests:
                assert request not in running
                assert not request.cancelled
                self.check_request(request, batch.instance)
            rows = len(batch.requests) + len(batch.null_rows)
            assert rows <= SLOTS
            assert list(batch.null_rows) == sorted(set(batch.null_rows))
            self.batches[batch.id] = batch

    def check_request(self, request: QueuedRequest, place: Instance) -> None:
        sequence = int(request.correlation_id)
        keys = self.sent[sequence]
        assert not keys or keys[-1] < request.key, "out of order"
        keys.append(request.key)
        if request.sequence_flags & SEQUENCE_START:
            self.places[sequence] = place
        else:
            assert self.places[sequence] is place, "moved, or went on after its state was lost"
        if request.sequence_flags & SEQUENCE_END:
            del self.places[sequence]

    def run_out(self) -> None:
        self.instances("last", 1)
        for _ in range(10_000):
            self.pump()
            if not self.live:
                return
            if self.batches:
                self.complete(0, BatchOutcome.ANSWERED)
            else:
                self.advance(IDLE_US)
        raise AssertionError(f"{len(self.live)} requests never end")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CONFIGS), EVENTS)
def test_any_life(config: ModelConfig, events: list[tuple[Any, ...]]) -> None:
    life = Life(config)
    for name, *arguments in events:
        getattr(life, name)(*arguments)
        life.pump()
        assert len(life.model) == len(life.live)
    life.run_out()
    assert len(life.model) == life.model.waiting == 0


def test_null_rows_keep_each_sequence_at_its_row() -> None:
    life = Life(CONFIGS[0])
    for sequence in (1, 2, 3):
        life.send(sequence, SEQUENCE_START)
    life.pump()
    life.complete(0, BatchOutcome.ANSWERED)
    life.send(3, 0)
    life.pump()
    (batch,) = life.batches.values()
    assert batch.null_rows == [0, 1]


def test_a_sequence_whose_instance_died_is_told_so() -> None:
    model = ModelScheduler("model")
    model.configure(1, CONFIGS[0])
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
    model.configure(1, CONFIGS[0])
    row = Part(1, -1, 1, "", 0, 100, 0, 5, SEQUENCE_START, "", b"")
    model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    assert model.expire(99) == ((), [])
    _, (failure,) = model.expire(100)
    assert failure.error.message == "timeout of the corresponding sequence has been expired"
