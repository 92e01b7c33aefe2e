"""The rules of the queue for one request at a time: when it times out, and which requests precede it."""

from __future__ import annotations

from collections.abc import Mapping

from weir.scheduler.batching.ordered_queue import VIRTUAL_DEADLINE_US
from weir.scheduler.batching.request import QueuedRequest, arrival
from weir.schemas.config.model_config import ModelConfig, QueuePolicy


class QueueOracle:
    """Knows the configurations of versions, and nothing of queues. Times are microseconds."""

    def __init__(self, configs: Mapping[int, ModelConfig]) -> None:
        self._configs = configs

    def level(self, request: QueuedRequest, version: int) -> int:
        dynamic = self._configs[version].dynamic_batching
        if dynamic is None or dynamic.priority_levels <= 1:
            return 1
        priority = request.terms.priority
        return priority if 1 <= priority <= dynamic.priority_levels else dynamic.default_priority_level

    def policy(self, request: QueuedRequest, version: int) -> QueuePolicy:
        dynamic = self._configs[version].dynamic_batching
        if dynamic is None:
            return QueuePolicy()
        by_level = dynamic.priority_queue_policy if dynamic.priority_levels else {}
        return by_level.get(self.level(request, version)) or dynamic.default_queue_policy or QueuePolicy()

    def may_stage(self, version: int) -> bool:
        dynamic = self._configs[version].dynamic_batching
        if dynamic is None:
            return True
        by_level = dynamic.priority_queue_policy if dynamic.priority_levels else {}
        policies = [*by_level.values(), dynamic.default_queue_policy or QueuePolicy()]
        unset = QueuePolicy()
        return dynamic.priority_levels <= 1 and all(
            p.model_copy(update={"timeout_action": "REJECT"}) == unset for p in policies
        )

    def expiry_us(self, request: QueuedRequest, version: int) -> int | None:
        """When its timeout passes; a request that ran before has met it."""
        policy = self.policy(request, version)
        timeout_us, wanted_us = policy.default_timeout_microseconds, request.terms.timeout_us
        if policy.allow_timeout_override and wanted_us and wanted_us < timeout_us:
            timeout_us = wanted_us
        return request.enqueued_us + timeout_us if timeout_us and not request.attempts else None

    def turn(self, request: QueuedRequest, version: int, now_us: int) -> tuple[int, ...]:
        """Requests run in the order of this."""
        level, came = self.level(request, version), arrival(request)
        expiry_us = self.expiry_us(request, version)
        if expiry_us is not None and expiry_us <= now_us:
            return (level, 1, expiry_us, *came)
        dynamic = self._configs[version].dynamic_batching
        if dynamic is None or dynamic.preserve_ordering:
            return (level, 0, 0, *came)
        due_us = request.enqueued_us + VIRTUAL_DEADLINE_US
        return (level, 0, min(due_us, request.terms.deadline_us or due_us), *came)

    def ends_us(self, request: QueuedRequest, version: int) -> int | None:
        """When it is refused if it is still waiting."""
        ends = [request.terms.deadline_us] if request.terms.deadline_us else []
        expiry_us = self.expiry_us(request, version)
        if expiry_us is not None and self.policy(request, version).timeout_action == "REJECT":
            ends.append(expiry_us)
        return min(ends, default=None)
