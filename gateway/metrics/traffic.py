"""The metrics of models with a traffic rule, by version: of all callers in the cluster, so the same at every gateway."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from weir.calls.traffic.comparison import ComparisonTotals
from weir.calls.traffic.counters import ArmCounters, ArmKey
from weir.gateway.metrics.text import Labels, MetricFamily, Sample, counter, gauge, histogram_samples
from weir.schemas.wire.traffic import DONE, RUNNING, RampState

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def traffic_families(
    totals: Mapping[ArmKey, ArmCounters],
    comparisons: Mapping[tuple[str, int], ComparisonTotals],
    shares: Mapping[tuple[str, int], float],
    ramps: Iterable[tuple[str, RampState]],
    served: Mapping[str, Labels],
) -> Iterator[MetricFamily]:
    """`comparisons` (with copies) and `shares` (of versions now) are by model and version; `ramps` are those of models,
    `served` the labels of models by identity.
    """
    rows = [
        ({**served[key.model], "version": str(key.version), "arm": key.arm}, arm)
        for key, arm in totals.items()
        if key.model in served
    ]
    yield counter(
        "weir_version_requests_total",
        "Requests that ended, of models with a traffic rule, by version and by how it was chosen",
        (Sample(labels, arm.requests) for labels, arm in rows),
    )
    yield counter(
        "weir_version_failures_total",
        "Requests that ended with an error, of models with a traffic rule",
        (Sample(labels, arm.failures) for labels, arm in rows),
    )
    yield MetricFamily(
        "weir_version_duration_seconds",
        "Duration of requests that succeeded, of models with a traffic rule, from their arrival at the gateway",
        "histogram",
        [sample for labels, arm in rows for sample in _histogram(labels, arm)],
    )
    yield from _comparison_families(comparisons, served)
    yield gauge(
        "weir_version_traffic_share",
        "Share of the requests without a version that the version gets now [0.0 - 1.0]",
        (
            Sample({**served[model], "version": str(version)}, share)
            for (model, version), share in sorted(shares.items())
            if model in served
        ),
    )
    yield from _ramp_families(ramps, served)


def _comparison_families(
    comparisons: Mapping[tuple[str, int], ComparisonTotals], served: Mapping[str, Labels]
) -> Iterator[MetricFamily]:
    rows = [
        ({**served[model], "version": str(version)}, sums)
        for (model, version), sums in comparisons.items()
        if model in served
    ]
    yield counter(
        "weir_shadow_compared_total",
        "Live requests whose responses were compared with the responses of their copies on the version",
        (Sample(labels, sums.compared) for labels, sums in rows),
    )
    yield counter(
        "weir_shadow_differing_total",
        "Live requests whose responses differ from the responses of their copies",
        (Sample(labels, sums.differing) for labels, sums in rows),
    )
    outputs = [({**labels, "output": name}, row) for labels, sums in rows for name, row in sums.outputs.items()]
    yield counter(
        "weir_shadow_labels_total",
        "Labels that were compared, by output",
        (Sample(labels, row.labels) for labels, row in outputs),
    )
    yield counter(
        "weir_shadow_different_labels_total",
        "Labels that differ, by output",
        (Sample(labels, row.different_labels) for labels, row in outputs),
    )
    yield gauge(
        "weir_shadow_largest_relative_difference",
        "Largest relative difference of a compared value, by output",
        (Sample(labels, row.largest_relative) for labels, row in outputs),
    )


def _ramp_families(ramps: Iterable[tuple[str, RampState]], served: Mapping[str, Labels]) -> Iterator[MetricFamily]:
    rows = [({**served[model], "version": str(ramp.version)}, ramp) for model, ramp in ramps if model in served]
    yield gauge(
        "weir_traffic_ramp_step",
        "Number of the step of the model's last ramp, from 1 on",
        (Sample(labels, ramp.step + 1) for labels, ramp in rows),
    )
    yield gauge(
        "weir_traffic_ramp_state",
        "State of the model's last ramp: 1 running, 0 done, -1 aborted because the version was worse",
        (Sample(labels, {RUNNING: 1, DONE: 0}.get(ramp.state, -1)) for labels, ramp in rows),
    )


def _histogram(labels: Labels, arm: ArmCounters) -> Iterator[Sample]:
    counts, total_s = [0] * (len(BOUNDS_S) + 1), 0.0
    for bin, count in arm.sketch.bins().items():
        duration_s = arm.sketch.duration_us(bin) / 1e6
        counts[bisect_left(BOUNDS_S, duration_s)] += count
        total_s += duration_s * count
    yield from histogram_samples(labels, BOUNDS_S, counts, round(total_s, 6))
