"""`SeriesHistory`: the load of each model over the last hour, in two resolutions, in bounded memory. Sans-IO.

A point of the coarse resolution is the mean of the fine points in its interval, but the largest one for quantiles, depths
and ages: a peak of a second remains visible after an hour. Values are single-precision floats, NaN where nothing was known.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = Mapping[str, float | None]
"""Values by column."""

MODEL_COLUMNS = (
    "requests_per_s",
    "failures_per_s",
    "p50_ms",
    "p99_ms",
    "queue_depth",
    "queue_oldest_s",
    "batch_size",
    "utilization",
)
"""The values of a model."""

CLUSTER_COLUMNS = (*MODEL_COLUMNS, "cpu_utilization", "gpu_utilization", "memory_bytes", "gpu_memory_bytes")
"""The values of the whole cluster."""

_PEAKS = frozenset({"p50_ms", "p99_ms", "queue_depth", "queue_oldest_s"})

MAX_SERIES = 2048
"""Models whose history is kept; the load of further ones is part of the totals only."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Points every `step_ms`, of which the last `points` are kept. `step_ms` is a multiple of that of the finest one."""

    step_ms: int
    points: int


RESOLUTIONS = (Resolution(1_000, 600), Resolution(10_000, 360))
"""Every second for ten minutes, every ten seconds for an hour, the finest one first."""


class Series:
    """The points of one model, or of the cluster, in one resolution: a ring of rows with a value for each column."""

    def __init__(self, resolution: Resolution, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._at_ms = np.zeros(resolution.points, np.int64)
        self._values = np.full((resolution.points, len(columns)), np.nan, np.float32)
        self._count = 0

    def add(self, at_ms: int, row: np.ndarray) -> None:
        """Adds a point; the oldest one goes when the ring is full. `row` has float32 values in the order of the columns."""
        place = self._count % len(self._at_ms)
        self._at_ms[place], self._values[place] = at_ms, row
        self._count += 1

    def since(self, since_ms: int) -> dict[str, Any]:
        """The points later than `since_ms`, oldest first: `at_ms` and each column as a list, None for NaN."""
        size = len(self._at_ms)
        order = np.arange(max(0, self._count - size), self._count) % size
        order = order[self._at_ms[order] > since_ms]
        return {
            "at_ms": self._at_ms[order].tolist(),
            **{name: _listed(self._values[order, place]) for place, name in enumerate(self._columns)},
        }


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


class _Tiers:
    """The series of one model in all resolutions."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self.series = [Series(resolution, columns) for resolution in RESOLUTIONS]
        self._pending: list[list[np.ndarray]] = [[] for _ in RESOLUTIONS]
        self._is_peak = np.array([name in _PEAKS for name in columns])
        self.last_ms = 0

    def add(self, at_ms: int, row: np.ndarray) -> None:
        for number, resolution in enumerate(RESOLUTIONS):
            if number == 0:
                self.series[0].add(at_ms, row)
                continue
            pending = self._pending[number]
            if pending and at_ms // resolution.step_ms != self.last_ms // resolution.step_ms:
                start_ms = self.last_ms // resolution.step_ms * resolution.step_ms
                self.series[number].add(start_ms, self._summed(np.array(pending)))
                pending.clear()
            pending.append(row)
        self.last_ms = at_ms

    def _summed(self, rows: np.ndarray) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a column without any value stays NaN
            row: np.ndarray = np.where(self._is_peak, np.nanmax(rows, axis=0), np.nanmean(rows, axis=0))
            return row.astype(np.float32)


class SeriesHistory:
    """The series of the cluster, and of each model by its identity."""

    def __init__(self) -> None:
        self._cluster = _Tiers(CLUSTER_COLUMNS)
        self._models: dict[str, _Tiers] = {}

    def add(self, at_ms: int, cluster: Values, models: Mapping[str, Values]) -> None:
        """Adds the values of one tick (unix ms), by column. Models without values for an hour are dropped."""
        self._cluster.add(at_ms, _row(CLUSTER_COLUMNS, cluster))
        for name, values in models.items():
            tiers = self._models.get(name)
            if tiers is None:
                if len(self._models) >= MAX_SERIES:
                    continue
                tiers = self._models[name] = _Tiers(MODEL_COLUMNS)
            tiers.add(at_ms, _row(MODEL_COLUMNS, values))
        kept_ms = RESOLUTIONS[-1].step_ms * RESOLUTIONS[-1].points
        for name in [name for name, tiers in self._models.items() if tiers.last_ms < at_ms - kept_ms]:
            del self._models[name]

    def since(self, model: str | None, since_ms: int) -> list[dict[str, Any]]:
        """The series of `model` (None: of the cluster) in each resolution, of points later than `since_ms`.

        Empty lists for a model without history.
        """
        tiers = self._cluster if model is None else self._models.get(model) or _Tiers(MODEL_COLUMNS)
        return [
            {"step_ms": resolution.step_ms, **series.since(since_ms)}
            for resolution, series in zip(RESOLUTIONS, tiers.series, strict=True)
        ]


def _row(columns: tuple[str, ...], values: Mapping[str, float | None]) -> np.ndarray:
    read = (values.get(name) for name in columns)
    return np.array([math.nan if value is None else value for value in read], np.float32)
