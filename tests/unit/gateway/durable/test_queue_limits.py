"""What is refused with 429 because a durable queue would hold too much."""

from __future__ import annotations

import pytest

from gateway.durable.queue_limits import over_bounds
from schemas.errors import ErrorCode
from schemas.queue_bounds import QueueBounds

BOUNDS = QueueBounds(3, 100, 60.0)


@pytest.mark.parametrize(("waiting", "count", "is_refused"), [(2, 1, False), (3, 1, True), (0, 3, False), (1, 3, True)])
def test_one_below_at_and_above_the_count(waiting: int, count: int, is_refused: bool) -> None:
    error = over_bounds("small", BOUNDS, waiting, 0, count, 1)
    assert (error is not None) == is_refused
    if error is not None:
        assert (error.code, error.http_status) == (ErrorCode.RESOURCE_EXHAUSTED, 429)
        assert error.message == f"the queue of model 'small' is full: {waiting} requests wait, and 3 may"


@pytest.mark.parametrize(("size_bytes", "is_refused"), [(39, False), (40, False), (41, True)])
def test_one_below_at_and_above_the_bytes(size_bytes: int, is_refused: bool) -> None:
    assert (over_bounds("small", BOUNDS, 1, 60, 1, size_bytes) is not None) == is_refused
