"""`TrafficControl`: reads, sets and clears the traffic rules of models, as clients request them.

A change is in effect in all gateways when its client gets the response, and in all other callers a moment later.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from bus.kv.traffic import TrafficRecords
from bus.streams.history import ModelHistory
from client.catalog import Catalog
from client.traffic.counters import TrafficCounters, TrafficTotals
from gateway.admin.peers import Synchronise, no_peers
from schemas.config.traffic import TrafficRule, weights_text
from schemas.core.errors import invalid
from schemas.wire.history import TRAFFIC, ModelChange, TrafficState
from schemas.wire.traffic import TrafficRecord

logger = logging.getLogger("weir.gateway")


class TrafficControl:
    """The traffic rules of one gateway's `catalog`. `totals` are the counters of all callers, `counters` its own."""

    def __init__(  # noqa: PLR0913 - what it reads and writes
        self,
        catalog: Catalog,
        records: TrafficRecords,
        counters: TrafficCounters,
        totals: TrafficTotals,
        history: ModelHistory,
        synchronise: Synchronise = no_peers,
    ) -> None:
        self._history = history
        self._catalog = catalog
        self._records = records
        self.totals = totals
        self._synchronise = synchronise
        catalog.follow_traffic(records, counters)

    async def start(self) -> None:
        """Follows the rules and the counters from now on."""
        await self._records.start()
        await self.totals.start()

    def stop(self) -> None:
        """Publishes this gateway's counters for the last time."""
        self.totals.stop()

    def show(self, name: str) -> dict[str, Any]:
        """The rule of a model, where it comes from, and the share that each version gets now.

        Raises WeirError for a model that is not served.
        """
        served = self._catalog.resolve(name, "")
        rule, is_set = self._catalog.traffic_rule(served)
        split = served.split
        document: dict[str, Any] = {
            "model": served.name,
            "source": "none" if rule is None else "set" if is_set else "config",
            "weights": {str(version): weight for version, weight in rule.weights.items()} if rule else {},
            "sticky": rule.sticky if rule else "",
            "versions": [],
        }
        if rule is not None and split is not None:
            shares, ready = split.shares, set(served.versions)
            document["versions"] = [
                {"version": str(version), "weight": weight, "share": shares[version], "ready": version in ready}
                for version, weight in rule.weights.items()
            ]
        record = self._records.get(served.name)
        if record is not None:
            document |= {"changed_ms": record.changed_ms, "by": record.by}
        return document

    def shares(self) -> dict[tuple[str, int], float]:
        """The share that each version gets now, by model and version, of all models with a rule."""
        return {
            (served.name, version): share
            for served in self._catalog.served()
            if served.split is not None
            for version, share in served.split.shares.items()
        }

    async def set(self, name: str, rule: TrafficRule, by: str = "") -> dict[str, Any]:
        """Replaces the rule of a model; returns it as `show` does."""
        served = self._catalog.resolve(name, "")
        before = self.state(served.name)
        await self._write(served.name, rule, by)
        logger.info("the traffic of model %s is split by %s (set by %s)", served.name, _shown(rule), by or "a client")
        await self._record(served.name, by, before)
        return self.show(served.name)

    async def clear(self, name: str, by: str = "") -> dict[str, Any]:
        """Removes the rule that was set for a model, so that its configuration's one applies, if it has one."""
        served = self._catalog.resolve(name, "")
        before = self.state(served.name)
        if self._records.get(served.name) is not None:
            await self._remove(served.name, by)
            await self._record(served.name, by, before)
        return self.show(served.name)

    def state(self, model: str) -> TrafficState:
        """The rule that is set for the model of this identity."""
        record = self._records.get(model)
        return TrafficState() if record is None else TrafficState(record.weights, record.sticky)

    async def restore(self, model: str, state: TrafficState, by: str = "") -> None:
        """Sets the rule of an earlier `state`, which is not recorded as a change."""
        if state.weights:
            await self._write(model, TrafficRule(state.weights, state.sticky), by)
        elif self._records.get(model) is not None:
            await self._remove(model, by)

    async def _record(self, model: str, by: str, before: TrafficState) -> None:
        now_ms = time.time_ns() // 1_000_000
        after = self.state(model)
        await self._history.record(ModelChange(model, TRAFFIC, now_ms, by, traffic_before=before, traffic_after=after))

    async def _remove(self, model: str, by: str) -> None:
        await self._records.remove(model)
        await self._synchronise()
        logger.info("the traffic rule of model %s is cleared (by %s)", model, by or "a client")

    async def _write(self, model: str, rule: TrafficRule, by: str) -> None:
        known = self._records.get(model)
        revision = max(time.time_ns(), 1 + (0 if known is None else known.revision))
        now_ms = time.time_ns() // 1_000_000
        await self._records.write(TrafficRecord(model, revision, rule.weights, rule.sticky, now_ms, by))
        await self._synchronise()


def checked(read: Any, *arguments: Any) -> TrafficRule:
    """The rule that `read(*arguments)` returns. Raises WeirError (INVALID_ARG) where it raises ValueError."""
    try:
        rule: TrafficRule = read(*arguments)
    except ValueError as error:
        raise invalid(f"invalid traffic rule: {error}") from error
    return rule


def _shown(rule: TrafficRule) -> str:
    return weights_text(rule.weights) + (f", sticky by {rule.sticky}" if rule.sticky else "")
