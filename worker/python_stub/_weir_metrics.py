"""`MetricFamily` of `triton_python_backend_utils`: a model's own metrics, on the server's metrics page.

The worker keeps the list of families and series, and is asked when one is created. Their values lie in memory that all
processes of the worker share (`_weir_memory`), so changing one sends no message. All instances of a model, and all
models of a worker that use the same names, share one series. Messages are those of Triton's Python backend.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from itertools import count
from queue import SimpleQueue
from typing import Any, ClassVar

from _weir_calls import Calls, current_calls
from _weir_channel import Kind
from _weir_errors import TritonModelException
from _weir_memory import MetricNumbers


class MetricKind(IntEnum):
    """The kind of a family's series."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metrics:
    """The custom metrics of this process; `instance` is the name in messages.

    `current` is the one object of the process.
    """

    current: ClassVar[Metrics | None] = None

    def __init__(self, calls: Calls, fd: int) -> None:
        self.calls = calls
        self.numbers = MetricNumbers(fd)
        self.handles = count(1)
        self.instance = ""
        # Filled by finalizers, which may run at any point and must not send messages: they are reported later.
        self.deleted: SimpleQueue[int] = SimpleQueue()

    def report_deleted(self) -> None:
        """Reports to the worker which families the model has deleted since the last call."""
        if self.deleted.empty():
            return
        handles = []
        while not self.deleted.empty():
            handles.append(self.deleted.get())
        self.calls.notify(Kind.METRIC_FAMILIES_DELETED, handles)

    def error(self, what: str, reason: str) -> TritonModelException:
        """The exception for an operation that the server rejected."""
        return TritonModelException(
            f"{what}: Failed to process the request for model '{self.instance}', message: {reason}"
        )


class Metric:
    """One series of a family, created by `MetricFamily.Metric`. For any thread.

    Raises TritonModelException for operations that its kind does not have, and once its family is deleted.
    """

    __slots__ = ("_bounds", "_first", "_is_cleared", "_kind", "_metrics")

    def __init__(self, metrics: Metrics, kind: MetricKind, first: int, bounds: Sequence[float]) -> None:
        self._metrics = metrics
        self._kind = kind
        self._first = first
        self._bounds = bounds
        self._is_cleared = False

    def increment(self, value: float) -> None:
        """Adds `value`, which must be 0 or more for a counter."""
        self._check("increment", value)
        if self._kind is MetricKind.COUNTER:
            if value < 0:
                raise self._error(
                    "increment",
                    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
                )
            self._metrics.numbers.add(self._first, 1, ((0, value),))
        elif self._kind is MetricKind.GAUGE:
            (since,) = self._metrics.numbers.read(self._first + 1, 1)
            self._metrics.numbers.add(self._first, 2, ((0, value), (1, max(0.0, time.time() - since))))
        else:
            raise self._unsupported("increment", "Increment")

    def set(self, value: float) -> None:
        """Sets the gauge to `value`."""
        self._check("set", value)
        if self._kind is not MetricKind.GAUGE:
            raise self._unsupported("set", "Set")
        self._metrics.numbers.write(self._first, (value, time.time()))

    def observe(self, value: float) -> None:
        """Counts `value` in the histogram."""
        self._check("observe", value)
        if self._kind is not MetricKind.HISTOGRAM:
            raise self._unsupported("observe", "Observe")
        buckets = len(self._bounds) + 1
        changes = ((bisect_left(self._bounds, value), 1.0), (buckets, value))
        self._metrics.numbers.add(self._first, buckets + 1, changes)

    def value(self) -> float:
        """The value of the counter or gauge, for all processes of the worker together."""
        self._check("get", 0.0)
        if self._kind is MetricKind.HISTOGRAM:
            raise self._unsupported("get", "Value")
        return self._metrics.numbers.read(self._first, 1)[0]

    def _check(self, what: str, value: Any) -> None:
        if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
            raise TypeError(
                f"{what}(): incompatible function arguments. The following argument types are supported:\n"
                f"    1. (self: Metric, arg0: float) -> None\n\nInvoked with: {self!r}, {value!r}"
            )
        if self._is_cleared:
            raise TritonModelException(
                f"Failed to {what} metric value: Invalid metric operation as the corresponding 'MetricFamily' has been "
                "deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
                "deleted."
            )

    def _unsupported(self, what: str, operation: str) -> TritonModelException:
        return self._error(what, f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}")

    def _error(self, what: str, reason: str) -> TritonModelException:
        return self._metrics.error(f"Failed to {what} metric value", reason)


class MetricFamily:
    """A metric by its name, with series by their labels (`Metric`).

    Creating a family that exists returns the same one, if it is of the same kind. It is on the metrics page while any
    object of it exists: keep the object as long as its metrics are used.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not (isinstance(name, str) and isinstance(description, str) and isinstance(kind, MetricKind)):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. MetricFamily(name: str, description: str, kind: MetricKind)\n\n"
                f"Invoked with: kwargs: name={name!r}, description={description!r}, kind={kind!r}"
            )
        metrics = current_metrics()
        handle = next(metrics.handles)
        self._metrics: list[Metric] = []
        try:
            metrics.calls.ask(Kind.METRIC_FAMILY, handle, name, description, kind.value)
        except TritonModelException as error:
            raise TritonModelException(f"Error when creating MetricFamily: {error}") from None
        self._kind = kind
        self._handle = handle
        self._process = metrics

    def Metric(self, labels: Any = None, buckets: Any = None) -> Metric:  # Triton's name
        """The series with these labels, created if it does not exist; equal labels share one series.

        `buckets` (upper bounds in ascending order) are for histograms only; a series keeps those it was created with.
        Raises TritonModelException for buckets of other kinds, and for label names that Prometheus does not allow.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if (self._kind is MetricKind.HISTOGRAM) != (buckets is not None):
            wrong = "Unexpected buckets found" if buckets is not None else "Missing required buckets"
            raise TritonModelException(f"Failed to create metric. {wrong}.")
        if not isinstance(buckets, (list, tuple, type(None))):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        texts = {str(name): str(value) for name, value in (labels or {}).items()}
        bounds = None if buckets is None else [float(bound) for bound in buckets]
        try:
            first, known = self._process.calls.ask(Kind.METRIC, self._handle, texts, bounds)
        except TritonModelException as error:
            raise TritonModelException(f"Error when creating Metric: {error}") from None
        metric = Metric(self._process, self._kind, first, known)
        self._metrics.append(metric)
        return metric

    def __del__(self) -> None:
        for metric in self._metrics:
            metric._is_cleared = True
        if hasattr(self, "_process"):
            self._process.deleted.put(self._handle)


def current_metrics() -> Metrics:
    """The metrics of this process. Raises TritonModelException outside of a server."""
    current_calls()
    if Metrics.current is None:
        raise TritonModelException("this process runs outside of a server")
    return Metrics.current
