"""`TrafficControl`: reads, sets and clears the traffic rules of models, as clients request them.

A change is in effect in all gateways when its client gets the response, and in all other callers a moment later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from weir.bus.kv.traffic import TrafficRecords
from weir.bus.streams.history import ModelHistory
from weir.bus.streams.shadow_samples import SampleInfo, ShadowSamples
from weir.calls.catalog import Catalog, rule_with
from weir.calls.traffic.counters import TrafficCounters, TrafficTotals
from weir.calls.traffic.ramp import STEPS, ramp_weights, read_conditions
from weir.calls.traffic.shadow import WorstRequest
from weir.gateway.admin.peers import Synchronise, no_peers
from weir.schemas.config.traffic import MAX_ARMS, MAX_VERSION, TrafficRule, weights_text
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.core.tensors import as_array
from weir.schemas.wire.history import RAMP_BEGINS, TRAFFIC, ModelChange, TrafficState
from weir.schemas.wire.traffic import OutputRow, RampState, SampleTensor, ShadowRule, TrafficRecord

logger = logging.getLogger("weir.gateway")


MAX_RAMP_S = 30 * 86400.0
"""The longest ramp."""

_SHOWN_VALUES = 100
_MAX_TEXT_LENGTH = 500


class RampRequest(NamedTuple):
    """A ramp that a client asks for: `goal` is a share of 1."""

    version: int
    goal: float
    over_s: float
    abort_if: str = ""


def read_ramp(document: Any) -> RampRequest:
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
    return RampRequest(version, to / 100, float(over_s), abort_if)


def read_shadow(document: Any) -> ShadowRule:
    """The copies in `{"version": 2, "share": 20, "compare": true}`, `share` in percent. Raises WeirError (INVALID_ARG)."""
    if not isinstance(document, dict) or document.keys() | {"compare"} != {"version", "share", "compare"}:
        raise invalid("invalid shadow: expected a JSON object with version, share and, optionally, compare")
    version, share, compares = document["version"], document["share"], document.get("compare", False)
    if type(version) is not int or not 0 < version <= MAX_VERSION:
        raise invalid("invalid shadow: version must be the number of a version")
    if not _is_number(share) or not 0 < share <= 100:
        raise invalid("invalid shadow: share must be in percent, above 0 and at most 100")
    if not isinstance(compares, bool):
        raise invalid("invalid shadow: compare must be true or false")
    return ShadowRule(version, share / 100, compares)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class TrafficControl:
    """The traffic rules of one gateway's `catalog`. `totals` are the counters of all callers, `counters` its own.

    `samples` keeps the requests whose copies gave the most different responses.
    """

    def __init__(  # noqa: PLR0913 - what it reads and writes
        self,
        catalog: Catalog,
        records: TrafficRecords,
        counters: TrafficCounters,
        totals: TrafficTotals,
        history: ModelHistory,
        samples: ShadowSamples,
        synchronise: Synchronise = no_peers,
    ) -> None:
        self._history = history
        self._samples = samples
        counters.shadow.on_worst = self._keep
        self._catalog = catalog
        self._records = records
        self.totals = totals
        self._synchronise = synchronise
        catalog.follow_traffic(records, counters)

    async def start(self) -> None:
        """Follows the rules and the counters from now on."""
        await self._records.start()
        await self.totals.start()

    async def stop(self) -> None:
        """Publishes this gateway's counters for the last time."""
        self.totals.stop()
        await self._samples.stop()

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
                document["shadow"] = {
                    "version": str(record.shadow.version),
                    "share": _percent(record.shadow.share),
                    "compare": record.shadow.compares,
                }
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
        await self._change(served.name, by, partial(_with_rule, served.name, rule))
        logger.info("the traffic of model %s is split by %s (set by %s)", served.name, _shown(rule), by or "a client")
        return self.show(served.name)

    async def clear(self, name: str, by: str = "") -> dict[str, Any]:
        """Removes the rule that was set for a model, so that its configuration's one applies, if it has one."""
        served = self._catalog.resolve(name, "")
        await self._change(served.name, by, lambda _known: None)
        return self.show(served.name)

    async def ramp(self, name: str, wanted: RampRequest, by: str = "") -> dict[str, Any]:
        """Starts to raise the share of a version; returns the rule as `show` does.

        Raises WeirError (INVALID_ARG) where no other version has a weight to return to.
        """
        served = self._catalog.resolve(name, "")

        def begun(known: TrafficRecord | None) -> TrafficRecord:
            rule = rule_with(known, served)
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
            weights = ramp_weights(rule.weights, wanted.version, wanted.goal * STEPS[0])
            ramp = RampState(
                time.time_ns(), wanted.version, wanted.goal, wanted.over_s, dict(rule.weights), wanted.abort_if
            )
            return replace(_with_rule(served.name, TrafficRule(weights, rule.sticky), known), ramp=ramp)

        note = f"{RAMP_BEGINS}{wanted.version} to {wanted.goal:.4%} over {wanted.over_s:g} s"
        await self._change(served.name, by, begun, note)
        logger.info("model %s: %s begins (asked by %s)", served.name, note, by or "a client")
        return self.show(served.name)

    async def shadow(self, name: str, shadow: ShadowRule | None, by: str = "") -> dict[str, Any]:
        """Starts to run copies of requests on a version, or stops it (None); returns the rule as `show` does."""
        served = self._catalog.resolve(name, "")

        def copied(known: TrafficRecord | None) -> TrafficRecord:
            rule = rule_with(known, served)
            if rule is None:
                raise invalid(f"model '{name}' has no traffic rule. Set one first: weir traffic set {name} VERSION=100")
            return replace(known or _with_rule(served.name, rule, None), shadow=shadow)

        note = "no copies"
        if shadow is not None:
            note = f"copies of {shadow.share:.4%} run on version {shadow.version}"
            note += " and are compared" if shadow.compares else ""
        await self._change(served.name, by, copied, note)
        logger.info("model %s: %s (asked by %s)", served.name, note, by or "a client")
        return self.show(served.name)

    async def report(self, name: str) -> dict[str, Any]:
        """How the responses of copies differ from those of the live requests, by version, and the worst requests.

        The sums are those of all gateways since they started. Raises WeirError for a model that is not served.
        """
        served = self._catalog.resolve(name, "")
        sums = {version: sums for (model, version), sums in self.totals.comparisons().items() if model == served.name}
        samples = await self._samples.list(served.name)
        return {
            "model": served.name,
            "versions": [
                {
                    "version": str(version),
                    "compared": found.compared,
                    "differing": found.differing,
                    "mismatched": found.mismatched,
                    "failed": found.failed,
                    "skipped": found.skipped,
                    "outputs": {output: _shown_output(row) for output, row in sorted(found.outputs.items())},
                }
                for version, found in sums.items()
            ],
            "worst": [
                {
                    "sample": info.name,
                    "version": str(info.version),
                    "difference": info.text,
                    "request_id": info.request_id,
                    "at_ms": info.at_ms,
                }
                for info in samples
            ],
        }

    async def sample(self, name: str, sample: str) -> dict[str, Any]:
        """One of the worst requests: the first values of its inputs and of both responses.

        Raises WeirError (NOT_FOUND) where there is no such sample.
        """
        served = self._catalog.resolve(name, "")
        found = None
        if any(info.name == sample for info in await self._samples.list(served.name)):
            found = await self._samples.read(sample)
        if found is None:
            raise WeirError(ErrorCode.NOT_FOUND, f"model '{name}' has no sample '{sample[:200]}'")
        return {
            "request_id": found.request_id,
            "at_ms": found.at_ms,
            "inputs": [_shown_tensor(tensor) for tensor in found.inputs],
            "live": [_shown_tensor(tensor) for tensor in found.live],
            "copy": [_shown_tensor(tensor) for tensor in found.copied],
        }

    def _keep(self, worst: WorstRequest) -> None:
        score, difference = worst.difference.score, worst.difference
        rows = difference.outputs.items()
        text = difference.mismatch or "; ".join(_difference_text(name, row) for name, row in rows if row.differing)
        info = SampleInfo(
            worst.model,
            worst.version,
            score if math.isfinite(score) else -1.0,
            text[:_MAX_TEXT_LENGTH],
            worst.sample.request_id[:_MAX_TEXT_LENGTH],
            worst.sample.at_ms,
        )
        self._samples.keep(worst.slot, info, worst.sample)

    def ramps(self) -> list[tuple[str, RampState]]:
        """The ramps of models, running or not."""
        return [(record.model, record.ramp) for record in self._records.all() if record.ramp is not None]

    def state(self, model: str) -> TrafficState:
        """The rule that is set for the model of this identity."""
        return _state(self._records.get(model))

    async def restore(self, model: str, state: TrafficState, by: str = "") -> tuple[TrafficState, TrafficState]:
        """Sets the rule of an earlier `state`, which is not recorded as a change. Returns the states before and after."""
        rule = TrafficRule(state.weights, state.sticky) if state.weights else None
        before, after = await self._records.change(
            model, by, lambda known: None if rule is None else _with_rule(model, rule, known)
        )
        await self._synchronise()
        return _state(before), _state(after)

    async def _change(
        self, model: str, by: str, change: Callable[[TrafficRecord | None], TrafficRecord | None], note: str = ""
    ) -> None:
        """Changes the record of a model in all gateways, and records that, unless it had none and gets none."""
        before, after = await self._records.change(model, by, change)
        await self._synchronise()
        if after is None and before is not None:
            logger.info("the traffic rule of model %s is cleared (by %s)", model, by or "a client")
        if after is not before:
            now_ms = time.time_ns() // 1_000_000
            states = _state(before), _state(after)
            await self._history.record(ModelChange(model, TRAFFIC, now_ms, by, None, None, *states, note=note))


def _state(record: TrafficRecord | None) -> TrafficState:
    return TrafficState() if record is None else TrafficState(record.weights, record.sticky)


def _with_rule(model: str, rule: TrafficRule, known: TrafficRecord | None) -> TrafficRecord:
    """The record with another rule, which ends a ramp and keeps the copies."""
    return TrafficRecord(model, 0, rule.weights, rule.sticky, shadow=None if known is None else known.shadow)


def checked(read: Any, *arguments: Any) -> TrafficRule:
    """The rule that `read(*arguments)` returns. Raises WeirError (INVALID_ARG) where it raises ValueError."""
    try:
        rule: TrafficRule = read(*arguments)
    except ValueError as error:
        raise invalid(f"invalid traffic rule: {error}") from error
    return rule


def _percent(share: float) -> float:
    """A share of 1 in percent, as its client gave it: 7, not 7.000000000000001."""
    return round(100 * share, 9)


def _shown_ramp(ramp: RampState) -> dict[str, Any]:
    return {
        "version": str(ramp.version),
        "state": ramp.state,
        "step": ramp.step + 1,
        "steps": len(STEPS),
        "to": _percent(ramp.goal),
        "over_s": ramp.over_s,
        "abort_if": ramp.abort_if,
        "reason": ramp.reason,
    }


def _shown_output(row: OutputRow) -> dict[str, Any]:
    return {
        "values": row.values,
        "differing": row.differing,
        "largest_absolute": _shown_number(row.largest_absolute),
        "largest_relative": _shown_number(row.largest_relative),
        "labels": row.labels,
        "different_labels": row.different_labels,
    }


def _shown_number(value: float) -> float | str:
    """The number, or its name where JSON has none for it."""
    return value if math.isfinite(value) else str(value)


def _difference_text(name: str, row: OutputRow) -> str:
    labels = f", {row.different_labels} of {row.labels} labels" if row.different_labels else ""
    return (
        f"{name}: {row.differing} of {row.values} values differ by up to {row.largest_absolute:.4g} "
        f"({row.largest_relative:.3%}){labels}"
    )


def _shown_tensor(tensor: SampleTensor) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
    try:
        values = as_array(tensor.data, tensor.datatype, tensor.shape).ravel()[:_SHOWN_VALUES].tolist()
    except (ValueError, TypeError, KeyError):
        return shown | {"size": len(tensor.data)}
    readable = [
        value.decode(errors="replace") if isinstance(value, bytes) else _shown_number(value) for value in values
    ]
    return shown | {"first_values": readable}


def _shown(rule: TrafficRule) -> str:
    return weights_text(rule.weights) + (f", sticky by {rule.sticky}" if rule.sticky else "")
