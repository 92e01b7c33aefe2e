"""`Doors`: what every front door of a gateway works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from calls.catalog import Catalog
from calls.inference import Inference
from calls.payload_store import PayloadStore
from calls.readiness import Readiness
from gateway.access import OPEN, Access
from gateway.async_requests.async_requests import AsyncRequests
from gateway.durable.store import DurableStore
from gateway.http.cross_site import LOCAL, CrossSiteCheck
from gateway.jobs.job_service import JobService
from gateway.live_settings import LiveSettings
from gateway.repository_control import RepositoryControl
from gateway.shared_memory import SharedMemoryRegions
from gateway.statistics import Statistics
from runtime.memory_ledger import MemoryLedger
from runtime.offload import Offload
from schemas.request_limits import RequestLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What a gateway has: models, the way to them, memory, limits, counters, streams, jobs; what clients may ask.

    `ledger` counts ordinary memory that holds what clients sent or have not read. `arriving_slots` counts the payload slots
    in which bodies are still arriving.
    """

    catalog: Catalog
    readiness: Readiness
    inference: Inference
    payloads: PayloadStore
    limits: RequestLimits
    server_id: str
    statistics: Statistics
    regions: SharedMemoryRegions
    repository: RepositoryControl
    settings: LiveSettings
    durable: DurableStore
    access: Access = OPEN
    cross_site: CrossSiteCheck = LOCAL
    later: AsyncRequests | None = None
    batch_jobs: JobService | None = None
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    arriving_slots: MemoryLedger = field(default_factory=MemoryLedger)
    offload: Offload = field(default_factory=Offload)
