"""`WaitingLimits`: how many durable requests of one lane of a model may be accepted and not done, in all and of a tenant.

A producer's message is in the stream before anybody can refuse it, so what is too much is ended at once, with an error.
Requests count from when they are taken in until they have their records. Those that another owner may have let in before
are never refused, and neither are those that were checked before they were stored. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.durable.fair_queue import ANY_TENANT
from gateway.durable.queue_limits import over_bounds
from schemas.errors import WeirError, queue_full
from schemas.queue_bounds import QueueBounds


class WaitingLimits:
    """See the module. `tenant_limits` are by tenant, `*` for each of those not named."""

    def __init__(self, model: str, tenant_limits: Mapping[str, int]) -> None:
        self._model = model
        self._limits = dict(tenant_limits)
        self._limit = self._limits.get(ANY_TENANT)
        self._tenants: dict[str, int] = {}
        self._messages = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        """Requests that count."""
        return self._messages

    def refusal(self, tenant: str, size_bytes: int, bounds: QueueBounds | None) -> WeirError | None:
        """Why one more request may not wait; None where it may. Without `bounds` only those of its tenant hold."""
        limit = self._limits.get(tenant, self._limit)
        if limit is not None and self._tenants.get(tenant, 0) >= limit:
            return queue_full(self._model, f"tenant '{tenant}' has as many requests waiting as it may")
        if bounds is None:
            return None
        return over_bounds(self._model, bounds, self._messages, self._size_bytes, 1, size_bytes)

    def added(self, tenant: str, size_bytes: int) -> None:
        """A request waits."""
        self._messages += 1
        self._size_bytes += size_bytes
        if self._limits:
            self._tenants[tenant] = self._tenants.get(tenant, 0) + 1

    def ended(self, tenant: str, size_bytes: int) -> None:
        """A request that was added has its record."""
        self._messages -= 1
        self._size_bytes -= size_bytes
        if self._limits:
            left = self._tenants.get(tenant, 0) - 1
            if left > 0:
                self._tenants[tenant] = left
            else:
                self._tenants.pop(tenant, None)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._tenants.clear()
        self._messages = self._size_bytes = 0
