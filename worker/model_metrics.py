"""`ModelMetrics`: the metrics that Python models make themselves, of all models of one worker.

As in Triton there is one registry for all of them: whoever names a family that is there gets it, and series of the same
labels are one. What they count lies in memory that the models' processes change themselves
(`worker.python_stub._weir_metric_numbers`); here it is only read.

A family is there as long as anybody has it. What a process had when it ended stays until its model is unloaded, for the
process that follows it goes on counting where it stopped.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from schemas.errors import internal, invalid, unavailable
from schemas.statistics import METRIC_KINDS
from worker.python_stub._weir_memory import create_memory
from worker.python_stub._weir_metric_numbers import SIZE, MetricNumbers

MAX_METRICS_BYTES = 2 * 1024 * 1024
"""Names, labels and numbers of the metrics that the models of one worker make."""

_GROWTH = 64 * 1024
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = "__"
_GAUGE, _HISTOGRAM = 1, 2

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class _Series:
    first: int
    count: int
    bounds: tuple[float, ...]
    size_bytes: int
    holders: list[_Holding] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Family:
    name: str
    description: str
    kind: int
    series: dict[Labels, _Series] = field(default_factory=dict)
    holders: list[_Holding] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Holding:
    """A family as one process has it: `series` are those it has used."""

    family: _Family
    load: LoadMetrics
    series: set[Labels] = field(default_factory=set)


class ModelMetrics:
    """See the module. For any thread; `fd` is the memory that processes map."""

    def __init__(self) -> None:
        self.fd = create_memory("weir-model-metrics")
        self._numbers = MetricNumbers(self.fd)
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._size_bytes = 0

    def close(self) -> None:
        """Gives the memory up; processes keep what they have mapped."""
        os.close(self.fd)

    def of_load(self, model: str, version: int) -> LoadMetrics:
        """The metrics of one loaded version of a model."""
        return LoadMetrics(self, model, version)

    def snapshot(self) -> list[dict[str, Any]]:
        """What stands where: the fields of `schemas.statistics.FamilyCounters`."""
        with self._lock:
            return [
                {
                    "name": family.name,
                    "description": family.description,
                    "kind": METRIC_KINDS[family.kind],
                    "series": [self._told(family, labels, series) for labels, series in family.series.items()],
                }
                for family in self._families.values()
            ]

    def _told(self, family: _Family, labels: Labels, series: _Series) -> dict[str, Any]:
        values = self._numbers.read(series.first, series.count)
        versions = dict.fromkeys((holding.load.model, holding.load.version) for holding in series.holders)
        told: dict[str, Any] = {"labels": dict(labels), "versions": list(versions)}
        if family.kind == _HISTOGRAM:
            *counts, total = values
            return told | {"bounds": series.bounds, "counts": [_whole(count) for count in counts], "value": total}
        return told | {"value": values[0], "changed_s": values[1] if family.kind == _GAUGE else 0.0}

    def hold(self, load: LoadMetrics, name: str, description: str, kind: int) -> _Holding:
        """A process takes a family, which is made if it is not there. Raises WeirError with Triton's reason."""
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            raise internal("Invalid metric name")
        with self._lock:
            family = self._families.get(name)
            if family is None:
                self._take(_size(name, description))
                family = self._families[name] = _Family(name, description, kind)
            elif family.kind != kind:
                raise invalid("Family name already exists with different type")
            holding = _Holding(family, load)
            family.holders.append(holding)
            return holding

    def use(self, holding: _Holding, labels: Mapping[str, str], bounds: Sequence[float] | None) -> _Series:
        """A process takes a series of a family that it holds, made if it is not there. Raises WeirError as `hold`."""
        family = holding.family
        for name in labels:
            if not _LABEL.fullmatch(name) or name.startswith(_RESERVED) or (name == "le" and bounds is not None):
                raise internal("Invalid label name")
        bounds = tuple(bounds or ())
        if not all(low < high for low, high in pairwise(bounds)):
            raise internal("Bucket Boundaries must be strictly sorted")
        key = tuple(sorted(labels.items()))
        with self._lock:
            series = family.series.get(key)
            if series is None:
                count = len(bounds) + 2 if family.kind == _HISTOGRAM else 1 + (family.kind == _GAUGE)
                size_bytes = _size(*labels, *labels.values()) + count * SIZE
                self._take(size_bytes)
                series = family.series[key] = _Series(self._place(count), count, bounds, size_bytes)
            if key not in holding.series:
                holding.series.add(key)
                series.holders.append(holding)
            return series

    def give_up(self, holding: _Holding) -> None:
        """Nobody needs this holding any more: what nobody else holds goes."""
        family = holding.family
        with self._lock:
            for key in holding.series:
                series = family.series[key]
                series.holders.remove(holding)
                if not series.holders:
                    del family.series[key]
                    self._free.setdefault(series.count, []).append(series.first)
                    self._size_bytes -= series.size_bytes
            holding.series.clear()
            family.holders.remove(holding)
            if not family.holders:
                del self._families[family.name]
                self._size_bytes -= _size(family.name, family.description)

    def merge(self, holding: _Holding, into: _Holding) -> None:
        """What one holding of a family has, the other one has from now on."""
        with self._lock:
            for key in holding.series:
                holders = holding.family.series[key].holders
                holders.remove(holding)
                if key not in into.series:
                    into.series.add(key)
                    holders.append(into)
            holding.series.clear()
            holding.family.holders.remove(holding)

    def _take(self, size_bytes: int) -> None:
        if self._size_bytes + size_bytes > MAX_METRICS_BYTES:
            raise unavailable(f"the metrics of models would take more than {MAX_METRICS_BYTES} bytes")
        self._size_bytes += size_bytes

    def _place(self, count: int) -> int:
        free = self._free.get(count)
        first = free.pop() if free else self._end
        if first == self._end:
            self._end += count
            length = -(-self._end * SIZE // _GROWTH) * _GROWTH
            if length > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, length)
        self._numbers.write(first, [0.0] * count)
        return first


class LoadMetrics:
    """The metrics of one loaded version: what its processes hold, and held."""

    def __init__(self, metrics: ModelMetrics, model: str, version: int) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._held: set[_Holding] = set()
        self._left: dict[str, _Holding] = {}
        self._is_closed = False
        self.model = model
        self.version = version

    @property
    def fd(self) -> int:
        """The memory of all metrics."""
        return self._metrics.fd

    def process(self) -> ProcessMetrics:
        """Those of a new process."""
        return ProcessMetrics(self, self._metrics)

    def close(self) -> None:
        """The version is unloaded: nothing of it is there any more."""
        with self._lock:
            self._is_closed = True
            held, self._held = self._held, set()
            self._left.clear()
        for holding in held:
            self._metrics.give_up(holding)

    def add(self, holding: _Holding) -> None:
        """A process holds a family."""
        with self._lock:
            if not self._is_closed:
                self._held.add(holding)
                return
        self._metrics.give_up(holding)
        raise unavailable("the model is unloaded")

    def drop(self, holding: _Holding) -> None:
        """The model has given it up."""
        with self._lock:
            if holding not in self._held:
                return
            self._held.remove(holding)
        self._metrics.give_up(holding)

    def leave(self, holding: _Holding) -> None:
        """Its process has ended: it stays, as one with those of the same family that others have left."""
        with self._lock:
            if holding not in self._held:
                return
            left = self._left.setdefault(holding.family.name, holding)
            if left is not holding:
                self._held.remove(holding)
                self._metrics.merge(holding, into=left)


class ProcessMetrics:
    """What one process asks of metrics, by the numbers that it gives its families. In the event loop.

    Raises TypeError and KeyError for what no stub would ask, WeirError for what it is told.
    """

    def __init__(self, load: LoadMetrics, metrics: ModelMetrics) -> None:
        self._load = load
        self._metrics = metrics
        self._families: dict[int, _Holding] = {}

    def family(self, handle: int, name: str, description: str, kind: int) -> None:
        """The process makes a family."""
        if not isinstance(name, str) or not isinstance(description, str) or kind not in range(len(METRIC_KINDS)):
            raise TypeError("a family of other types")
        holding = self._metrics.hold(self._load, name, description, kind)
        self._load.add(holding)
        self._families[handle] = holding

    def metric(
        self, handle: int, labels: Mapping[str, str], bounds: Sequence[float] | None
    ) -> tuple[int, tuple[float, ...]]:
        """The process makes a series: where its numbers lie, and the bounds of its buckets."""
        if not all(isinstance(text, str) for row in labels.items() for text in row):
            raise TypeError("labels of other types")
        if bounds is not None and not all(isinstance(bound, float) for bound in bounds):
            raise TypeError("bounds of other types")
        series = self._metrics.use(self._families[handle], labels, bounds)
        return series.first, series.bounds

    def gone(self, handles: Sequence[int]) -> None:
        """The process has given families up."""
        for handle in handles:
            self._load.drop(self._families.pop(handle))

    def close(self) -> None:
        """The process has ended."""
        for holding in self._families.values():
            self._load.leave(holding)
        self._families.clear()


def _whole(count: float) -> int:
    # Processes write there: what is no count is not told, and must not keep others from being told.
    return int(count) if 0 <= count < 1 << 53 else 0


def _size(*texts: str) -> int:
    return sum(len(text.encode(errors="replace")) for text in texts) + SIZE
