"""`Facts`: what was heard and read of a cluster within one look, as it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bus.registry import WorkerView
from schemas.presence import RoleRecord
from schemas.registry import Heartbeat
from schemas.statistics import SchedulerCounters, WorkerLoadCounters


@dataclass(frozen=True, kw_only=True)
class Facts:
    """`loads` are those that workers tell, by worker. `known` are the models that are to be kept without workers too.

    `heard` are processes that told of themselves in this look, `missed` those that did earlier, and not in this one.

    `workers` are those of the registry. `streams` and `consumers` (by stream) are JetStream's own records of them;
    `dead` counts dead letters by model.
    """

    now_ms: int
    url: str
    server: Mapping[str, Any] = field(default_factory=dict)
    heard: Sequence[RoleRecord] = ()
    missed: Sequence[RoleRecord] = ()
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    heartbeats: Mapping[str, Heartbeat] = field(default_factory=dict)
    counters: Mapping[str, SchedulerCounters] = field(default_factory=dict)
    loads: Mapping[str, WorkerLoadCounters] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    streams: Sequence[Mapping[str, Any]] = ()
    consumers: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    dead: Mapping[str, int] = field(default_factory=dict)
