"""`GatewayContext`: the objects that all frontends of a gateway share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from weir.access.gate import Gate
from weir.calls.catalog import Catalog
from weir.calls.dispatch import RequestDispatcher
from weir.calls.payload_store import PayloadStore
from weir.calls.readiness import Readiness
from weir.cluster.counters.collection import Statistics
from weir.durable.api.async_requests import AsyncRequests
from weir.durable.api.store import DurableStore
from weir.gateway.access import OPEN, Access
from weir.gateway.admin.history import HistoryControl
from weir.gateway.admin.live_settings import LiveSettings
from weir.gateway.admin.load_report import LoadReports
from weir.gateway.admin.repository import RepositoryControl
from weir.gateway.admin.shared_memory import SharedMemoryRegions
from weir.gateway.cross_site import LOCAL, CrossSiteCheck
from weir.http_server.connection_cap import ConnectionCap
from weir.jobs.api.service import JobService
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.kserve.regions import FindRegion
from weir.telemetry.access_log import AccessLog


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """What a frontend needs: models, dispatch, memory, limits, counters, durable requests, jobs and access rules.

    `access` are Triton's restrictions, `gate` is Weir's access policy. `ledger` counts the ordinary memory that holds what
    clients have sent, or have not read yet. `arriving_slots` counts the payload slots in which bodies are still arriving,
    `connection_cap` the connections to all ports. With `describes_api`, HTTP frontends serve `/openapi.json` and `/docs`.
    """

    catalog: Catalog
    readiness: Readiness
    inference: RequestDispatcher
    payloads: PayloadStore
    limits: RequestLimits
    server_id: str
    statistics: Statistics
    regions: SharedMemoryRegions
    repository: RepositoryControl
    settings: LiveSettings
    durable: DurableStore
    load_reports: LoadReports | None = None
    access: Access = OPEN
    access_log: AccessLog | None = None
    gate: Gate = field(default_factory=partial(Gate, time.time))
    cross_site: CrossSiteCheck = LOCAL
    async_requests: AsyncRequests | None = None
    batch_jobs: JobService | None = None
    history: HistoryControl | None = None
    describes_api: bool = True
    connection_cap: ConnectionCap = field(default_factory=ConnectionCap.of_process)
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    arriving_slots: MemoryLedger = field(default_factory=MemoryLedger)
    offload: Offload = field(default_factory=Offload)

    @property
    def find_region(self) -> FindRegion:
        """Looks up clients' shared memory."""
        return self.regions.find
