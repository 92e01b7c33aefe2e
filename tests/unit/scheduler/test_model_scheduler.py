from __future__ import annotations

from tests.support.scheduling.requests import CONFIGS, CountingFrame, FormedQueue, config, part, request
from weir.scheduler.batching.dynamic_former import former_for
from weir.scheduler.batching.queue_rules import DEFAULT_MAX_QUEUE_SIZE
from weir.scheduler.batching.request import QueuedRequest, requests_of
from weir.scheduler.model_scheduler import MAX_SUMMARY_BYTES, ModelScheduler
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.wire.batches import BatchEnded, BatchLost

TIMEOUT_US = 1_000


def model_with(*versions: int, served: tuple[int, ...] = ()) -> ModelScheduler:
    model = ModelScheduler("model", unavailable_timeout_us=TIMEOUT_US)
    for version in versions:
        model.configure(version, CONFIGS[0])
    model.set_instances("a", dict.fromkeys(served, 1))
    return model


def sent(model: ModelScheduler, now_us: int = 0) -> list[tuple[int, list[int]]]:
    """(version, keys) of each batch that is dispatched now."""
    return [(batch.version, [r.key for r in batch.requests]) for batch in model.dispatch(now_us)[0]]


def test_requests_for_the_latest_version_run_on_the_latest_that_is_served():
    model = model_with(1, 2, 3, served=(1, 2))
    model.enqueue([request(key=1), request(key=2, version=1)])
    assert sent(model) == [(1, [2]), (2, [1])]


def test_a_version_that_is_not_served_rejects_only_if_it_is_unknown():
    model = model_with(1, 2, served=(1,))
    (refused,) = model.enqueue([request(key=1, version=2), request(key=2, version=7)])
    assert (refused.request.key, refused.error.code) == (2, ErrorCode.NOT_FOUND)
    assert refused.error.message == "Request for unknown model: 'model' version 7 is not found"
    assert len(model) == model.waiting == 1


def test_requests_that_came_before_any_version_run_when_there_is_one():
    model = model_with()
    assert model.enqueue([request(1, key=1), request(1, key=2, version=1), request(1, key=3, version=9)]) == []
    assert model.waiting == 3
    model.configure(1, CONFIGS[0])
    answered, failures = model.set_instances("a", {1: 1})
    assert (answered, [failure.request.key for failure in failures]) == ((), [3])
    assert sent(model, 1) == [(1, [1, 2])]


def test_requests_for_the_latest_version_move_to_a_served_one():
    model = model_with(1, 2, served=(2,))
    model.enqueue([request(now, key=now) for now in range(1, 14)])
    assert sent(model) == [(2, [1, 2, 3, 4]), (2, [5, 6, 7, 8])]
    model.worker_lost(20, "a")
    model.set_instances("b", {1: 1})
    assert sent(model, 20) == [(1, [1, 2, 3, 4]), (1, [5, 6, 7, 8])]
    assert model.expire(10**9) == ((), [])


def test_requests_for_a_version_without_instances_fail_while_others_are_served():
    model = model_with(1, 2, served=(1, 2))
    model.set_instances("a", {1: 1})
    model.enqueue([request(key=1, version=2), request(key=2)])
    assert sent(model) == [(1, [2])]
    assert model.expire(5_000) == ((), [])
    _, (failure,) = model.expire(5_000 + TIMEOUT_US)
    assert (failure.request.key, failure.error.code) == (1, ErrorCode.UNAVAILABLE)
    assert len(model) == 1


def test_without_versions_requests_fail_after_the_timeout():
    model = model_with()
    model.enqueue([request(10**9, key=1)])
    assert model.expire(10**9) == ((), [])
    _, (failure,) = model.expire(10**9 + TIMEOUT_US)
    assert failure.error.message == "Request for unknown model: 'model' has no available versions"
    assert len(model) == 0


def test_a_request_that_is_sent_again_is_run_once_and_ends_both_frames():
    model = model_with(1, served=(1,))
    frames = [CountingFrame(), CountingFrame()]
    for frame in frames:
        assert model.enqueue(requests_of("g", [part(1)], 0, frame)) == []
    (batch,), _ = model.dispatch(0)
    (ended,), _ = model.complete(5, BatchEnded(batch.id, 5))
    ended.frame.requests_ended(1)
    assert [frame.ended for frame in frames] == [1, 1]
    assert len(model) == 0


def test_keys_belong_to_their_gateway():
    model = model_with(1, served=(1,))
    model.enqueue([request(key=1, gateway="g")])
    model.enqueue([request(key=1, gateway="h")])
    assert len(model) == 2
    answered, _ = model.cancel("g", [1, 1])
    assert [(r.gateway, r.key) for r in answered] == [("g", 1)]
    assert model.cancel("nobody", [1]) == ((), ())
    assert len(model) == 1


def test_a_cancelled_request_that_runs_is_left_to_end():
    model = model_with(1, served=(1,))
    model.enqueue([request(key=1, gateway="g")])
    (batch,), _ = model.dispatch(0)
    assert model.cancel("g", [1]) == ([], [])
    assert len(model) == 1
    answered, _ = model.complete(5, BatchEnded(batch.id, 5))
    assert answered == batch.requests
    assert len(model) == 0


def test_another_configuration_of_a_version_changes_how_its_queue_is_batched():
    model = model_with(1)
    model.enqueue([request(key=key) for key in (1, 2)])
    model.configure(1, CONFIGS[3])
    model.set_instances("a", {1: 1})
    assert sent(model) == [(1, [1]), (1, [2])]


SEQUENCES = ModelConfig.model_validate(
    {"name": "model", "max_batch_size": 4, "sequence_batching": {"max_sequence_idle_microseconds": 1_000_000}}
)


def of_sequence(key: int, flags: int = SEQUENCE_START) -> QueuedRequest:
    (made,) = requests_of("gateway", [part(key)._replace(correlation_id=5, sequence_flags=flags)], 0, CountingFrame())
    return made


def test_a_version_that_becomes_stateful_finishes_its_batches():
    model = model_with(1, served=(1,))
    model.enqueue([request(key=key) for key in range(1, 10)])
    assert sent(model) == [(1, [1, 2, 3, 4]), (1, [5, 6, 7, 8])]
    model.configure(1, SEQUENCES)
    _, (failure,) = model.set_instances("a", {1: 1})
    assert (failure.request.key, failure.error.code) == (9, ErrorCode.INVALID_ARG)
    model.enqueue([of_sequence(10)])
    assert sent(model) == [(1, [10])]
    assert model.in_flight_on("a") == [4, 1, 2]  # 3 is the number of the sequence
    assert model.needs("a", 1)
    answered, _ = model.complete(1, BatchEnded(1, 5))
    assert [r.key for r in answered] == [1, 2, 3, 4]
    _, failures = model.complete(1, BatchLost(2, 5))
    assert [failure.request.key for failure in failures] == [5, 6, 7, 8]
    model.complete(2, BatchEnded(4, 5))
    assert model.expire(3) == ((), [])
    assert len(model) == model.waiting == 0


def test_a_version_that_becomes_stateless_runs_the_backlog():
    model = ModelScheduler("model")
    model.configure(1, SEQUENCES)
    model.enqueue([of_sequence(1), of_sequence(2, flags=0)])
    model.set_instances("a", {1: 1})
    assert sent(model) == [(1, [1])]
    model.configure(1, CONFIGS[0])
    _, (failure,) = model.set_instances("a", {1: 1})
    assert (failure.request.key, failure.error.code) == (2, ErrorCode.UNAVAILABLE)
    model.enqueue([request(key=3)])
    assert sent(model) == [(1, [3])]
    assert [[r.key for r in model.complete(1, BatchEnded(batch_id, 5))[0]] for batch_id in (2, 3)] == [
        [1],
        [3],
    ]
    model.enqueue([request(key=4)])
    assert sent(model) == [(1, [4])]


def test_the_wake_time_is_that_of_the_earliest_version():
    model = ModelScheduler("model")
    for version, delay_us in ((1, 500), (2, 200), (3, 900)):
        model.configure(version, config(delay_us))
    model.set_instances("a", {1: 1, 2: 1, 3: 1})
    model.enqueue([request(1_000, version=version) for version in (1, 2, 3)])
    assert model.dispatch(1_000) == ([], 1_200)


def test_the_configuration_chooses_the_rule_of_batches():
    model_config = ModelConfig.model_validate(
        {
            "name": "model",
            "max_batch_size": 8,
            "dynamic_batching": {"preferred_batch_size": [4], "max_queue_delay_microseconds": 70},
        }
    )
    formed = FormedQueue(former_for(model_config))
    formed.enqueue([request(0, key=key) for key in range(1, 6)])
    assert [r.key for r in formed.next_batch(0) or []] == [1, 2, 3, 4]
    assert formed.next_batch(69) is None
    assert formed.ready_at_us() == 70
    assert len(formed.enqueue([request() for _ in range(DEFAULT_MAX_QUEUE_SIZE + 1)])) == 2
    default = FormedQueue(former_for(ModelConfig.model_validate({"name": "model", "max_batch_size": 8})))
    default.enqueue([request(key=1), request(key=2)])
    assert [r.key for r in default.next_batch(0) or []] == [1]


def test_a_version_being_unloaded_is_no_longer_the_latest():
    model = model_with(1, 2, served=(1, 2))
    model.enqueue([request(key=1)])
    model.set_lifecycle(frozenset({2}), frozenset(), False)
    model.set_instances("a", {1: 1, 2: 1})
    model.enqueue([request(key=2), request(key=3, version=2)])
    assert model.needs("a", 2)
    assert sent(model) == [(1, [2]), (2, [1, 3])]
    assert model.needs("a", 2)
    model.complete(5, BatchEnded(2, 5))
    assert not model.needs("a", 2)
    assert model.needs("a", 1)
    assert not model.needs("a", 9)


def test_a_worker_is_not_needed_for_what_another_can_run():
    model = model_with(1, served=(1,))
    model.set_instances("b", {1: 1})
    model.enqueue([request(key=1)])
    assert not model.needs("a", 1)
    model.set_instances("b", {})
    assert model.needs("a", 1)


def test_requests_for_a_withdrawn_model_fail_with_the_frontends_error():
    model = model_with(1)
    model.enqueue([request(key=1), request(key=2, version=1)])
    assert model.expire(0) == ((), [])
    model.set_lifecycle(frozenset(), frozenset({1}), True)
    assert model.has_withdrawn
    _, failures = model.expire(1)
    assert [(failure.request.key, failure.error.code, failure.error.message) for failure in failures] == [
        (1, ErrorCode.NOT_FOUND, "Request for unknown model: 'model' has no available versions"),
        (2, ErrorCode.UNAVAILABLE, "Request for unknown model: 'model' version 1 is not at ready state"),
    ]
    assert len(model) == 0
    model.set_lifecycle(frozenset(), frozenset(), False)
    model.enqueue([request(key=3)])
    assert model.expire(2) == ((), [])


def test_requests_before_any_version_fail_if_the_model_is_withdrawn():
    model = model_with()
    model.enqueue([request(key=1)])
    model.set_lifecycle(frozenset(), frozenset(), True)
    _, (failure,) = model.expire(0)
    assert failure.error.code is ErrorCode.NOT_FOUND


def test_requests_for_the_latest_version_wait_for_a_lost_worker_not_for_a_withdrawn_version():
    model = model_with(1, 2, served=(1,))
    model.set_lifecycle(frozenset(), frozenset({2}), False)
    model.set_instances("a", {1: 1})
    model.worker_lost(0, "a")
    model.enqueue([request(key=1), request(key=2, version=2)])
    _, (failure,) = model.expire(1)
    assert (failure.request.key, failure.error.code) == (2, ErrorCode.UNAVAILABLE)
    model.set_instances("b", {1: 1})
    assert sent(model) == [(1, [1])]


def test_requests_for_the_latest_version_leave_a_withdrawn_one():
    model = model_with(1, 2, served=(1, 2))
    model.worker_lost(0, "a")
    model.enqueue([request(key=1), request(key=2, version=2)])
    model.set_lifecycle(frozenset(), frozenset({2}), False)
    model.set_instances("b", {})
    _, (failure,) = model.expire(1)
    assert (failure.request.key, failure.error.code) == (2, ErrorCode.UNAVAILABLE)
    model.set_instances("b", {1: 1})
    assert sent(model) == [(1, [1])]


def test_a_batch_lost_after_the_last_instance_runs_on_another_version():
    model = model_with(1, 2, served=(1, 2))
    model.enqueue([request(key=1)])
    assert sent(model) == [(2, [1])]
    model.set_instances("a", {1: 1})
    model.complete(5, BatchLost(1))
    assert sent(model) == [(1, [1])]


def test_cancelled_requests_in_flight_are_found_by_batch():
    model = model_with(1, served=(1,))
    model.enqueue([request(key=key) for key in range(1, 20)])
    batches, _ = model.dispatch(0)
    ran = [[r.key for r in batch.requests] for batch in batches]
    assert len(ran) == 2
    model.cancel("gateway", [ran[0][0], ran[1][1], ran[1][0], 19])
    reported = model.cancelled_in_flight("gateway", [ran[0][0], ran[1][1], ran[1][0], 19, 77])
    assert reported == [(batches[0], [ran[0][0]]), (batches[1], [ran[1][0], ran[1][1]])]
    assert model.cancelled_in_flight("gateway", [2]) == []
    assert model.cancelled_in_flight("another", [ran[0][0]]) == []


def step(key: int, version: int, id: int, flags: int = 0) -> QueuedRequest:
    """A request of a sequence that names this version (-1: none)."""
    envelope = part(key)._replace(version=version, correlation_id=id, sequence_flags=flags)
    (made,) = requests_of("gateway", [envelope], 0, CountingFrame())
    return made


def test_a_summary_says_where_each_request_is():
    model = model_with(1, 2, served=(1,))
    assert model.summary(()) == (
        "0 requests; version 1: 1 instances on a, 0 busy, 0 requests in the forming batch; "
        "version 2: 0 instances on no worker, 0 busy, 0 requests in the forming batch"
    )
    model.enqueue([request(key=key) for key in range(1, 10)])
    model.enqueue([request(key=1, gateway="other", lane=2)])
    model.dispatch(0)
    model.cancel("gateway", [2, 9])
    assert model.summary({1}).split("; ")[3:] == [
        "waiting for version 1: 1 batch: other 1",
        "batch 1 on a/0: 4 live: gateway 1 2 (cancelled) 3 4",
        "batch 2 on a/0, which the event formed or ended: 4 live: gateway 5 6 7 8",
    ]


def test_a_summary_of_a_queue_without_versions_and_of_one_with_sequences():
    model = ModelScheduler("model")
    model.enqueue([request(key=1)])
    assert model.summary(()) == "1 requests; waiting for any version: 1 live: gateway 1"
    model.configure(1, ModelConfig.model_validate({"name": "m", "max_batch_size": 1, "sequence_batching": {}}))
    model.set_instances("a", {1: 1})
    rows = [part(key)._replace(correlation_id=7, sequence_flags=SEQUENCE_START * (key == 2)) for key in (2, 3)]
    model.enqueue(requests_of("gateway", rows, 0, CountingFrame()))
    model.dispatch(0)
    assert model.summary({2}).split("; ")[1:3] == [
        "version 1: 1 instances on a, 1 busy, 1 open sequences",
        "waiting for version 1: 1 live: gateway 3",
    ]


def test_a_summary_is_bounded():
    model = ModelScheduler("model")
    model.configure(1, ModelConfig.model_validate({"name": "m"}))
    for worker in range(100):
        model.set_instances(f"worker-{worker}-" + "ü" * 100, {1: 10})
    model.enqueue([request(key=key) for key in range(10_000)])
    model.dispatch(0)
    text = model.summary({})
    assert MAX_SUMMARY_BYTES - 1 <= len(text.encode()) <= MAX_SUMMARY_BYTES
    assert "waiting for version 1: 8000 live: gateway 2000 2001 " in text
    assert " and 7900 more; batch 1 on " in text


def test_a_sequence_stays_on_the_version_that_its_first_request_named():
    model = ModelScheduler("model")
    for version in (1, 2, 3):
        model.configure(version, SEQUENCES)
    model.set_instances("a", {1: 1, 2: 1, 3: 1})
    assert model.enqueue([step(1, 1, 5, SEQUENCE_START), step(2, -1, 5), step(3, -1, 6, SEQUENCE_START)]) == []
    for _ in range(2):
        for batch in model.dispatch(0)[0]:
            assert {(5, 1): 1, (5, 2): 1, (6, 3): 3}[
                batch.requests[0].correlation_id, batch.requests[0].key
            ] == batch.version
            model.complete(1, BatchEnded(batch.id, 5))
    assert model.enqueue([step(4, -1, 5, SEQUENCE_END), step(5, -1, 6)]) == []
    assert sorted(sent(model)) == [(1, [4]), (3, [5])]
    (refused,) = model.enqueue([step(6, -1, 5)])
    assert refused.error.code is ErrorCode.INVALID_ARG, "the sequence has ended"
    (refused,) = model.enqueue([step(7, 2, 6)])
    assert refused.error.code is ErrorCode.INVALID_ARG, "a named version stays"


def test_a_sequence_that_its_version_has_lost_is_reported_as_lost():
    model = ModelScheduler("model")
    for version in (1, 2):
        model.configure(version, SEQUENCES)
    model.set_instances("a", {1: 1, 2: 1})
    model.enqueue([step(1, 1, 5, SEQUENCE_START)])
    (batch,) = model.dispatch(0)[0]
    model.complete(1, BatchEnded(batch.id, 5))
    model.set_instances("a", {2: 1})
    (refused,) = model.enqueue([step(2, -1, 5)])
    assert "lost" in refused.error.message
