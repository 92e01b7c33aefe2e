"""The registry of custom metrics: sharing, lifetime, and the limit of its size."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from weir.schemas.core.errors import WeirError
from weir.worker.backend_api import custom_metrics as model_metrics
from weir.worker.backend_api.custom_metrics import LoadMetrics, ModelMetrics
from weir.worker.python_stub._weir_memory import MetricNumbers

COUNTER, GAUGE, HISTOGRAM = 0, 1, 2


@pytest.fixture
def metrics() -> Iterator[ModelMetrics]:
    metrics = ModelMetrics()
    yield metrics
    metrics.close()


@pytest.fixture
def load(metrics: ModelMetrics) -> LoadMetrics:
    return metrics.of_load("m", 1)


def families_of(metrics: ModelMetrics) -> dict[str, list[dict]]:
    return {family["name"]: family["series"] for family in metrics.snapshot()}


def test_processes_share_series_with_the_same_labels(metrics: ModelMetrics, load: LoadMetrics) -> None:
    one, other = load.process(), metrics.of_load("n", 3).process()
    one.family(1, "f", "first", COUNTER)
    other.family(7, "f", "second", COUNTER)
    first, _ = one.metric(1, {"a": "1", "b": "2"}, None)
    assert other.metric(7, {"b": "2", "a": "1"}, None)[0] == first
    for number in range(2):
        MetricNumbers(metrics.fd).add(first, 1, [(0, number + 1.5)])
    (family,) = metrics.snapshot()
    assert (family["description"], family["kind"]) == ("first", "counter")
    (series,) = family["series"]
    assert (series["value"], series["labels"]) == (4.0, {"a": "1", "b": "2"})
    assert series["versions"] == [("m", 1), ("n", 3)]


def test_a_family_of_another_kind_is_rejected(load: LoadMetrics) -> None:
    process = load.process()
    process.family(1, "f", "", COUNTER)
    with pytest.raises(WeirError, match="Family name already exists with different type"):
        process.family(2, "f", "", GAUGE)


@pytest.mark.parametrize("name", ["", "1a", "a b", "a-b", "__a", "a\n"])
def test_invalid_names_are_rejected(load: LoadMetrics, name: str) -> None:
    process = load.process()
    with pytest.raises(WeirError, match="Invalid metric name"):
        process.family(1, name, "", COUNTER)
    process.family(1, "f", "", HISTOGRAM)
    with pytest.raises(WeirError, match="Invalid label name"):
        process.metric(1, {name: "x"}, [1.0])


def test_bounds_of_buckets(metrics: ModelMetrics, load: LoadMetrics) -> None:
    process = load.process()
    process.family(1, "f", "", HISTOGRAM)
    for bounds in ([2.0, 1.0], [1.0, 1.0], [1.0, float("nan")]):
        with pytest.raises(WeirError, match="Bucket Boundaries must be strictly sorted"):
            process.metric(1, {}, bounds)
    with pytest.raises(WeirError, match="Invalid label name"):
        process.metric(1, {"le": "1"}, [1.0])
    assert process.metric(1, {}, [1.0, 2.0])[1] == (1.0, 2.0)
    assert process.metric(1, {}, [5.0])[1] == (1.0, 2.0)
    assert families_of(metrics)["f"][0] | {"versions": []} == {
        "labels": {},
        "versions": [],
        "bounds": (1.0, 2.0),
        "counts": [0, 0, 0],
        "value": 0.0,
    }


def test_values_of_a_process_stay_until_its_version_is_unloaded(metrics: ModelMetrics, load: LoadMetrics) -> None:
    before = load.process()
    before.family(1, "f", "", COUNTER)
    first, _ = before.metric(1, {}, None)
    MetricNumbers(metrics.fd).add(first, 1, [(0, 5.0)])
    after = load.process()  # the process before has died
    after.family(1, "f", "", COUNTER)
    assert after.metric(1, {}, None)[0] == first
    assert families_of(metrics)["f"][0]["value"] == 5.0
    load.close()
    assert families_of(metrics) == {}
    with pytest.raises(WeirError, match="unloaded"):
        after.family(2, "f", "", COUNTER)
    assert families_of(metrics) == {}


def test_a_family_without_holders_is_removed(metrics: ModelMetrics, load: LoadMetrics) -> None:
    process = load.process()
    for handle in (1, 2):
        process.family(handle, "f", "", COUNTER)
    first, _ = process.metric(1, {"a": "1"}, None)
    process.metric(2, {"a": "2"}, None)
    MetricNumbers(metrics.fd).write(first, [9.0])
    process.gone([1])
    assert [series["labels"] for series in families_of(metrics)["f"]] == [{"a": "2"}]
    # Its place is used again, from zero on.
    assert process.metric(2, {"a": "3"}, None)[0] == first
    assert [series["value"] for series in families_of(metrics)["f"]] == [0.0, 0.0]
    process.gone([2])
    assert families_of(metrics) == {}


def test_the_size_of_all_metrics_is_bounded(
    metrics: ModelMetrics, load: LoadMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_metrics, "MAX_METRICS_BYTES", 10_000)
    process = load.process()
    process.family(1, "f", "", COUNTER)
    for number in range(100):
        process.metric(1, {"a": f"{number:050}"}, None)
    with pytest.raises(WeirError, match="exceed 10000 bytes"):
        process.metric(1, {"a": "x" * 5000}, None)
    process.gone([1])
    process.family(2, "g", "", GAUGE)  # what has gone makes room
    process.metric(2, {"a": "x" * 5000}, None)


def test_changes_of_several_threads_all_count(metrics: ModelMetrics, load: LoadMetrics) -> None:
    process = load.process()
    process.family(1, "f", "", COUNTER)
    first, _ = process.metric(1, {}, None)
    numbers = MetricNumbers(metrics.fd)
    threads = [
        threading.Thread(target=lambda: [numbers.add(first, 1, [(0, 1.0)]) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert families_of(metrics)["f"][0]["value"] == 2000


@pytest.mark.parametrize(
    "question",
    [
        lambda process: process.family(1, 5, "", COUNTER),
        lambda process: process.family(1, "f", None, COUNTER),
        lambda process: process.family(1, "f", "", 3),
        lambda process: process.metric(9, {}, None),
        lambda process: process.gone([9]),
    ],
)
def test_requests_that_no_stub_sends_are_rejected(load: LoadMetrics, question) -> None:
    with pytest.raises((TypeError, KeyError)):
        question(load.process())


def test_invalid_counts_are_reported_as_zero(metrics: ModelMetrics, load: LoadMetrics) -> None:
    process = load.process()
    process.family(1, "f", "", HISTOGRAM)
    first, _ = process.metric(1, {}, [1.0, 2.0])
    MetricNumbers(metrics.fd).write(first, [float("nan"), -1.0, 1e300, 1.0])
    assert families_of(metrics)["f"][0]["counts"] == [0, 0, 0]


def test_indexes_outside_of_the_memory_are_rejected(metrics: ModelMetrics) -> None:
    with pytest.raises(ValueError, match="outside"):
        MetricNumbers(metrics.fd).add(1 << 20, 1, [(0, 1.0)])


def test_ended_processes_do_not_accumulate_memory(metrics: ModelMetrics, load: LoadMetrics) -> None:
    for number in range(20):
        process = load.process()
        for handle in (1, 2):  # a family that is created for each batch may exist twice when its process dies
            process.family(handle, "f", "", COUNTER)
            first, _ = process.metric(handle, {"all": "1"}, None)
            process.metric(handle, {"of": str(number % 3)}, None)
        MetricNumbers(metrics.fd).add(first, 1, [(0, 1.0)])
        process.close()
    series = families_of(metrics)["f"]
    assert [row["labels"] for row in series] == [{"all": "1"}, {"of": "0"}, {"of": "1"}, {"of": "2"}]
    assert series[0]["value"] == 20.0
    living = load.process()
    living.family(1, "f", "", COUNTER)
    load.close()
    living.close()
    assert families_of(metrics) == {}
