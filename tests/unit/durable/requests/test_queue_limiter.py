"""How many durable requests may wait for a model, in all and of a tenant."""

from hypothesis import given
from hypothesis import strategies as st

from weir.durable.requests.queue_limits import QueueLimiter
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.errors import ErrorCode

BOUNDS = QueueBounds(max_messages=5, max_bytes=100, max_age_s=1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), max_size=60))
def test_no_more_wait_than_may(events: list[tuple[str, int, bool]]) -> None:
    limits = QueueLimiter("m", {"*": 2, "c": 4})
    waiting: list[tuple[str, int]] = []
    for tenant, size, is_end in events:
        if is_end and waiting:
            limits.remove(*waiting.pop(0))
            continue
        error = limits.rejection(tenant, size, BOUNDS)
        mine = sum(name == tenant for name, _ in waiting)
        is_over = mine >= (4 if tenant == "c" else 2) or len(waiting) >= 5 or sum(s for _, s in waiting) + size > 100
        assert (error is not None) is is_over
        if error is None:
            waiting.append((tenant, size))
            limits.add(tenant, size)
        else:
            assert error.code is ErrorCode.RESOURCE_EXHAUSTED
        assert len(limits) == len(waiting)
    for request in waiting:
        limits.remove(*request)
    assert limits._tenants == {}


def test_what_was_checked_before_counts_and_is_taken() -> None:
    limits = QueueLimiter("m", {})
    for _ in range(7):
        assert limits.rejection("", 50, None) is None
        limits.add("", 50)
    assert limits.rejection("", 1, BOUNDS) is not None
    limits.clear()
    assert limits.rejection("", 1, BOUNDS) is None
