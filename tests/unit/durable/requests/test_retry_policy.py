"""What becomes of durable requests after each try, on a made-up clock."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weir.calls import in_flight
from weir.calls.error_classes import ErrorClass
from weir.calls.in_flight import InFlight
from weir.durable.requests.retry_policy import (
    FIRST_DELAY_MS,
    MAX_DELAY_MS,
    MAX_HISTORY,
    UNKNOWN_MODEL_TIMEOUT_MS,
    AttemptHistory,
    DurableRetryPolicy,
    classify_attempt,
    retry_delay_ms,
)
from weir.schemas.core.errors import (
    ErrorCode,
    Reason,
    WeirError,
    internal,
    invalid,
    not_found,
    overloaded,
    queue_full,
    unavailable,
)
from weir.schemas.wire.terminal import Outcome

ACCEPTED_MS = 1_800_000_000_000
NOBODYS = overloaded()
PASSING = unavailable("CUDA out of memory")
UNKNOWN = not_found("Request for unknown model: 'm' is not found", Reason.UNKNOWN_MODEL)


def trials(**more: int) -> AttemptHistory:
    return AttemptHistory("id", ACCEPTED_MS, **more)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NOBODYS, ErrorClass.SERVER),
        (unavailable("", Reason.NOT_READY), ErrorClass.SERVER),
        (not_found("", Reason.NOT_READY), ErrorClass.SERVER),
        (unavailable("", Reason.STOPPING), ErrorClass.SERVER),
        (unavailable("", Reason.BROKER_AWAY), ErrorClass.SERVER),
        (unavailable("", Reason.BROKER_FULL), ErrorClass.SERVER),
        (UNKNOWN, ErrorClass.UNKNOWN_MODEL),
        (not_found("Unable to find shared memory region: 'r'"), ErrorClass.FINAL),
        (PASSING, ErrorClass.TRANSIENT),
        (overloaded("Request timeout expired", reason=Reason.TIMED_OUT), ErrorClass.TRANSIENT),
        (unavailable("the model's worker was lost while it was streaming the response"), ErrorClass.TRANSIENT),
        (queue_full("other", "it is"), ErrorClass.TRANSIENT),
        (internal("", Reason.KILLED_WORKERS), ErrorClass.POISON),
        (internal("Traceback"), ErrorClass.FINAL),
        (unavailable("", Reason.SEQUENCE_LOST), ErrorClass.FINAL),
        (unavailable("", Reason.NOT_REPEATABLE), ErrorClass.FINAL),
        # A model may say what it likes.
        (unavailable("Exceeds maximum queue size"), ErrorClass.TRANSIENT),
        (unavailable("the server is stopping"), ErrorClass.TRANSIENT),
        (unavailable("start the sequence again"), ErrorClass.TRANSIENT),
        (not_found("Request for unknown model: 'm' is not found"), ErrorClass.FINAL),
        (internal("died 4 times while running this request"), ErrorClass.FINAL),
        (WeirError(ErrorCode.CANCELLED, "Request Cancelled"), ErrorClass.CANCELLED),
        (WeirError(ErrorCode.UNKNOWN, "out of luck"), ErrorClass.FINAL),
    ],
)
def test_classes_of_errors(error: WeirError, kind: ErrorClass) -> None:
    assert classify_attempt(ACCEPTED_MS, error, trials()) is kind


def test_a_full_gateway_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_IN_FLIGHT", 0)
    with pytest.raises(WeirError) as refused:
        InFlight().check_room()
    assert classify_attempt(ACCEPTED_MS, refused.value, trials()) is ErrorClass.SERVER


def test_an_answer_is_success_also_after_the_deadline() -> None:
    mine = trials(deadline_ms=ACCEPTED_MS + 5)
    assert DurableRetryPolicy(3).after(ACCEPTED_MS + 9, None, mine).outcome is Outcome.SUCCEEDED
    assert mine.attempts == 1


def test_what_passes_is_tried_again_a_number_of_times() -> None:
    policy, mine, now_ms, waited = DurableRetryPolicy(4), trials(), ACCEPTED_MS, []
    while (decision := policy.after(now_ms, PASSING, mine)).outcome is None:
        waited.append(decision.at_ms - now_ms)
        now_ms = decision.at_ms
    assert (decision.outcome, mine.attempts) == (Outcome.DEAD_LETTERED, 4)
    assert decision.reason == "gave up after 4 attempts: CUDA out of memory"
    assert [round(wait / 100 / 2**number) for number, wait in enumerate(waited)] == [1, 1, 1]
    assert [attempt.reason for attempt in mine.history] == ["CUDA out of memory"] * 4


def test_what_is_nobodys_fault_is_tried_again_for_ever_and_does_not_count() -> None:
    policy, mine, now_ms = DurableRetryPolicy(1), trials(), ACCEPTED_MS
    for _ in range(1000):
        decision = policy.after(now_ms, NOBODYS, mine)
        assert decision.outcome is None
        assert FIRST_DELAY_MS * 0.75 - 1 <= decision.at_ms - now_ms <= MAX_DELAY_MS
        now_ms = decision.at_ms
    assert (mine.attempts, len(mine.history)) == (0, 1)
    assert mine.history[0].ended_ms > ACCEPTED_MS + 900 * MAX_DELAY_MS * 0.75
    assert policy.after(now_ms, PASSING, mine).outcome is Outcome.DEAD_LETTERED
    assert (mine.attempts, mine.waits, len(mine.history)) == (1, 0, 2)


def test_a_model_may_be_unknown_for_some_time() -> None:
    policy, mine, now_ms = DurableRetryPolicy(5), trials(), ACCEPTED_MS
    while (decision := policy.after(now_ms, UNKNOWN, mine)).outcome is None:
        assert decision.at_ms <= ACCEPTED_MS + UNKNOWN_MODEL_TIMEOUT_MS + FIRST_DELAY_MS
        now_ms = decision.at_ms
    assert (decision.outcome, mine.attempts) == (Outcome.DEAD_LETTERED, 0)
    assert UNKNOWN_MODEL_TIMEOUT_MS <= now_ms - ACCEPTED_MS <= UNKNOWN_MODEL_TIMEOUT_MS + FIRST_DELAY_MS
    assert (
        DurableRetryPolicy(5, unknown_model_timeout_ms=0).after(now_ms, UNKNOWN, trials()).outcome
        is Outcome.DEAD_LETTERED
    )


def test_a_model_that_was_there_meanwhile_may_be_unknown_for_as_long_again() -> None:
    policy, mine = DurableRetryPolicy(5), trials()
    assert policy.after(ACCEPTED_MS, UNKNOWN, mine).outcome is None
    assert policy.after(ACCEPTED_MS + UNKNOWN_MODEL_TIMEOUT_MS - 1, NOBODYS, mine).outcome is None
    assert policy.after(ACCEPTED_MS + UNKNOWN_MODEL_TIMEOUT_MS, UNKNOWN, mine).outcome is None


def test_a_deadline_ends_all_that_may_be_tried_again() -> None:
    policy = DurableRetryPolicy(5)
    for error in (NOBODYS, PASSING, UNKNOWN, overloaded("Request timeout expired", reason=Reason.TIMED_OUT)):
        mine = trials(deadline_ms=ACCEPTED_MS + 1000)
        assert policy.before(ACCEPTED_MS + 999, mine) is None
        assert policy.after(ACCEPTED_MS + 999, error, mine).outcome is None
        decision = policy.after(ACCEPTED_MS + 1000, error, mine)
        assert (decision.outcome, decision.reason) == (Outcome.EXPIRED, "Request timeout expired")
        assert policy.before(ACCEPTED_MS + 1000, mine) == decision
    assert policy.after(ACCEPTED_MS + 1000, invalid("x"), trials(deadline_ms=1)).outcome is Outcome.FAILED


def test_what_has_grown_too_old_says_so() -> None:
    policy, mine = DurableRetryPolicy(5), trials(max_age_ms=60_000, deadline_ms=ACCEPTED_MS + 90_000)
    assert policy.before(ACCEPTED_MS + 59_999, mine) is None
    decision = policy.before(ACCEPTED_MS + 60_000, mine)
    assert decision is not None
    assert (decision.outcome, decision.reason) == (Outcome.EXPIRED, "the request has waited for longer than 60 s")


def test_a_timeout_of_the_requests_own_is_the_end_of_it() -> None:
    mine = AttemptHistory("id", ACCEPTED_MS, has_timeout=True)
    assert (
        DurableRetryPolicy(5)
        .after(ACCEPTED_MS, overloaded("Request timeout expired", reason=Reason.TIMED_OUT), mine)
        .outcome
        is Outcome.EXPIRED
    )


def test_delays_follow_from_the_id_and_differ_between_ids() -> None:
    assert [retry_delay_ms("a", number) for number in range(1, 30)] == [
        retry_delay_ms("a", number) for number in range(1, 30)
    ]
    assert len({retry_delay_ms(f"id {number}", 12) for number in range(100)}) > 40
    assert all(0.75 * MAX_DELAY_MS <= retry_delay_ms("a", number) <= MAX_DELAY_MS for number in (12, 50, 10**9))


ERRORS = st.sampled_from(
    [
        NOBODYS,
        PASSING,
        UNKNOWN,
        overloaded("Request timeout expired", reason=Reason.TIMED_OUT),
        queue_full("m", "x"),
        unavailable("y"),
    ]
)


@settings(deadline=None, database=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(max_size=5),
    st.lists(st.tuples(ERRORS, st.integers(0, 40_000)), min_size=1, max_size=60),
    st.integers(0, 200_000),
    st.integers(0, 200_000),
    st.integers(1, 6),
)
def test_each_request_ends_once_and_in_time(
    id: str, answers: list[tuple[WeirError, int]], deadline: int, max_age_ms: int, max_attempts: int
) -> None:
    """Whatever comes back: at most so many attempts count, no try begins after the end, and each has a time to come."""
    policy = DurableRetryPolicy(max_attempts)
    mine = AttemptHistory(id, ACCEPTED_MS, ACCEPTED_MS + deadline if deadline else 0, max_age_ms)
    now_ms = ACCEPTED_MS
    for error, took_ms in answers:
        before = policy.before(now_ms, mine)
        if before is not None:
            assert (before.outcome, 0 < mine.expires_ms <= now_ms) == (Outcome.EXPIRED, True)
            return
        assert not mine.is_expired(now_ms)
        now_ms += took_ms
        decision = policy.after(now_ms, error, mine)
        assert mine.attempts <= max_attempts
        assert 1 <= len(mine.history) <= MAX_HISTORY
        if decision.outcome is not None:
            assert decision.reason
            late = mine.is_expired(now_ms)
            assert decision.outcome is (Outcome.EXPIRED if late else Outcome.DEAD_LETTERED)
            return
        assert now_ms < decision.at_ms <= now_ms + MAX_DELAY_MS
        assert not mine.expires_ms or decision.at_ms <= mine.expires_ms
        now_ms = decision.at_ms
