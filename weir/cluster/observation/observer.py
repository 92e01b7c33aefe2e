"""`Observation`: observes batches and requests of a cluster for as long as its user asks for them.

The user calls `watch` whenever it reads. The leases at schedulers and gateways are renewed meanwhile, and end by
themselves some seconds after the last call.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.cluster.observation.store import MAX_BYTES, BatchPage, ObservedRequest, ObservedStore
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.observation import LEASE_S, MAX_ID_LENGTH, MAX_IDS, ObserveRequest, TraceReport, unpack_reports

RENEW_S = LEASE_S / 3
"""How often a lease is renewed: two requests may be lost."""

KEPT_S = LEASE_S
"""How long a model is observed after the last call of `watch` for it."""

TRACES_PER_S = 20.0
BATCHES_PER_S = 50.0

MAX_WATCHED = 64
"""Models that are watched at a time. A further one replaces the one that was asked for longest ago."""


class _Watch(NamedTuple):
    """What is wanted of one model until `until_s`."""

    until_s: float
    traces_per_s: float
    batches_per_s: float


class Observation:
    """The observations of one process. Everything runs in one event loop. `id` is the process's id on the bus."""

    def __init__(self, bus: Bus, id: str, max_bytes: int = MAX_BYTES) -> None:
        self._bus = bus
        self._id = id
        self._store = ObservedStore(max_bytes)
        self._watched: dict[str, _Watch] = {}
        self._ids: dict[str, float] = {}  # until when each is wanted
        self._renewal: asyncio.Handle | None = None
        self.malformed_messages = 0

    async def start(self) -> None:
        """Subscribes to reports. Nothing is reported before `watch` is called."""
        await self._bus.subscribe(subjects.observed(self._id), self._on_report)

    def close(self) -> None:
        """Ends all leases."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        for model in {*self._watched, *([""] if self._ids else [])}:
            self._publish(ObserveRequest(self._id, model, lease_s=0.0))
        self._watched.clear()
        self._ids.clear()

    def watch(self, model: str, traces_per_s: float = TRACES_PER_S, batches_per_s: float = BATCHES_PER_S) -> None:
        """Observes a model (its identity), or all (""), for `KEPT_S` from now on."""
        wanted = _Watch(time.monotonic() + KEPT_S, traces_per_s, batches_per_s)
        known = self._watched.pop(model, None)
        if known is None and len(self._watched) >= MAX_WATCHED:
            self._end(next(iter(self._watched)))
        self._watched[model] = wanted  # the last one now
        if known is None or known[1:] != wanted[1:]:
            self._renew_now()

    def watch_id(self, id: str) -> None:
        """Observes requests with this id, of any model, for `KEPT_S`. Call it before the request is sent."""
        id = id[:MAX_ID_LENGTH]
        self._ids.pop(id, None)
        self._ids[id] = time.monotonic() + KEPT_S
        while len(self._ids) > MAX_IDS:
            del self._ids[next(iter(self._ids))]
        if self._renewal is not None:
            self._renewal.cancel()
        self._renew()  # at once: what is published later on this connection arrives later

    def traces(self, model: str = "", limit: int = 50) -> list[TraceReport]:
        """The latest traced requests of a model, or of all (""), latest first."""
        return self._store.traces(model, limit)

    def trace(self, request_id: str) -> ObservedRequest | None:
        """The traced request with this id, or with "<caller>/<key>", and its batch; None if it is not known."""
        return self._store.trace(request_id)

    def batches(self, model: str, after: int = 0, limit: int = 500) -> BatchPage:
        """The batches of a model that were reported after number `after`."""
        return self._store.batches(model, after, limit)

    def _renew_now(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        # Models that are watched in one turn are asked for together.
        self._renewal = asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Repeats the requests of what is still wanted, and ends the others."""
        now_s = time.monotonic()
        for model in [model for model, watch in self._watched.items() if watch.until_s <= now_s and model]:
            self._end(model)
        if "" in self._watched and self._watched[""].until_s <= now_s:
            del self._watched[""]
        self._ids = {id: until_s for id, until_s in self._ids.items() if until_s > now_s}
        for model, watch in self._watched.items():
            ids = [] if model else list(self._ids)
            self._publish(
                ObserveRequest(
                    self._id, model, traces_per_s=watch.traces_per_s, batches_per_s=watch.batches_per_s, ids=ids
                )
            )
        if self._ids and "" not in self._watched:
            self._publish(ObserveRequest(self._id, ids=list(self._ids)))
        self._renewal = None
        if self._watched or self._ids:
            self._renewal = asyncio.get_running_loop().call_later(RENEW_S, self._renew)

    def _end(self, model: str) -> None:
        del self._watched[model]
        self._store.forget(model)
        self._publish(ObserveRequest(self._id, model, lease_s=0.0))

    def _publish(self, request: ObserveRequest) -> None:
        if self._bus.is_connected:
            self._bus.publish(subjects.OBSERVE, request.pack())

    def _on_report(self, message: Message) -> None:
        try:
            reports = unpack_reports(message.data)
        except MalformedMessage:
            self.malformed_messages += 1
            return
        found = False
        for report in reports:
            self._store.add(report)
            found |= isinstance(report, TraceReport) and self._ids.pop(report.id, None) is not None
        if found:
            # Callers parse every request in full while ids are asked for.
            if not self._ids and "" not in self._watched:
                self._publish(ObserveRequest(self._id, lease_s=0.0))
            else:
                self._renew_now()
