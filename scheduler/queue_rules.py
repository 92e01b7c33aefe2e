"""`QueueRules`: what a configuration says of the queue of one model version.

Source: `dynamic_batching` of `config.pbtxt` as Triton reads it. Priority level 1 is the highest; a request whose priority
is absent, 0 or not among the levels has the default level. Each level has the policy that is configured for it, or else
the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from scheduler.queued_request import QueuedRequest
from schemas.scheduling_config import DynamicBatching, QueuePolicy

DEFAULT_MAX_QUEUE_SIZE = 10_000
"""Requests of a lane that may wait for one version, at each level, when the configuration sets no `max_queue_size`."""


class LevelRules(NamedTuple):
    """The policy of one level: at most `max_size` requests wait, those that came before included.

    `timeout_us` (0: none) is how long, `delays` what happens then: True puts a request behind all others of its level,
    False refuses it. `allows_override` lets requests have a smaller timeout, never a larger one, and none where there is
    no default.
    """

    max_size: int = DEFAULT_MAX_QUEUE_SIZE
    timeout_us: int = 0
    delays: bool = False
    allows_override: bool = False

    def timeout_of(self, request: QueuedRequest) -> int:
        """How long this request may wait, in microseconds; 0 for ever."""
        wanted = request.terms.timeout_us if self.allows_override else 0
        return wanted if 0 < wanted < self.timeout_us else self.timeout_us


class QueueRules:
    """See the module. `levels` is 0 or 1 where all requests are alike.

    With `is_deadline_first`, requests of one level whose callers wait only until a deadline may go ahead of others.
    `may_stage`: batches may be handed to an instance that is still running another.
    """

    def __init__(
        self,
        default: LevelRules = LevelRules(),  # noqa: B008 - immutable
        levels: int = 0,
        default_level: int = 1,
        by_level: Mapping[int, LevelRules] | None = None,
        is_deadline_first: bool = True,
        may_stage: bool = True,
    ) -> None:
        self.levels = levels
        self.is_deadline_first = is_deadline_first
        self.may_stage = may_stage
        self._default = default
        self._default_level = default_level
        self._by_level = dict(by_level or {})

    @classmethod
    def of(cls, dynamic: DynamicBatching) -> QueueRules:
        """The rules of a dynamic batcher."""
        by_level = dynamic.priority_queue_policy if dynamic.priority_levels else {}
        policies = [policy for policy in (dynamic.default_queue_policy, *by_level.values()) if policy]
        return cls(
            _level_rules(dynamic.default_queue_policy),
            dynamic.priority_levels,
            dynamic.default_priority_level,
            {level: _level_rules(policy) for level, policy in by_level.items()},
            # Answers that must leave in the order of arrival are not brought forward by running some requests earlier.
            is_deadline_first=not dynamic.preserve_ordering,
            # A request that lies at an instance can't be overtaken by a higher priority, times out no more and is not
            # in the queue's size: with any of these, requests stay in the queue until an instance is free, as in Triton.
            may_stage=dynamic.priority_levels <= 1 and not any(map(_is_policy, policies)),
        )

    @property
    def is_plain(self) -> bool:
        """Whether requests without a deadline run simply in the order they came, however long they wait."""
        return self.levels <= 1 and not self.of_level(1).timeout_us

    def level_of(self, request: QueuedRequest) -> int:
        """The level of a request, 1 is the highest."""
        if self.levels <= 1:
            return 1
        priority = request.terms.priority
        return priority if 1 <= priority <= self.levels else self._default_level

    def of_level(self, level: int) -> LevelRules:
        """The policy of a level."""
        return self._by_level.get(level, self._default)


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
