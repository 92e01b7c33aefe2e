"""The text format of the metrics page, as Prometheus and Triton's users read it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from weir.cluster.counters.version_totals import VersionTotals
from weir.gateway.metrics.text import MetricFamily, Sample, counter, gauge, histogram_samples, render
from weir.gateway.metrics.triton import ServedVersion, device_families, model_families, model_labels
from weir.gateway.metrics.weir import _sum
from weir.schemas.wire.statistics import HistogramCounters, WorkerCounters
from weir.telemetry.instruments import SizeHistogram
from weir.telemetry.metrics_config import MetricsConfig


def test_numbers_are_written_as_triton_writes_them() -> None:
    samples = [Sample({"a": "x"}, value) for value in (5, 5.0, 0.25, float("nan"), 10**17)]
    assert render([gauge("m", "Help", samples)]).decode() == (
        '# HELP m Help\n# TYPE m gauge\nm{a="x"} 5\nm{a="x"} 5\nm{a="x"} 0.25\nm{a="x"} NaN\nm{a="x"} 100000000000000000\n'
    )


def test_a_family_without_series_has_its_lines() -> None:
    assert render([counter("c", "Help")]) == b"# HELP c Help\n# TYPE c counter\n"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_whatever_a_label_holds_it_is_read_back(value: str) -> None:
    told = render([gauge("m", "Help", [Sample({"model": value}, 1)])]).decode()
    ((sample,),) = [family.samples for family in text_string_to_metric_families(told)]
    assert sample.labels == {"model": value}


def test_histograms_are_cumulative() -> None:
    told = render([MetricFamily("h", "Help", "histogram", list(histogram_samples({}, [1, 2.5], [3, 0, 4], 9.5)))])
    assert told.decode().splitlines()[2:] == [
        "h_count 7",
        "h_sum 9.5",
        'h_bucket{le="1"} 3',
        'h_bucket{le="2.5"} 3',
        'h_bucket{le="+Inf"} 7',
    ]


def served(tags: dict[str, str] | None = None, has_cache: bool = False) -> ServedVersion:
    return ServedVersion(VersionTotals("m", 3), tags or {}, 0.5, has_cache)


def test_tags_are_labels_whatever_they_are_called() -> None:
    assert served({"team": "a", "a-b": "c"}).labels == {"_a_b": "c", "_team": "a", "model": "m", "version": "3"}
    assert list(served({"z": "a"}).labels) == ["_z", "model", "version"]


def test_with_namespacing_the_namespace_is_a_label() -> None:
    version = ServedVersion(VersionTotals("/a::m", 3), {"team": "a"}, 0.5, False, "/a")
    assert list(version.labels.items()) == [("_team", "a"), ("model", "m"), ("namespace", "/a"), ("version", "3")]
    assert model_labels("m", "/a") == {"model": "m", "namespace": "/a"}
    assert model_labels("m", "") == {"model": "m"}


def test_a_model_that_caches_has_the_cache_s_series_and_no_summary_of_requests() -> None:
    config = MetricsConfig(summary_latencies=True)
    for has_cache in (False, True):
        families = {family.name: family for family in model_families([served(has_cache=has_cache)], config)}
        assert ("nv_cache_num_hits_per_model" in families) == has_cache
        assert ("nv_cache_hit_summary_per_model" in families) == has_cache
        assert ("nv_inference_request_summary_us" in families) != has_cache
        assert families["nv_inference_queue_summary_us"].samples
    families = {family.name: family for family in model_families([served(has_cache=True)], MetricsConfig())}
    assert not [name for name in families if "summary" in name or "histogram" in name]


def test_gpus_appear_once_however_many_workers_report_them() -> None:
    def worker(name: str, host: str, energy_j: float) -> WorkerCounters:
        reading = {"utilization": 0.5, "memory_total_bytes": 10, "energy_j": energy_j}
        of_host = {"host": host, "utilization": energy_j / 10, "memory_total_bytes": 100, "memory_used_bytes": 40}
        return msgspec.convert(
            {
                "worker": name,
                "models": [],
                "gpus": {"GPU-1": reading},
                "host": of_host,
                "pinned_total_bytes": 1000,
                "pinned_used_bytes": int(energy_j),
            },
            WorkerCounters,
        )

    told = device_families([worker("a", "x", 2.0), worker("b", "x", 4.0), worker("c", "y", 2.0)])
    samples = {family.name: family.samples for family in told}
    assert samples["nv_energy_consumption"] == [({"gpu_uuid": "GPU-1"}, 4.0, "")]
    assert samples["nv_gpu_memory_total_bytes"] == [({"gpu_uuid": "GPU-1"}, 10, "")]
    assert samples["nv_gpu_power_usage"] == []
    assert samples["nv_cpu_memory_total_bytes"] == [({}, 200, "")]
    assert samples["nv_cpu_utilization"] == [({}, (0.4 + 0.2) / 2, "")]
    assert samples["nv_pinned_memory_pool_total_bytes"] == [({}, 3000, "")]
    assert samples["nv_pinned_memory_pool_used_bytes"] == [({}, 8, "")]


@given(*[st.lists(st.integers(0, 1 << 35), max_size=20)] * 2)
def test_histograms_of_sizes_are_summed_though_one_has_more_buckets(first: list[int], second: list[int]) -> None:
    def histogram(sizes: list[int]) -> HistogramCounters:
        counted = SizeHistogram()
        for size in sizes:
            counted.add(size)
        return HistogramCounters(**counted.snapshot())

    assert _sum(histogram(first), histogram(second)) == histogram(first + second)
