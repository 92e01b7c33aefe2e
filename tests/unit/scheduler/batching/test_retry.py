"""Which requests of lost batches are repeated, and how long requests wait without a worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.retry import MAX_ATTEMPTS, RetryPolicy, UnservedTimeout
from weir.schemas.core.errors import ErrorCode


def test_a_lost_request_is_repeated_then_runs_alone_then_fails():
    poison, policy = request(key=1), RetryPolicy()
    for attempt in range(1, MAX_ATTEMPTS):
        assert policy.after_loss([poison]) == ([poison], [])
        assert poison.attempts == attempt
        assert (poison.shape_key == "") == (attempt == 1)
    again, ((failed, error),) = policy.after_loss([poison])
    assert (again, failed, error.code) == ([], poison, ErrorCode.INTERNAL)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20), st.integers(1, 6))
def test_every_lost_request_is_repeated_fails_or_was_cancelled(batch: list[tuple[int, bool]], max_attempts: int):
    requests = [request(key=key) for key in range(len(batch))]
    for made, (attempts, cancelled) in zip(requests, batch, strict=True):
        made.attempts, made.cancelled = attempts, cancelled
    again, failures = RetryPolicy(max_attempts).after_loss(requests)
    given_up = [failure.request for failure in failures]
    kept = [key for key, (_, cancelled) in enumerate(batch) if not cancelled]
    assert sorted([*keys(again), *keys(given_up)]) == kept
    assert keys(again) == sorted(keys(again))
    assert keys(given_up) == [key for key in kept if batch[key][0] + 1 >= max_attempts]
    assert all(requests[key].attempts == batch[key][0] + 1 for key in kept)
    assert all(requests[key].attempts == batch[key][0] for key in range(len(batch)) if key not in kept)


def test_it_expires_when_unserved_for_the_timeout():
    timeout = UnservedTimeout(100)
    assert not timeout.is_over(5_000)
    assert not timeout.is_over(5_099)
    assert timeout.is_over(5_100)


def test_serving_in_between_restarts_the_timeout():
    timeout = UnservedTimeout(100)
    assert not timeout.is_over(0)
    timeout.renew()
    assert not timeout.is_over(150)
    assert not timeout.is_over(249)
    assert timeout.is_over(250)


def test_a_timeout_of_zero_expires_at_once():
    assert UnservedTimeout(0).is_over(7)
