"""Metrics of models, merged over workers: sums, last writes, and departed workers."""

from __future__ import annotations

import math

import pytest

from weir.cluster.counters.custom_metrics import CustomMetrics, drop_versions
from weir.gateway.metrics.custom import custom_families, merge_families
from weir.gateway.metrics.text import Sample, counter, render
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.statistics import FamilyCounters, SeriesCounters, WorkerCounters, pack_counters, unpack_counters


def family(kind: str, *series: SeriesCounters, name: str = "f") -> FamilyCounters:
    return FamilyCounters(name=name, description="what it is", kind=kind, series=list(series))


def series(value: float, changed_s: float = 0.0, **labels: str) -> SeriesCounters:
    return SeriesCounters(labels=labels, value=value, changed_s=changed_s, versions=[("m", 1)])


def observed(value: float, bounds: list[float], counts: list[int]) -> SeriesCounters:
    return SeriesCounters(labels={}, value=value, bounds=bounds, counts=counts)


def page(*workers: FamilyCounters, gone: FamilyCounters | None = None) -> list[str]:
    metrics = CustomMetrics()
    for reported in workers:
        metrics.add([reported])
    if gone is not None:
        metrics.add([gone], is_departed=True)
    return [
        line
        for line in render(custom_families(metrics.to_counters())).decode().splitlines()
        if not line.startswith("#")
    ]


def test_counters_are_summed_by_labels() -> None:
    one = family("counter", series(2, b="2", a="1"), series(1, a="x"))
    other = family("counter", series(3.5, a="1", b="2"))
    assert page(one, other) == ['f{a="1",b="2"} 5.5', 'f{a="x"} 1']
    assert page(one, gone=other) == ['f{a="1",b="2"} 5.5', 'f{a="x"} 1']


def test_the_last_write_of_a_gauge_counts_unless_its_worker_departed() -> None:
    assert page(family("gauge", series(1, 20.0)), family("gauge", series(2, 10.0))) == ["f 1"]
    assert page(family("gauge", series(1, 20.0)), gone=family("gauge", series(2, 30.0))) == ["f 1"]
    assert page(family("gauge", series(math.nan, 2.0))) == ["f NaN"]


def test_histograms_are_summed_where_their_buckets_are_the_same() -> None:
    one = family("histogram", observed(3.0, [1.0, 2.0], [1, 0, 1]))
    assert page(one, one) == [
        "f_count 4",
        "f_sum 6",
        'f_bucket{le="1"} 2',
        'f_bucket{le="2"} 2',
        'f_bucket{le="+Inf"} 4',
    ]
    other = family("histogram", observed(9.0, [5.0], [1, 1]))
    assert page(one, other)[:2] == ["f_count 2", "f_sum 9"]


def test_the_first_kind_of_a_name_counts() -> None:
    assert page(family("counter", series(1)), family("gauge", series(2))) == ["f 1"]


def test_a_family_without_series_is_left_out() -> None:
    metrics = CustomMetrics()
    metrics.add([family("counter")])
    assert list(custom_families(metrics.to_counters())) == []


def test_versions_that_are_unloaded_are_forgotten() -> None:
    shared = SeriesCounters(labels={}, value=1, versions=[("m", 1), ("n", 1)])
    families = [family("counter", series(1, a="1"), shared)]
    drop_versions(families, {("m", 1)})
    assert families[0].series == [shared]


def test_an_explicit_overflow_bucket_appears_once() -> None:
    reported = page(family("histogram", observed(2.0, [1.0, math.inf], [1, 2, 0])))
    assert [line for line in reported if "+Inf" in line] == ['f_bucket{le="+Inf"} 3']


def test_a_name_of_the_page_is_joined_where_the_kind_is_the_same() -> None:
    own = counter("nv_x", "the server's", [Sample({}, 1)])
    joined = list(merge_families([own], [counter("nv_x", "a model's", [Sample({"a": "b"}, 2)])]))
    assert [(f.help, len(f.samples)) for f in joined] == [("the server's", 2)]
    (twice,) = merge_families([own], [counter("nv_x", "a model's", [Sample({}, 2), Sample({"a": "b"}, 3)])])
    assert list(twice.samples) == [Sample({}, 1), Sample({"a": "b"}, 3)]
    other = own._replace(kind="gauge")
    assert list(merge_families([own], [other])) == [own]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"kind": "summary"},
        {"series": [{"labels": {"a": 1}, "value": 1.0}]},
        {"series": [{"labels": {}, "value": "x"}]},
        {"series": [{"labels": {}, "value": 1.0, "counts": [1], "bounds": [1.0]}]},
        {"series": [{"labels": {}, "value": 1.0, "versions": [["m"]]}]},
    ],
)
def test_malformed_families_are_dropped(wrong: dict) -> None:
    right = {"name": "f", "description": "", "kind": "counter", "series": [{"labels": {}, "value": float("inf")}]}
    counted = unpack_counters(pack_counters({"worker": "w", "models": [], "families": [right]}))
    assert isinstance(counted, WorkerCounters)
    assert counted.families[0].series[0].value == math.inf
    with pytest.raises(MalformedMessage):
        unpack_counters(pack_counters({"worker": "w", "models": [], "families": [right | wrong]}))
