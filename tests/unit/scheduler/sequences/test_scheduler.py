"""`SequenceScheduler` under random events: order, place, the right state, and exactly one end for every request.

`WEIR_SIMULATIONS` says how many lives are tried, and `-s` shows how many events they had: see `test_model_simulation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduling.completions import Outcome, completion
from tests.support.scheduling.requests import CONFIGS, CountingFrame, requests_in_memory
from tests.support.scheduling.sequences import IDLE_US, SLOTS, Life, ReconfiguredLife
from tests.unit.scheduler.test_model_simulation import LIVES
from weir.scheduler.batching.outcome import Failure
from weir.scheduler.batching.request import requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.sequences.sequence import MAX_REPLAY_BYTES, ReplayBudget
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.batches import NO_REPLY, BatchEnded, StartedSequence
from weir.schemas.wire.calls import RequestEnvelope
from weir.schemas.wire.registry import MAX_INSTANCES

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
    st.tuples(st.just("complete"), st.integers(0, 9), st.sampled_from([0, 0, 0, 0, 1, 3]), st.integers(0, 7)),
    st.tuples(st.just("complete"), st.integers(0, 9), st.just(0), st.just(0)),
    st.tuples(st.just("advance"), st.sampled_from([1, 60, 600])),
    st.tuples(st.just("instances"), st.sampled_from("ab"), st.integers(0, 2)),
    st.tuples(st.just("reload"), st.sampled_from("ab"), st.integers(1, 2)),
    st.tuples(st.just("update"), st.sampled_from("ab"), st.integers(0, 7), st.integers(0, 2)),
    st.tuples(st.just("lose"), st.sampled_from("ab"), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)
EVENTS = st.one_of(st.lists(EVENT, max_size=30), st.lists(EVENT, min_size=40, max_size=120))


@pytest.fixture(scope="module", autouse=True)
def reported() -> Iterator[None]:
    yield
    print(f"\n{EVENTS_TRIED[0]} events")


def live(kind: type[Life], config: ModelConfig, events: list[tuple[Any, ...]]) -> Life:
    life = kind(config)
    for name, *arguments in events:
        EVENTS_TRIED[0] += 1
        getattr(life, name)(*arguments)
        life.react(name)
        assert len(life.model) == len(life.live)
    life.run_out()
    assert len(life.model) == life.model.waiting == 0
    if kind is Life:
        assert life.model.versions()[1].failures["CANCELED"] == life.cancelled
    return life


@settings(max_examples=3 * LIVES, deadline=None)
@given(st.sampled_from(PLAIN), EVENTS)
def test_any_life(config: ModelConfig, events: list[tuple[Any, ...]]) -> None:
    assert live(Life, config, events).moved == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("idle_us", [IDLE_US - 1, IDLE_US])
def test_an_idle_sequence_expires_without_other_events(strategy: dict[str, Any], idle_us: int) -> None:
    life = Life(config(strategy))
    for name, *arguments in [("send", 1, SEQUENCE_START), ("advance", 60), ("complete", 0, 0, 0), ("advance", idle_us)]:
        getattr(life, name)(*arguments)
        life.react(name)
    life.send(1, 0)
    assert len(life.live) == (idle_us < IDLE_US)
    life.run_out()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_started", [True, False])
def test_requests_of_a_cancelled_sequence_count_as_cancelled(strategy: dict[str, Any], is_started: bool) -> None:
    """As Triton counts it: of the direct strategy and the oldest one, in a slot and in the backlog."""
    life = Life(config(strategy))
    if is_started:
        life.send(1, SEQUENCE_START)
        life.advance(60)
        life.pump()
        flags = 0
    else:
        life.instances("a", 0)
        flags = SEQUENCE_START
    life.send(1, flags)
    life.send(1, 0)
    life.cancel(-2)  # the first of the two that wait
    assert len(life.live) == is_started
    assert life.model.versions()[1].failures["CANCELED"] == 2


def test_an_idle_sequence_does_not_keep_its_worker_for_ever() -> None:
    life = Life(PLAIN[2])
    life.send(1, SEQUENCE_START)
    life.pump()
    life.complete(0, Outcome.ANSWERED, 0)
    assert life.model.needs("a", 1)
    life.advance(IDLE_US)
    life.model.expire(life.now_us)
    assert not life.model.needs("a", 1)


@settings(max_examples=4 * LIVES, deadline=None)
@given(st.sampled_from(CHECKPOINTED), EVENTS, st.sampled_from([MAX_REPLAY_BYTES, 5, 0]))
def test_any_life_with_checkpoints(config: ModelConfig, events: list[tuple[Any, ...]], replay_bytes: int) -> None:
    with mock.patch("weir.scheduler.sequences.table.ReplayBudget", return_value=ReplayBudget(replay_bytes)):
        live(Life, config, events)


@settings(max_examples=2 * LIVES, deadline=None)
@given(st.sampled_from(ITERATIVE), EVENTS)
def test_any_life_of_iterative_sequences(config: ModelConfig, events: list[tuple[Any, ...]]) -> None:
    live(Life, config, events)


RECONFIGURED = st.tuples(
    st.just("configure"), st.sampled_from([*CONFIGS[:4], PLAIN[0], CHECKPOINTED[1], ITERATIVE[2], ITERATIVE[3]])
)


@settings(max_examples=2 * LIVES, deadline=None)
@given(st.lists(st.one_of(EVENT, EVENT, EVENT, EVENT, RECONFIGURED), min_size=5, max_size=80))
def test_any_life_of_a_version_that_has_sequences_at_times(events: list[tuple[Any, ...]]) -> None:
    live(ReconfiguredLife, PLAIN[0], events)


def test_a_lost_request_ends_after_its_version_has_become_stateless() -> None:
    """Its sequence could continue from a checkpoint, but the replaced scheduler gets no instance where it could."""
    life = live(
        ReconfiguredLife,
        PLAIN[0],
        [
            ("send", 1, 0),
            ("configure", CHECKPOINTED[1]),
            ("send", 1, 0),
            ("send", 1, SEQUENCE_START),
            ("configure", CONFIGS[0]),
            ("complete", 0, Outcome.UNANSWERED, 0),
        ],
    )
    assert not life.live


def reconfigured(model: ModelScheduler, config: ModelConfig) -> list[Failure]:
    """Gives version 1 another configuration, as after a reload on worker `a`; returns the requests that fail."""
    model.configure(1, config)
    model.set_lifecycle(frozenset(), frozenset(), False)
    _, failures = model.set_instances("a", {1: 1}, {1: [MAX_INSTANCES]})
    return list(failures)


@pytest.mark.parametrize("outcome", [Outcome.ANSWERED, Outcome.UNANSWERED, Outcome.NOT_RUN])
@pytest.mark.parametrize("has_slot", [True, False])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_started_sequences_end_when_their_version_becomes_stateless(every: int, has_slot: bool, outcome: int) -> None:
    """Those that wait fail at once, without `expire`; one that runs ends with its batch."""
    model = ModelScheduler("model")
    model.configure(1, config({"direct": {}}, every))
    model.set_instances("a", {1: 1})
    rows = [RequestEnvelope(key, -1, 1, "", 0, 0, 0, 5, flags, "", b"") for key, flags in ((1, SEQUENCE_START), (2, 0))]
    model.enqueue(requests_of("gateway", rows, 0, CountingFrame()))
    (batch,), _ = model.dispatch(1)
    failures = [] if has_slot else list(model.set_instances("a", {})[1])
    failures += reconfigured(model, CONFIGS[0])
    assert [(request.key, error.message) for request, error in failures] == [
        (2, "the state of sequence 5 of model 'model' was lost with its instance: start the sequence again")
    ]
    completed, failures = model.complete(2, completion(batch.id, outcome, 5))
    assert [request.key for request in completed] == ([1] if outcome == Outcome.ANSWERED else [])
    assert [request.key for request, _ in failures] == ([] if outcome == Outcome.ANSWERED else [1])
    assert len(model) == model.waiting == 0


def test_a_sequence_between_two_slots_ends_when_its_version_becomes_stateless() -> None:
    model = ModelScheduler("model")
    model.configure(1, CHECKPOINTED[0])
    model.set_instances("a", {1: 1})
    row = RequestEnvelope(1, -1, 1, "", 0, 0, 0, 5, SEQUENCE_START, "", b"")
    model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    model.dispatch(1)
    assert not model.worker_lost(2, "a")[1]
    assert model.waiting == 1
    (failure,) = reconfigured(model, CONFIGS[0])
    assert failure.error.code is ErrorCode.UNAVAILABLE
    assert len(model) == model.waiting == 0


def test_a_sequence_that_is_looked_up_ends_when_its_version_becomes_stateless() -> None:
    """Its request would wait for ever: what is found is for the new scheduler, which does not know the sequence."""
    model = ModelScheduler("model")
    model.take_over(0, [StartedSequence(1, 5, 0, 1, "gateway", 1)], is_complete=True)
    model.configure(1, CHECKPOINTED[0])
    model.set_instances("a", {1: 1})
    row = RequestEnvelope(2, -1, 1, "", 0, 0, 0, 5, 0, "", b"")
    assert not model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    assert [sought.id for sought in model.take_sought()] == [5]
    (failure,) = reconfigured(model, CONFIGS[0])
    assert failure.error.code is ErrorCode.UNAVAILABLE
    assert model.sequence_found(1, 5, None) == ((), ())
    assert len(model) == model.waiting == 0


def test_padding_keeps_each_sequence_at_its_row() -> None:
    life = Life(PLAIN[0])
    for sequence in (1, 2, 3):
        life.send(sequence, SEQUENCE_START)
    life.pump()
    life.complete(0, Outcome.ANSWERED, 0)
    life.send(3, 0)
    life.pump()
    (batch,) = life.batches.values()
    assert batch.padding_rows == [0, 1]


def test_a_checkpointed_sequence_goes_on_elsewhere() -> None:
    """With a checkpoint after every second request: the third runs again without a response, then the fourth."""
    life = Life(config({"direct": {}}, every=2))
    for flags in (SEQUENCE_START, 0, 0):
        life.send(1, flags)
        life.pump()
        life.complete(0, Outcome.ANSWERED, 0)
    life.send(1, 0)
    life.pump()
    life.instances("b", 1)
    life.lose("a", has_run=False)
    replays = []
    for _ in range(2):
        life.pump()
        (batch,) = life.batches.values()
        replays.append((batch.requests[0].gateway, batch.requests[0].body, *batch.places[0][1:3]))
        life.complete(0, Outcome.ANSWERED, 0)
    assert replays == [(NO_REPLY, b"3", 2, True), ("gateway", b"4", 3, False)]
    assert not life.live


def test_requests_of_a_lost_sequence_get_an_error_that_names_it() -> None:
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    model.set_instances("a", {1: 1})
    row = RequestEnvelope(1, -1, 1, "", 0, 0, 0, "s", SEQUENCE_START, "", b"")
    model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    model.dispatch(1)
    _, (failure,) = model.worker_lost(2, "a")
    assert failure.error.code is ErrorCode.UNAVAILABLE
    assert failure.error.message == (
        "the state of sequence s of model 'model' was lost with its instance: start the sequence again"
    )


def test_a_request_that_has_run_and_is_sent_again_does_not_run_twice() -> None:
    """Its answer may have gone with the broker, and its gateway sends it again: its effect is in the state already."""
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    model.set_instances("a", {1: 1})
    rows = [
        RequestEnvelope(key, -1, 1, "", 0, 0, 0, 5, flags, "", b"")
        for key, flags in ((7, SEQUENCE_START), (9, 0), (12, 0))
    ]

    def send(row: RequestEnvelope) -> list[Any]:
        return model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))

    for row in rows[:2]:
        assert not send(row)
        (batch,), _ = model.dispatch(1)
        model.complete(2, BatchEnded(batch.id, 5))
    for row in rows[:2]:
        (refused,) = send(row)
        assert refused.error.code is ErrorCode.UNAVAILABLE
        assert refused.error.message == (
            "the response to a request of sequence 5 of model 'model' was lost with the broker: the request has run"
        )
    assert not send(rows[2])
    (batch,), _ = model.dispatch(3)
    assert batch.places[0].number == 2
    model.complete(4, BatchEnded(batch.id, 5))
    assert not model.enqueue(requests_of("other", [rows[0]], 0, CountingFrame()))
    assert len(model) == 1


def test_a_sequence_waits_for_a_slot_no_longer_than_its_timeout() -> None:
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    row = RequestEnvelope(1, -1, 1, "", 0, 100, 0, 5, SEQUENCE_START, "", b"")
    model.enqueue(requests_of("gateway", [row], 0, CountingFrame()))
    assert model.expire(99) == ((), [])
    _, (failure,) = model.expire(100)
    assert failure.error.message == "timeout of the corresponding sequence has been expired"


def test_a_live_sequence_gets_a_slot_before_those_of_other_lanes() -> None:
    life = Life(PLAIN[0])
    for sequence in (1, 2, 7):  # live; they take all slots
        life.send(sequence, SEQUENCE_START)
    life.pump()
    for sequence in (5, 3, 8):  # of a job, an event, live
        life.send(sequence, SEQUENCE_START)
    assert [life.model.waiting_in(lane) for lane in (0, 1, 2)] == [1, 1, 1]
    life.complete(0, Outcome.ANSWERED, 0)
    served: list[int | str] = []
    for ending in (1, 2, 7):
        life.send(ending, SEQUENCE_END)
        life.pump()
        while life.batches:
            served += [request.correlation_id for batch in life.batches.values() for request in batch.requests]
            life.complete(0, Outcome.ANSWERED, 0)
            life.pump()
    assert [id for id in served if id in (3, 5, 8)] == [8, 3, 5]


def test_a_sequence_ends_with_a_cancelled_request() -> None:
    model = ModelScheduler("model")
    model.configure(1, PLAIN[0])
    model.set_instances("a", {1: 1})
    flags = (SEQUENCE_START, 0, 0)
    rows = [RequestEnvelope(key, -1, 1, "", 0, 0, int(key == 2), 5, flags[key - 1], "", b"") for key in (1, 2, 3)]
    model.enqueue(requests_of("gateway", rows, 0, CountingFrame()))
    (batch,), wake_at_us = model.dispatch(1)
    assert wake_at_us == 1_000
    assert model.overdue(999) == ((), ())
    _, failures = model.overdue(1_000)
    assert [(failure.request.key, failure.error.message) for failure in failures] == [
        (2, "Request timeout expired"),
        (3, "the sequence 5 has ended: the timeout of another of its requests expired"),
    ]
    (answered,), _ = model.complete(1_001, BatchEnded(batch.id, 5))
    assert answered.key == 1
    (refused,) = model.enqueue(
        requests_of("gateway", [RequestEnvelope(4, -1, 1, "", 0, 0, 0, 5, 0, "", b"")], 1_002, CountingFrame())
    )
    assert refused.error.code is ErrorCode.INVALID_ARG
    assert len(model) == 0


def test_deadlines_of_requests_that_were_answered_do_not_pile_up() -> None:
    before = requests_in_memory()
    life = Life(PLAIN[0])
    for _ in range(300):
        life.send(1, SEQUENCE_START, left_ms=1_000_000)
        life.pump()
        life.complete(0, Outcome.ANSWERED, 0)
        life.model.versions()[1].overdue(0)
    assert requests_in_memory() - before < 100


def test_a_request_that_kills_workers_fails() -> None:
    life = Life(config({"direct": {}}, every=1))
    life.send(1, SEQUENCE_START)
    for _ in range(4):
        life.pump()
        assert life.live
        life.lose("a", has_run=False)
        life.instances("a", 1)
    assert not life.live
