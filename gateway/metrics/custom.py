"""The metrics that models define themselves, as families of the metrics page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weir.gateway.metrics.text import MetricFamily, Sample, histogram_samples
from weir.schemas.wire.statistics import FamilyCounters, SeriesCounters


def custom_families(families: Iterable[FamilyCounters]) -> Iterator[MetricFamily]:
    """The families and their series in the order of names and labels. As in Triton, a family without series is left out."""
    for family in sorted(families, key=lambda family: family.name):
        samples = [sample for series in sorted(family.series, key=_labels) for sample in _samples(family.kind, series)]
        if samples:
            yield MetricFamily(family.name, family.description, family.kind, samples)


def merge_families(page: Iterable[MetricFamily], custom: Iterable[MetricFamily]) -> Iterator[MetricFamily]:
    """The families of `page` and of `custom`. As in Triton, a custom family with the name and the kind of a family of the
    page adds its samples to it. It is left out if its kind differs, and so are samples whose labels are there already.
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


def _labels(series: SeriesCounters) -> list[tuple[str, str]]:
    return sorted(series.labels.items())


def _samples(kind: str, series: SeriesCounters) -> Iterable[Sample]:
    labels = dict(_labels(series))
    if kind == "histogram":
        return histogram_samples(labels, series.bounds, series.counts, series.value)
    return [Sample(labels, series.value)]
