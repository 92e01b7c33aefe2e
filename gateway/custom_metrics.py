"""`CustomMetrics`: what models count themselves, over all workers.

In Triton all instances share one registry; here those of one worker do, and what workers tell is put together: counters
and histograms are summed, of a gauge the value counts that was written last. A worker that has gone stays in counters and
histograms, for these never go back; its gauges say nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.metrics.text import Family, Sample, histogram_samples
from schemas.statistics import FamilyCounters, SeriesCounters

_Labels = tuple[tuple[str, str], ...]


class CustomMetrics:
    """See the module."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[FamilyCounters, dict[_Labels, SeriesCounters]]] = {}

    def add(self, families: Iterable[FamilyCounters], has_gone: bool = False) -> None:
        """Adds what one worker told; `has_gone` says that these were its last words."""
        for told in families:
            if has_gone and told.kind == "gauge":
                continue
            family, all_series = self._families.setdefault(told.name, (told, {}))
            if family.kind != told.kind:
                continue  # of two kinds of one name on different workers, one only can be told
            for series in told.series:
                labels = tuple(sorted(series.labels.items()))
                known = all_series.get(labels)
                all_series[labels] = series if known is None else _together(family.kind, known, series)

    def told(self) -> list[FamilyCounters]:
        """The sums, in the form in which they came."""
        return [
            family.model_copy(update={"series": list(all_series.values())})
            for family, all_series in self._families.values()
        ]

    def families(self) -> Iterator[Family]:
        """The families of the metrics page."""
        for name, (family, all_series) in sorted(self._families.items()):
            samples: list[Sample] = []
            for labels, series in sorted(all_series.items()):
                if family.kind == "histogram":
                    samples += histogram_samples(dict(labels), series.bounds, series.counts, series.value)
                else:
                    samples.append(Sample(dict(labels), series.value))
            if samples:  # as in Triton, a family without series is not told of
                yield Family(name, family.description, family.kind, samples)


def forget_versions(families: list[FamilyCounters], versions: Iterable[tuple[str, int]]) -> None:
    """Takes out the series that belong to no other version of a model than these; models by their plain names."""
    gone = set(versions)
    for family in families:
        family.series = [series for series in family.series if not gone.issuperset(series.versions)]


def with_families(page: Iterable[Family], custom: Iterable[Family]) -> Iterator[Family]:
    """The page and models' own metrics; those of a name that the page has already are samples of its family, as in Triton,
    where they are of its kind, and left out where not. So is a sample of labels that are there: none comes twice.
    """
    added = {family.name: family for family in custom}
    for family in page:
        more = added.pop(family.name, None)
        if more is not None and more.kind == family.kind:
            samples = list(family.samples)
            own = {(frozenset(sample.labels.items()), sample.suffix) for sample in samples}
            samples += [one for one in more.samples if (frozenset(one.labels.items()), one.suffix) not in own]
            family = family._replace(samples=samples)
        yield family
    yield from added.values()


def _together(kind: str, first: SeriesCounters, second: SeriesCounters) -> SeriesCounters:
    if kind == "gauge":
        return max(first, second, key=lambda series: series.changed_s)
    if first.bounds != second.bounds:
        return second  # buckets that differ can't be summed: the model has been changed since
    return second.model_copy(
        update={
            "value": first.value + second.value,
            "counts": [one + other for one, other in zip(first.counts, second.counts, strict=True)],
            "versions": list(dict.fromkeys([*first.versions, *second.versions])),
        }
    )
