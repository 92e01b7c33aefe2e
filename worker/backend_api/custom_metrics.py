"""`ModelMetrics`: the custom metrics that Python models define, of all models of one worker.

As in Triton, all models share one registry: models that define the same family share it, and series with the same labels
are one series. The values are in shared memory that the models' processes write
(`weir.worker.python_stub._weir_memory`); the worker only reads them.

A family exists as long as a model holds it. What a process held when it ended stays until its model is unloaded, so that
the next process continues the counts.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from weir.schemas.core.errors import internal, invalid, unavailable
from weir.schemas.wire.statistics import METRIC_KINDS
from weir.worker.python_stub._weir_memory import SIZE, MetricNumbers, create_memory

MAX_METRICS_BYTES = 2 * 1024 * 1024
"""The size limit of names, labels and values of all custom metrics of a worker."""

_GROWTH = 64 * 1024
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = "__"
_GAUGE, _HISTOGRAM = 1, 2

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class _Series:
    """A series, with the index and number of its values in shared memory. `holders` is ordered."""

    first: int
    count: int
    bounds: tuple[float, ...]
    size_bytes: int
    holders: dict[_Hold, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Family:
    name: str
    description: str
    kind: int
    series: dict[Labels, _Series] = field(default_factory=dict)
    holders: set[_Hold] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Hold:
    """What keeps a family, and those of its series that were used with it: a process's, or what ended ones have left."""

    load: LoadMetrics
    family: _Family


class LoadMetrics:
    """The metrics of one loaded version: what its processes hold, and what ended processes have left."""

    def __init__(self, metrics: ModelMetrics, model: str, version: int) -> None:
        self._metrics = metrics
        self.model = model
        self.version = version
        self.holds: set[_Hold] = set()
        self.left: dict[str, _Hold] = {}
        self.is_closed = False

    @property
    def fd(self) -> int:
        """The shared memory of all metrics."""
        return self._metrics.fd

    def process(self) -> ProcessMetrics:
        """The metrics of a new process."""
        return ProcessMetrics(self, self._metrics)

    def close(self) -> None:
        """Ends all holds of the version, which is unloaded."""
        self._metrics.end(self)


class ModelMetrics:
    """The registry of a worker. Thread-safe; `fd` is the shared memory that processes map."""

    def __init__(self) -> None:
        self.fd = create_memory("weir-model-metrics")
        self._numbers = MetricNumbers(self.fd)
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._size_bytes = 0

    def close(self) -> None:
        """Closes the memory; processes keep their mappings."""
        os.close(self.fd)

    def of_load(self, model: str, version: int) -> LoadMetrics:
        """The metrics of one loaded version of a model."""
        return LoadMetrics(self, model, version)

    def snapshot(self) -> list[dict[str, Any]]:
        """All families as the fields of `weir.schemas.wire.statistics.FamilyCounters`."""
        with self._lock:
            return [
                {
                    "name": family.name,
                    "description": family.description,
                    "kind": METRIC_KINDS[family.kind],
                    "series": [
                        self._snapshot_series(family, labels, series) for labels, series in family.series.items()
                    ],
                }
                for family in self._families.values()
            ]

    def _snapshot_series(self, family: _Family, labels: Labels, series: _Series) -> dict[str, Any]:
        values = self._numbers.read(series.first, series.count)
        versions = dict.fromkeys((hold.load.model, hold.load.version) for hold in series.holders)
        fields: dict[str, Any] = {"labels": dict(labels), "versions": list(versions)}
        if family.kind == _HISTOGRAM:
            *counts, total = values
            return fields | {"bounds": series.bounds, "counts": [_whole(count) for count in counts], "value": total}
        return fields | {"value": values[0], "changed_s": values[1] if family.kind == _GAUGE else 0.0}

    def hold(self, load: LoadMetrics, name: str, description: str, kind: int) -> _Hold:
        """Lets a process hold a family, which is created if it does not exist. Raises WeirError in Triton's words."""
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            raise internal("Invalid metric name")
        with self._lock:
            if load.is_closed:
                raise unavailable("the model is unloaded")
            family = self._families.get(name)
            if family is None:
                self._reserve(_size(name, description))
                family = self._families[name] = _Family(name, description, kind)
            elif family.kind != kind:
                raise invalid("Family name already exists with different type")
            hold = _Hold(load, family)
            family.holders.add(hold)
            load.holds.add(hold)
            return hold

    def use(self, hold: _Hold, labels: Mapping[str, str], bounds: Sequence[float] | None) -> _Series:
        """Lets a process hold a series of a family, which is created if it does not exist. Raises as `hold`."""
        family = hold.family
        for name in labels:
            if not _LABEL.fullmatch(name) or name.startswith(_RESERVED) or (name == "le" and bounds is not None):
                raise internal("Invalid label name")
        bounds = tuple(bounds or ())
        if not all(low < high for low, high in pairwise(bounds)):
            raise internal("Bucket Boundaries must be strictly sorted")
        key = tuple(sorted(labels.items()))
        with self._lock:
            if hold not in family.holders:
                raise unavailable("the model is unloaded")
            series = family.series.get(key)
            if series is None:
                count = len(bounds) + 2 if family.kind == _HISTOGRAM else 1 + (family.kind == _GAUGE)
                size_bytes = _size(*labels, *labels.values()) + count * SIZE
                self._reserve(size_bytes)
                series = family.series[key] = _Series(self._allocate(count), count, bounds, size_bytes)
            series.holders[hold] = None
            return series

    def release(self, hold: _Hold) -> None:
        """Ends a hold, which the model has dropped; removes series and families that nothing else holds."""
        with self._lock:
            self._release(hold, None)

    def leave(self, hold: _Hold) -> None:
        """Keeps the hold of a process that has ended, merged with what others of its version have left."""
        with self._lock:
            heir = hold.load.left.setdefault(hold.family.name, hold)
            if heir is not hold:
                self._release(hold, heir)

    def end(self, load: LoadMetrics) -> None:
        """Ends all holds of a version."""
        with self._lock:
            load.is_closed = True
            for hold in list(load.holds):
                self._release(hold, None)

    def _release(self, hold: _Hold, heir: _Hold | None) -> None:
        if hold not in hold.load.holds:
            return  # its version was unloaded
        hold.load.holds.remove(hold)
        family = hold.family
        for key, series in list(family.series.items()):
            if hold in series.holders:
                del series.holders[hold]
                if heir is not None:
                    series.holders[heir] = None
                elif not series.holders:
                    del family.series[key]
                    self._free.setdefault(series.count, []).append(series.first)
                    self._size_bytes -= series.size_bytes
        family.holders.remove(hold)
        if not family.holders:
            del self._families[family.name]
            self._size_bytes -= _size(family.name, family.description)

    def _reserve(self, size_bytes: int) -> None:
        if self._size_bytes + size_bytes > MAX_METRICS_BYTES:
            raise unavailable(f"the custom metrics of the models exceed {MAX_METRICS_BYTES} bytes")
        self._size_bytes += size_bytes

    def _allocate(self, count: int) -> int:
        free = self._free.get(count)
        first = free.pop() if free else self._end
        if first == self._end:
            self._end += count
            length = -(-self._end * SIZE // _GROWTH) * _GROWTH
            if length > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, length)
        self._numbers.write(first, [0.0] * count)
        return first


class ProcessMetrics:
    """Handles the requests of one process, which identifies its families by handles. Runs in the event loop.

    Raises TypeError and KeyError for requests that no stub sends, WeirError for errors that the process gets.
    """

    def __init__(self, load: LoadMetrics, metrics: ModelMetrics) -> None:
        self._load = load
        self._metrics = metrics
        self._families: dict[int, _Hold] = {}

    def family(self, handle: int, name: str, description: str, kind: int) -> None:
        """Creates a family for the process, or holds the existing one."""
        if not isinstance(name, str) or not isinstance(description, str) or kind not in range(len(METRIC_KINDS)):
            raise TypeError("a family with fields of other types")
        self._families[handle] = self._metrics.hold(self._load, name, description, kind)

    def metric(
        self, handle: int, labels: Mapping[str, str], bounds: Sequence[float] | None
    ) -> tuple[int, tuple[float, ...]]:
        """Creates a series for the process, or holds the existing one; returns its index and the bounds of its buckets."""
        if not all(isinstance(text, str) for row in labels.items() for text in row):
            raise TypeError("labels of other types")
        if bounds is not None and not all(isinstance(bound, float) for bound in bounds):
            raise TypeError("bounds of other types")
        series = self._metrics.use(self._families[handle], labels, bounds)
        return series.first, series.bounds

    def gone(self, handles: Sequence[int]) -> None:
        """Ends the process's holds of these families."""
        for handle in handles:
            self._metrics.release(self._families.pop(handle))

    def close(self) -> None:
        """Keeps the holds of the process, which has ended."""
        for hold in self._families.values():
            self._metrics.leave(hold)
        self._families.clear()


def _whole(count: float) -> int:
    # Processes write the memory: an invalid count is reported as 0, and must not hide other metrics.
    return int(count) if 0 <= count < 1 << 53 else 0


def _size(*texts: str) -> int:
    return sum(len(text.encode(errors="replace")) for text in texts) + SIZE
