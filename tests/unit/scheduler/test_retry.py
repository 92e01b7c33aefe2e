from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from queued import keys, request

from scheduler.retry import MAX_ATTEMPTS, RetryPolicy


def test_a_request_is_done_again_then_alone_then_given_up():
    poison, policy = request(key=1), RetryPolicy()
    for attempt in range(1, MAX_ATTEMPTS):
        assert policy.after_loss([poison]) == ([poison], [])
        assert poison.attempts == attempt
        assert (poison.shape_key == "") == (attempt == 1)
    assert policy.after_loss([poison]) == ([], [poison])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20), st.integers(1, 6))
def test_every_request_is_done_again_or_given_up_or_was_cancelled(batch: list[tuple[int, bool]], max_attempts: int):
    requests = [request(key=key) for key in range(len(batch))]
    for made, (attempts, cancelled) in zip(requests, batch, strict=True):
        made.attempts, made.cancelled = attempts, cancelled
    again, given_up = RetryPolicy(max_attempts).after_loss(requests)
    kept = [key for key, (_, cancelled) in enumerate(batch) if not cancelled]
    assert sorted([*keys(again), *keys(given_up)]) == kept
    assert keys(again) == sorted(keys(again))
    assert keys(given_up) == [key for key in kept if batch[key][0] + 1 >= max_attempts]
    assert all(requests[key].attempts == batch[key][0] + 1 for key in kept)
    assert all(requests[key].attempts == batch[key][0] for key in range(len(batch)) if key not in kept)
