"""Statistics of Triton's API, and the counters of a gateway's response cache for the other processes."""

from __future__ import annotations

import time
from typing import Any

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.calls.cache.response_cache import CacheCounters
from weir.calls.catalog import Catalog, check_version
from weir.cluster.counters.collection import Statistics
from weir.schemas.core.errors import invalid
from weir.schemas.wire.statistics import pack_counters


class CacheCounterReporter:
    """Answers `statistics.query` with `counters`. A gateway without a cache does not answer, and is not waited for."""

    def __init__(self, bus: Bus, gateway_id: str, counters: CacheCounters) -> None:
        self._bus = bus
        self._id = gateway_id
        self._counters = counters
        self._born_ns = time.time_ns()

    async def start(self) -> None:
        """Subscribes to queries, and announces this gateway as a source of counters."""
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_query)
        self._bus.publish(subjects.LAST_COUNTERS, self._packed())

    def stop(self) -> None:
        """Publishes the final counters, which stay in the sums of the other gateways."""
        self._bus.publish(subjects.LAST_COUNTERS, self._packed(leaving=True))

    def _on_query(self, message: Message) -> None:
        if may_reply_to(message, subjects.counters("")):
            self._bus.publish(message.reply, self._packed())

    def _packed(self, leaving: bool = False) -> bytes:
        return pack_counters(
            {"gateway": self._id, "born_ns": self._born_ns, "models": self._counters.snapshot(), "leaving": leaving}
        )


async def model_statistics(catalog: Catalog, statistics: Statistics, name: str, version: str) -> dict[str, Any]:
    """`model_stats` of the READY versions of model `name` ("": of all models), or of `version` alone.

    Raises WeirError (INVALID_ARG), with Triton's texts, for a model or version that is not served.
    """
    _check_served(catalog, name, version)
    await statistics.refresh()
    _check_served(catalog, name, version)
    totals = statistics.versions()
    wanted = [key for key in sorted(totals) if not name or (key[0] == name and (not version or key[1] == int(version)))]
    return {"model_stats": [totals[key].triton_row() for key in wanted]}


def _check_served(catalog: Catalog, name: str, version: str) -> None:
    check_version(version)
    if not name:
        return
    served = catalog.served_model(name)
    if served is None:
        raise catalog.warmup_error(name) or invalid(f"requested model '{name}' is not available")
    if version and int(version) not in served.versions:
        raise invalid(f"requested model version is not available for model '{name}'")
