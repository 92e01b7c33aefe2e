"""The page in OpenMetrics, as `prometheus_client`'s strict parser reads it."""

from __future__ import annotations

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from weir.gateway.metrics.openmetrics import negotiate
from weir.gateway.metrics.text import CONTENT_TYPE, MetricFamily, Sample, counter, gauge, histogram_samples, render

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


def parsed(*families: MetricFamily) -> dict[str, tuple[str, dict[tuple[str, ...], float]]]:
    renderer, content_type = negotiate(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    return {
        family.name: (
            family.type,
            {(sample.name, *sample.labels.values()): sample.value for sample in family.samples},
        )
        for family in text_string_to_metric_families(renderer(families).decode())
    }


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain;version=0.0.4",
        "text/html",
        ";;;=,",
        "application/openmetrics-text;version=x;escaping=zz",
        "application/openmetrics-text;version=1..0",
        "application/openmetrics-text;version=9.9",
        "application/openmetrics-text;version=0.0.1",
    ],
)
def test_without_openmetrics_the_page_is_triton_s_text(accept: str) -> None:
    assert negotiate(accept) == (render, CONTENT_TYPE)


@pytest.mark.parametrize(
    "accept",
    [
        OPENMETRICS,
        "application/openmetrics-text",
        "text/html;version,Application/OpenMetrics-Text ; version = 1.0.0 ; escaping=allow-utf-8;q=0.5",
        "application/openmetrics-text;version=2.0.0,application/openmetrics-text;version=1.0.0",
    ],
)
def test_openmetrics_is_chosen_by_its_version(accept: str) -> None:
    assert negotiate(accept)[1] == "application/openmetrics-text; version=1.0.0; charset=utf-8"


def test_a_counter_keeps_its_name() -> None:
    families = counter("nv_inference_count", "Help", [Sample({"model": "m"}, 5)])
    assert parsed(families) == {"nv_inference_count": ("unknown", {("nv_inference_count", "m"): 5})}


def test_a_counter_called_total_is_a_counter() -> None:
    families = counter("weir_contained_failures_total", "Help", [Sample({"site": "a"}, 2)])
    assert parsed(families) == {"weir_contained_failures": ("counter", {("weir_contained_failures_total", "a"): 2})}


def test_a_gauge_and_a_family_without_series() -> None:
    assert parsed(gauge("weir_workers", "Help", [Sample({}, 0.5)]), gauge("weir_instances", "Help")) == {
        "weir_workers": ("gauge", {("weir_workers",): 0.5}),
        "weir_instances": ("gauge", {}),
    }


def test_histograms_of_several_series() -> None:
    samples = [
        *histogram_samples({"model": "a"}, [1, 2.5], [3, 0, 4], 9.5),
        *histogram_samples({"model": "b"}, [1, math.inf], [1, 0, 0], 1.0),
    ]
    kind, values = parsed(MetricFamily("h", "Help", "histogram", samples))["h"]
    assert kind == "histogram"
    assert values == {
        ("h_bucket", "1.0", "a"): 3,
        ("h_bucket", "2.5", "a"): 3,
        ("h_bucket", "+Inf", "a"): 7,
        ("h_count", "a"): 7,
        ("h_sum", "a"): 9.5,
        ("h_bucket", "1.0", "b"): 1,
        ("h_bucket", "+Inf", "b"): 1,
        ("h_count", "b"): 1,
        ("h_sum", "b"): 1,
    }


def test_a_histogram_with_bounds_below_zero_has_no_sum() -> None:
    samples = [
        *histogram_samples({"model": "a"}, [-1, 0, 2.5], [3, 0, 0, 4], -9.5),
        *histogram_samples({"model": "b"}, [1], [1, 0], 1.0),
    ]
    _, values = parsed(MetricFamily("h", "Help", "histogram", samples))["h"]
    assert values == {
        ("h_bucket", "-1.0", "a"): 3,
        ("h_bucket", "0.0", "a"): 3,
        ("h_bucket", "2.5", "a"): 3,
        ("h_bucket", "+Inf", "a"): 7,
        ("h_bucket", "1.0", "b"): 1,
        ("h_bucket", "+Inf", "b"): 1,
        ("h_count", "b"): 1,
        ("h_sum", "b"): 1,
    }


def test_summaries_keep_their_quantiles() -> None:
    samples = [Sample({}, 3, "_count"), Sample({}, 30, "_sum"), Sample({"quantile": "0.5"}, 10)]
    family = MetricFamily("nv_inference_request_summary_us", "Help", "summary", samples)
    assert parsed(family)["nv_inference_request_summary_us"][0] == "summary"
