"""`QueueRules`: the queue configuration of a model version: sizes, timeouts and priority levels.

Source of the rules: `dynamic_batching` of `config.pbtxt` as Triton reads it. Priority level 1 is the highest; a
request whose priority is absent, 0 or not a configured level has the default level. A level has its configured
policy, or else the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.scheduler.batching.request import QueuedRequest
from weir.schemas.config.model_config import DynamicBatching, QueuePolicy

DEFAULT_MAX_QUEUE_SIZE = 10_000
"""Requests of a lane that may wait for one version, at each level, if the configuration sets no `max_queue_size`."""


class LevelRules(NamedTuple):
    """The queue policy of one priority level: at most `max_size` requests wait, counting those already in the queue.

    `timeout_us` (0: none) is the longest wait. With `delays`, a request that reaches it moves behind all others of
    its level; otherwise it is rejected. `allows_override` lets a request set a smaller timeout, never a larger one,
    and none if there is no default.
    """

    max_size: int = DEFAULT_MAX_QUEUE_SIZE
    timeout_us: int = 0
    delays: bool = False
    allows_override: bool = False

    def timeout_of(self, request: QueuedRequest) -> int:
        """Returns how long `request` may wait, in microseconds; 0 means without limit."""
        wanted = request.terms.timeout_us if self.allows_override else 0
        return wanted if 0 < wanted < self.timeout_us else self.timeout_us


@dataclass(frozen=True, slots=True)
class QueueRules:
    """The queue configuration of one model version. `levels` is 0 or 1 if the model has no priorities.

    With `is_deadline_first`, requests with a deadline may run before others of their level. `may_stage`: a batch may
    be sent to an instance that still executes another. `is_batched_by_shape`: a request of other shapes ends a batch.
    """

    default: LevelRules = field(default_factory=LevelRules)
    levels: int = 0
    default_level: int = 1
    by_level: Mapping[int, LevelRules] = field(default_factory=dict)
    is_deadline_first: bool = True
    may_stage: bool = True
    is_batched_by_shape: bool = True

    @classmethod
    def of(cls, dynamic: DynamicBatching) -> QueueRules:
        """Creates the rules of a dynamic batcher's configuration."""
        by_level = dynamic.priority_queue_policy if dynamic.priority_levels else {}
        policies = [policy for policy in (dynamic.default_queue_policy, *by_level.values()) if policy]
        return cls(
            _level_rules(dynamic.default_queue_policy),
            dynamic.priority_levels,
            dynamic.default_priority_level,
            {level: _level_rules(policy) for level, policy in by_level.items()},
            # If responses must leave in the order of arrival, running a request earlier does not bring them forward.
            is_deadline_first=not dynamic.preserve_ordering,
            # A staged request can not be overtaken by a higher priority, does not time out and does not count in the
            # queue's size. With any of these settings, requests stay in the queue until an instance is free, as in Triton.
            may_stage=dynamic.priority_levels <= 1 and not any(map(_is_policy, policies)),
        )

    @property
    def is_plain(self) -> bool:
        """Whether requests without a deadline simply run in the order of arrival and never time out."""
        return self.levels <= 1 and not self.of_level(1).timeout_us

    def level_of(self, request: QueuedRequest) -> int:
        """Returns the priority level of a request; 1 is the highest."""
        if self.levels <= 1:
            return 1
        priority = request.terms.priority
        return priority if 1 <= priority <= self.levels else self.default_level

    def of_level(self, level: int) -> LevelRules:
        """Returns the policy of a level."""
        return self.by_level.get(level, self.default)


def _level_rules(policy: QueuePolicy | None) -> LevelRules:
    if policy is None:
        return LevelRules()
    return LevelRules(
        policy.max_queue_size or DEFAULT_MAX_QUEUE_SIZE,
        policy.default_timeout_microseconds,
        policy.timeout_action == "DELAY",
        policy.allow_timeout_override,
    )


def _is_policy(policy: QueuePolicy) -> bool:
    return bool(policy.max_queue_size or policy.default_timeout_microseconds or policy.allow_timeout_override)
