"""What a server did meanwhile, from its statistics before and after."""

from __future__ import annotations

import pytest

from weir.perf.measurement.server_statistics import ServerCounters, ServerFigures


def row(requests: int, rows: int, runs: dict[int, int], queue_ns: int, infer_ns: int, as_text: bool = False) -> dict:
    number = str if as_text else int
    durations = {"success": (requests, 1), "queue": (requests, queue_ns), "compute_infer": (requests, infer_ns)}
    return {
        "name": "m",
        "inference_count": number(rows),
        "execution_count": number(sum(runs.values())),
        "inference_stats": {
            name: {"count": number(count), "ns": number(ns)} for name, (count, ns) in durations.items()
        },
        "batch_stats": [
            {"batch_size": number(size), "compute_infer": {"count": number(count), "ns": 1}}
            for size, count in runs.items()
        ],
    }


@pytest.mark.parametrize("as_text", [False, True])
def test_the_difference_of_two_readings(as_text: bool) -> None:
    before = ServerCounters.read([row(10, 10, {1: 10}, 1_000, 5_000, as_text)])
    after = ServerCounters.read([row(30, 50, {1: 12, 4: 8}, 41_000_000, 20_005_000, as_text)])
    figures = ServerFigures.between(before, after)
    assert (figures.inferences, figures.executions) == (40, 10)
    assert figures.batch_size == 4
    assert figures.batches == {1: 2, 4: 8}
    assert figures.queue_ms == pytest.approx(2.05, rel=0.01)
    assert figures.compute_infer_ms == pytest.approx(1.0)
    assert figures.compute_ms == pytest.approx(1.0)
    assert figures.cache_hits == 0


def test_versions_are_added_and_what_is_missing_is_zero() -> None:
    counters = ServerCounters.read([row(1, 1, {1: 1}, 1, 1), row(2, 4, {2: 2}, 2, 2), {"name": "m"}])
    assert (counters.inferences, counters.executions, counters.batches) == (5, 3, {1: 1, 2: 2})


def test_nothing_in_between_is_zero() -> None:
    same = ServerCounters.read([row(1, 1, {1: 1}, 1, 1)])
    figures = ServerFigures.between(same, same)
    assert (figures.batch_size, figures.queue_ms, figures.batches) == (0, 0, {})
