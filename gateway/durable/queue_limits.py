"""What is refused because a model's durable queue would hold too much."""

from __future__ import annotations

from schemas.errors import WeirError, queue_full
from schemas.queue_bounds import QueueBounds


def over_bounds(
    model: str, bounds: QueueBounds, messages: int, waiting_bytes: int, count: int, size_bytes: int
) -> WeirError | None:
    """Why `count` more messages of `size_bytes` may not wait for `model` besides those that do; None where they may.

    The error is RESOURCE_EXHAUSTED (HTTP 429).
    """
    if messages + count > bounds.max_messages:
        return queue_full(model, f"{messages} requests wait, and {bounds.max_messages} may")
    if waiting_bytes + size_bytes > bounds.max_bytes:
        return queue_full(
            model, f"{waiting_bytes} bytes wait, and with {size_bytes} more they would exceed {bounds.max_bytes}"
        )
    return None
