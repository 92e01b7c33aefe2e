"""What is refused with 429 because a durable queue would hold too much."""

from __future__ import annotations

import pytest

from weir.durable.requests.queue_limits import queue_full_error
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.errors import ErrorCode

BOUNDS = QueueBounds(3, 100, 60.0)


@pytest.mark.parametrize(("waiting", "count", "is_refused"), [(2, 1, False), (3, 1, True), (0, 3, False), (1, 3, True)])
def test_one_below_at_and_above_the_count(waiting: int, count: int, is_refused: bool) -> None:
    error = queue_full_error("small", BOUNDS, waiting, 0, count, 1)
    assert (error is not None) == is_refused
    if error is not None:
        assert (error.code, error.http_status) == (ErrorCode.RESOURCE_EXHAUSTED, 429)
        assert error.message == f"the queue of model 'small' is full: {waiting} requests are waiting, of at most 3"


@pytest.mark.parametrize(("size_bytes", "is_refused"), [(39, False), (40, False), (41, True)])
def test_one_below_at_and_above_the_bytes(size_bytes: int, is_refused: bool) -> None:
    assert (queue_full_error("small", BOUNDS, 1, 60, 1, size_bytes) is not None) == is_refused
