"""`queue_full_error` and `QueueLimiter`: bounds of the durable queue of a model.

A message of a producer is in the stream before the server can reject it, so requests beyond the bounds end at once with
an error. A request counts from its delivery until it has its record. Requests that an earlier owner may have admitted
are never rejected, nor are those that a frontend checked before it stored them. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping

from weir.durable.requests.fair_queue import ANY_TENANT
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.errors import WeirError, queue_full


def queue_full_error(  # noqa: PLR0913 - two bounds, what waits, and what is added
    model: str, bounds: QueueBounds, messages: int, waiting_bytes: int, count: int, size_bytes: int
) -> WeirError | None:
    """The error if `count` more messages of `size_bytes` would exceed the bounds of the queue of `model`; None if not.

    The error is RESOURCE_EXHAUSTED (HTTP 429).
    """
    if messages + count > bounds.max_messages:
        return queue_full(model, f"{messages} requests are waiting, of at most {bounds.max_messages}")
    if waiting_bytes + size_bytes > bounds.max_bytes:
        return queue_full(
            model, f"{waiting_bytes} bytes are waiting; {size_bytes} more would exceed {bounds.max_bytes}"
        )
    return None


class QueueLimiter:
    """Counts the waiting requests of one lane. `tenant_limits` are by tenant; `*` applies to each tenant not named."""

    def __init__(self, model: str, tenant_limits: Mapping[str, int]) -> None:
        self._model = model
        self._limits = dict(tenant_limits)
        self._limit = self._limits.get(ANY_TENANT)
        self._tenants: dict[str, int] = {}
        self._messages = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        """Waiting requests."""
        return self._messages

    def rejection(self, tenant: str, size_bytes: int, bounds: QueueBounds | None) -> WeirError | None:
        """The error if one more request would exceed a limit, else None. Without `bounds` only the tenant's limit
        applies.
        """
        limit = self._limits.get(tenant, self._limit)
        if limit is not None and self._tenants.get(tenant, 0) >= limit:
            return queue_full(self._model, f"tenant '{tenant}' has {limit} requests waiting, its limit")
        if bounds is None:
            return None
        return queue_full_error(self._model, bounds, self._messages, self._size_bytes, 1, size_bytes)

    def add(self, tenant: str, size_bytes: int) -> None:
        """Counts a request."""
        self._messages += 1
        self._size_bytes += size_bytes
        if self._limits:
            self._tenants[tenant] = self._tenants.get(tenant, 0) + 1

    def remove(self, tenant: str, size_bytes: int) -> None:
        """A counted request has its record."""
        self._messages -= 1
        self._size_bytes -= size_bytes
        if self._limits:
            left = self._tenants.get(tenant, 0) - 1
            if left > 0:
                self._tenants[tenant] = left
            else:
                self._tenants.pop(tenant, None)

    def clear(self) -> None:
        """Forgets all requests."""
        self._tenants.clear()
        self._messages = self._size_bytes = 0
