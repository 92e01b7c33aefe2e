"""`TrafficControl`: reads, sets and clears the traffic rules of models, as clients request them.

A change is in effect in all gateways when its client gets the response, and in all other callers a moment later.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from bus.kv.traffic import TrafficRecords
from bus.streams.history import ModelHistory
from client.catalog import Catalog
from client.traffic.counters import TrafficCounters, TrafficTotals
from client.traffic.ramp import STEPS, ramp_weights, read_conditions
from gateway.admin.peers import Synchronise, no_peers
from schemas.config.traffic import MAX_ARMS, MAX_VERSION, TrafficRule, weights_text
from schemas.core.errors import invalid
from schemas.wire.history import TRAFFIC, ModelChange, TrafficState
from schemas.wire.traffic import RampState, ShadowRule, TrafficRecord

logger = logging.getLogger("weir.gateway")


MAX_RAMP_S = 30 * 86400.0
"""The longest ramp."""


class RampWish(NamedTuple):
    """A ramp that a client asks for: `goal` is a share of 1."""

    version: int
    goal: float
    over_s: float
    abort_if: str = ""


def read_ramp(document: Any) -> RampWish:
    """The ramp in `{"version": 2, "to": 100, "over_s": 1800, "abort_if": "error_rate>1%"}`; `to` is in percent.

    Raises WeirError (INVALID_ARG) with what is wrong.
    """
    fields = {"version": 0, "to": 100, "over_s": 0.0, "abort_if": ""}
    if not isinstance(document, dict) or document.keys() - fields:
        raise invalid(f"invalid ramp: expected a JSON object with {', '.join(fields)}")
    version, to, over_s, abort_if = ({**fields, **document}[name] for name in fields)
    if type(version) is not int or not 0 < version <= MAX_VERSION:
        raise invalid("invalid ramp: version must be the number of a version")
    if not _is_number(to) or not 0 < to <= 100:
        raise invalid("invalid ramp: to must be a share in percent, above 0 and at most 100")
    if not _is_number(over_s) or not 0 < over_s <= MAX_RAMP_S:
        raise invalid(f"invalid ramp: over_s must be a number of seconds above 0 and at most {MAX_RAMP_S:.0f}")
    if not isinstance(abort_if, str):
        raise invalid("invalid ramp: abort_if must be a text such as 'error_rate>1% or p99>1.5x'")
    try:
        if abort_if:
            read_conditions(abort_if)
    except ValueError as error:
        raise invalid(f"invalid ramp: {error}") from error
    return RampWish(version, to / 100, float(over_s), abort_if)


def read_shadow(document: Any) -> ShadowRule:
    """The copies in `{"version": 2, "share": 20}`, `share` in percent. Raises WeirError (INVALID_ARG)."""
    if not isinstance(document, dict) or document.keys() != {"version", "share"}:
        raise invalid("invalid shadow: expected a JSON object with version and share")
    version, share = document["version"], document["share"]
    if type(version) is not int or not 0 < version <= MAX_VERSION:
        raise invalid("invalid shadow: version must be the number of a version")
    if not _is_number(share) or not 0 < share <= 100:
        raise invalid("invalid shadow: share must be in percent, above 0 and at most 100")
    return ShadowRule(version, share / 100)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
            if record.shadow is not None:
                document["shadow"] = {"version": str(record.shadow.version), "share": 100 * record.shadow.share}
            if record.ramp is not None:
                document["ramp"] = _shown_ramp(record.ramp)
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

    async def ramp(self, name: str, wanted: RampWish, by: str = "") -> dict[str, Any]:
        """Starts to raise the share of a version; returns the rule as `show` does.

        Raises WeirError (INVALID_ARG) where no other version has a weight to return to.
        """
        served = self._catalog.resolve(name, "")
        rule, _ = self._catalog.traffic_rule(served)
        if rule is None or not any(weight for version, weight in rule.weights.items() if version != wanted.version):
            others = [version for version in served.versions if version != wanted.version]
            example = f"weir traffic set {name} {others[-1] if others else 1}=100"
            raise invalid(
                f"model '{name}' has no rule in which another version than {wanted.version} has a weight, so the ramp "
                f"could not go back. Set one first: {example}"
            )
        if wanted.version not in served.versions:
            raise invalid(f"version {wanted.version} of model '{name}' is not ready: it can't get traffic")
        if len(rule.weights.keys() | {wanted.version}) > MAX_ARMS:
            raise invalid(f"a traffic rule may name {MAX_ARMS} versions")
        before = self.state(served.name)
        weights = ramp_weights(rule.weights, wanted.version, wanted.goal * STEPS[0])
        ramp = RampState(
            time.time_ns(), wanted.version, wanted.goal, wanted.over_s, dict(rule.weights), wanted.abort_if
        )
        await self._write(served.name, TrafficRule(weights, rule.sticky), by, ramp)
        note = f"ramp of version {wanted.version} to {wanted.goal:.4%} over {wanted.over_s:g} s"
        logger.info("model %s: %s begins (asked by %s)", served.name, note, by or "a client")
        await self._record(served.name, by, before, note)
        return self.show(served.name)

    async def shadow(self, name: str, shadow: ShadowRule | None, by: str = "") -> dict[str, Any]:
        """Starts to run copies of requests on a version, or stops it (None); returns the rule as `show` does."""
        served = self._catalog.resolve(name, "")
        rule, _ = self._catalog.traffic_rule(served)
        if rule is None:
            raise invalid(f"model '{name}' has no traffic rule. Set one first: weir traffic set {name} VERSION=100")
        before = self.state(served.name)
        known = self._records.get(served.name)
        await self._write(served.name, rule, by, None if known is None else known.ramp, shadow)
        note = "no copies" if shadow is None else f"copies of {shadow.share:.4%} run on version {shadow.version}"
        logger.info("model %s: %s (asked by %s)", served.name, note, by or "a client")
        await self._record(served.name, by, before, note)
        return self.show(served.name)

    def ramps(self) -> list[tuple[str, RampState]]:
        """The ramps of models, running or not."""
        return [(record.model, record.ramp) for record in self._records.all() if record.ramp is not None]

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

    async def _record(self, model: str, by: str, before: TrafficState, note: str = "") -> None:
        now_ms = time.time_ns() // 1_000_000
        after = self.state(model)
        await self._history.record(
            ModelChange(model, TRAFFIC, now_ms, by, traffic_before=before, traffic_after=after, note=note)
        )

    async def _remove(self, model: str, by: str) -> None:
        await self._records.remove(model)
        await self._synchronise()
        logger.info("the traffic rule of model %s is cleared (by %s)", model, by or "a client")

    async def _write(
        self, model: str, rule: TrafficRule, by: str, ramp: RampState | None = None, shadow: ShadowRule | None = None
    ) -> None:
        known = self._records.get(model)
        revision = max(time.time_ns(), 1 + (0 if known is None else known.revision))
        now_ms = time.time_ns() // 1_000_000
        await self._records.write(TrafficRecord(model, revision, rule.weights, rule.sticky, now_ms, by, ramp, shadow))
        await self._synchronise()


def checked(read: Any, *arguments: Any) -> TrafficRule:
    """The rule that `read(*arguments)` returns. Raises WeirError (INVALID_ARG) where it raises ValueError."""
    try:
        rule: TrafficRule = read(*arguments)
    except ValueError as error:
        raise invalid(f"invalid traffic rule: {error}") from error
    return rule


def _shown_ramp(ramp: RampState) -> dict[str, Any]:
    return {
        "version": str(ramp.version),
        "state": ramp.state,
        "step": ramp.step + 1,
        "steps": len(STEPS),
        "to": 100 * ramp.goal,
        "over_s": ramp.over_s,
        "abort_if": ramp.abort_if,
        "reason": ramp.reason,
    }


def _shown(rule: TrafficRule) -> str:
    return weights_text(rule.weights) + (f", sticky by {rule.sticky}" if rule.sticky else "")
