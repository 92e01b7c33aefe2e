"""OpenMetrics by content negotiation, through `prometheus_client`.

Scrapers that don't accept OpenMetrics get the text format of `weir.gateway.metrics.text`. In OpenMetrics the sample of
a counter must end with `_total`. Triton's names and most of Weir's don't, and names are an interface: these counters
have the type `unknown`, so that a series has the same name in both formats. The library needs about four times as long
as the text format (20 ms instead of 5 for 200 models), so the endpoint runs it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from weir.gateway.metrics.text import CONTENT_TYPE, MetricFamily, Sample, render

Renderer = Callable[[Iterable[MetricFamily]], bytes]

_TOTAL = "_total"


class FamilyCollector(Collector):
    """The families of one scrape, as `prometheus_client` collects them."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Each family as a metric of `prometheus_client`."""
        for name, help, kind, samples in self._families:
            if kind == "counter":
                kind = "counter" if name.endswith(_TOTAL) else "unknown"
            metric = Metric(name.removesuffix(_TOTAL) if kind == "counter" else name, help, kind)
            if kind == "histogram":
                _add_histogram(metric, samples)
            else:
                for labels, value, suffix in samples:
                    metric.add_sample(name + suffix, dict(labels), value)
            yield metric


def _add_histogram(metric: Metric, samples: Iterable[Sample]) -> None:
    """Adds the samples of a histogram: in OpenMetrics the buckets of each series come before its count and sum.

    A series with a bound below zero has neither there: its sum might fall, and there is no count without a sum.
    """
    totals: list[Sample] = []
    is_negative = False
    for sample in samples:
        if sample.suffix != "_bucket":
            totals.append(sample)
            continue
        bound = sample.labels["le"]
        is_negative = is_negative or bound.startswith("-")
        metric.add_sample(
            f"{metric.name}_bucket",
            {**sample.labels, "le": bound if bound == "+Inf" else repr(float(bound))},
            sample.value,
        )
        if bound == "+Inf":
            for labels, value, suffix in () if is_negative else totals:
                metric.add_sample(metric.name + suffix, dict(labels), value)
            totals.clear()
            is_negative = False


def negotiate(accept: str) -> tuple[Renderer, str]:
    """The renderer of the page for a request with this `Accept` header, and its content type.

    The page is in OpenMetrics 1.0.0 if the header names that, or no version of it. Anything else, malformed or not, gets
    the text format.
    """
    for media_range in accept.split(","):
        media, *parameters = (part.strip().lower() for part in media_range.split(";"))
        versions = [
            text.partition("=")[2].strip() for text in parameters if text.partition("=")[0].strip() == "version"
        ]
        if media == "application/openmetrics-text" and versions in ([], ["1.0.0"]):
            return _render_openmetrics, CONTENT_TYPE_LATEST
    return render, CONTENT_TYPE


def _render_openmetrics(families: Iterable[MetricFamily]) -> bytes:
    page: bytes = generate_latest(FamilyCollector(families))  # type: ignore[no-untyped-call]
    return page
