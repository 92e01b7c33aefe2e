"""`IntakeParts`: what the intake of every lane of every model works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bus.connection import Bus
from bus.jetstream_api import JetStreamApi
from calls.catalog import Catalog
from calls.inference import Inference
from gateway.durable.counters import DurableCounters
from gateway.durable.objects import ObjectBodies
from gateway.durable.recorder import Recorder
from gateway.durable.retry_policy import RetryPolicy
from runtime.memory_ledger import Account
from runtime.offload import Offload
from schemas.queue_bounds import QueueBounds
from schemas.regions import FindRegion
from schemas.request_limits import RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeParts:
    """The objects that the intakes of all lanes share. `account` is charged with the bytes of messages.

    `bounds` hold for models that don't say otherwise; `weights` and `tenant_limits` are by tenant.
    """

    bus: Bus
    api: JetStreamApi
    gateway_id: str
    catalog: Catalog
    inference: Inference
    limits: RequestLimits
    find_region: FindRegion
    recorder: Recorder
    objects: ObjectBodies
    counters: DurableCounters
    account: Account
    policy: RetryPolicy
    bounds: QueueBounds
    weights: Mapping[str, float]
    tenant_limits: Mapping[str, int]
    offload: Offload = field(default_factory=Offload)
