"""Answers to `statistics.query` from anybody: taken as they are meant, or dropped."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.statistics import SchedulerCounters, WorkerCounters, pack_counters, unpack_counters

VERSION: dict[str, Any] = {
    "model": "m",
    "version": 1,
    **{name: [1, 2] for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")},
    "inference_count": 3,
    "execution_count": 2,
    "last_inference_ms": 5,
    "failures": {"BACKEND": 1},
    "batches": {4: [1, 2, 3, 4]},
    "responses": {0: {"success": [1, 2]}},
    "memory_usage": [["GPU", 0, 100]],
    "first_response_ms": {"bounds": [1.0], "counts": [1, 0], "sum": 0.5},
    "summaries": {"queue": {"count": 1, "sum_us": 2, "bins": {-1: 1}}},
}
WORKER: dict[str, Any] = {
    "worker": "w",
    "models": [VERSION],
    "gpus": {"GPU-0": {"utilization": 0.5, "memory_used_bytes": 7}},
    "host": {"host": "h", "utilization": 0.5, "memory_total_bytes": 2, "memory_used_bytes": 1},
    "a field of a later release": 1,
}
SCHEDULER: dict[str, Any] = {
    "scheduler": "s",
    "models": [
        {
            "model": "m",
            "lanes": {"live": {"depth": 1, "oldest_us": 2}},
            "versions": [{"version": 1, "pending": 1, "failures": {"REJECTED": 2}}],
        }
    ],
}


def test_counters_of_each_role() -> None:
    worker, scheduler = unpack_counters(pack_counters(WORKER)), unpack_counters(pack_counters(SCHEDULER))
    assert isinstance(worker, WorkerCounters)
    assert worker.models[0].batches == {4: [1, 2, 3, 4]}
    assert worker.models[0].memory_usage == [("GPU", 0, 100)]
    assert isinstance(scheduler, SchedulerCounters)
    assert scheduler.models[0].versions[0].failures == {"REJECTED": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", "1"),
        ("version", -1),
        ("success", [1]),
        ("success", [1, -1]),
        ("success", [1, 1.0]),
        ("inference_count", True),
        ("inference_count", 1 << 63),
        ("failures", {"BACKEND": "many"}),
        ("failures", {str(number): 1 for number in range(17)}),
        ("batches", {1: [1, 2, 3]}),
        ("summaries", {"queue": {"bins": {5000: 1}}}),
        ("first_response_ms", {"bounds": [1.0], "counts": [1], "sum": float("nan")}),
        ("first_response_ms", {"bounds": [1.0], "counts": [1], "sum": 1.0}),
    ],
)
def test_malformed_counters(name: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        unpack_counters(pack_counters({**WORKER, "models": [{**VERSION, name: value}]}))


@given(st.integers(0, 2**32), st.sampled_from([WORKER, SCHEDULER]))
def test_altered_counters_are_decoded_or_malformed(seed: int, message: dict[str, Any]) -> None:
    draw = random.Random(seed)
    branch: Any = (tree := copy.deepcopy(message))
    while True:
        key = draw.choice(list(branch) if isinstance(branch, dict) else list(range(len(branch))))
        if not isinstance(branch[key], (dict, list)) or not branch[key] or draw.random() < 0.2:
            break
        branch = branch[key]
    branch[key] = draw.choice([None, True, -1, 2**63, 1.5, "", "x", b"x", [], [[]], {}, {"a": 1}, {1: []}])
    data = msgpack.packb(tree)
    with suppress(MalformedMessage):
        unpack_counters(data[: draw.randrange(len(data) + 1)] if draw.random() < 0.2 else data)
