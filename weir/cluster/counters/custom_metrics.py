"""`CustomMetrics`: the metrics that models define themselves, merged over all workers.

In Triton all instances share one registry; here the instances of one worker do, and the gateway merges the registries:
counters and histograms are summed, and of a gauge the value that was written last counts. The counters and histograms of
a departed worker stay in the sums, because these never decrease; its gauges are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from weir.schemas.wire.statistics import FamilyCounters, SeriesCounters

_Labels = tuple[tuple[str, str], ...]


class CustomMetrics:
    """The merged families of the workers that were added."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[FamilyCounters, dict[_Labels, SeriesCounters]]] = {}

    def add(self, families: Iterable[FamilyCounters], is_departed: bool = False) -> None:
        """Adds the families of one worker; `is_departed` if the worker has departed."""
        for reported in families:
            if is_departed and reported.kind == "gauge":
                continue
            family, all_series = self._families.setdefault(reported.name, (reported, {}))
            if family.kind != reported.kind:
                continue  # workers disagree about the kind of this family: the first one counts
            for series in reported.series:
                labels = tuple(sorted(series.labels.items()))
                merged = all_series.get(labels)
                all_series[labels] = series if merged is None else _merged(family.kind, merged, series)

    def to_counters(self) -> list[FamilyCounters]:
        """The merged families in the form in which workers send them."""
        return [replace(family, series=list(all_series.values())) for family, all_series in self._families.values()]


def drop_versions(families: list[FamilyCounters], versions: Iterable[tuple[str, int]]) -> None:
    """Removes the series that belong to these versions of models only; models by their plain names."""
    gone = set(versions)
    for family in families:
        family.series = [series for series in family.series if not gone.issuperset(series.versions)]


def _merged(kind: str, first: SeriesCounters, second: SeriesCounters) -> SeriesCounters:
    if kind == "gauge":
        return max(first, second, key=lambda series: series.changed_s)
    if first.bounds != second.bounds:
        return second  # histograms with different buckets can't be summed: the model was changed meanwhile
    return replace(
        second,
        value=first.value + second.value,
        counts=[one + other for one, other in zip(first.counts, second.counts, strict=True)],
        versions=list(dict.fromkeys([*first.versions, *second.versions])),
    )
