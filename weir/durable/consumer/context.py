"""`ConsumerServices` and `ConsumerContext`: what the durable consumer gets from its process, and what its lanes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from weir.access.gate import Gate
from weir.bus.nats.connection import Bus
from weir.bus.nats.jetstream import JetStream
from weir.calls.catalog import Catalog
from weir.calls.dispatch import RequestDispatcher
from weir.durable.api.metrics import DurableCounters
from weir.durable.records.object_bodies import ObjectBodies
from weir.durable.records.recorder import Recorder
from weir.durable.requests.retry_policy import DurableRetryPolicy
from weir.runtime.memory_ledger import Account, MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.config.parameters import QueueBounds
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.kserve.regions import FindRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerServices:
    """What a process gives its durable consumer and its jobs: models, dispatch of requests, memory, helper processes.

    `find_region` looks up clients' shared memory. `has_workers` returns whether any worker is registered.
    `gate` decides by the access policy.
    """

    catalog: Catalog
    inference: RequestDispatcher
    limits: RequestLimits
    ledger: MemoryLedger
    find_region: FindRegion
    has_workers: Callable[[], bool]
    offload: Offload = field(default_factory=Offload)
    gate: Gate = field(default_factory=partial(Gate, time.time))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerContext:
    """The objects that the consumers of all lanes share. `account` is charged with the bytes of messages.

    `bounds` apply to models without bounds of their own; `weights` and `tenant_limits` are by tenant.
    """

    bus: Bus
    api: JetStream
    consumer_id: str
    catalog: Catalog
    inference: RequestDispatcher
    limits: RequestLimits
    find_region: FindRegion
    recorder: Recorder
    objects: ObjectBodies
    counters: DurableCounters
    account: Account
    policy: DurableRetryPolicy
    bounds: QueueBounds
    weights: Mapping[str, float]
    tenant_limits: Mapping[str, int]
    offload: Offload = field(default_factory=Offload)
    gate: Gate = field(default_factory=partial(Gate, time.time))
