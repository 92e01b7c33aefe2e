"""`MetricFamily` of `triton_python_backend_utils`: metrics of a model's own, on the server's metrics page.

The worker knows which families and series there are, and is asked when one is made. Their numbers lie in memory that all
processes of the worker share (`_weir_metric_numbers`), so changing one asks nobody, and all instances of a model, and all
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
from _weir_metric_numbers import MetricNumbers


class MetricKind(IntEnum):
    """What a family's series are."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metrics:
    """The custom metrics of this process; `instance` is the name in messages. `current` are those of this process."""

    current: ClassVar[Metrics | None] = None

    def __init__(self, calls: Calls, fd: int) -> None:
        self.calls = calls
        self.numbers = MetricNumbers(fd)
        self.handles = count(1)
        self.instance = ""
        # Put in by the garbage collector, which may come in the midst of anything: so they are told of later.
        self.gone: SimpleQueue[int] = SimpleQueue()

    def tell_gone(self) -> None:
        """Tells the worker which families the model has given up since."""
        if self.gone.empty():
            return
        handles = []
        while not self.gone.empty():
            handles.append(self.gone.get())
        self.calls.tell(Kind.METRIC_FAMILIES_GONE, handles)

    def refusal(self, what: str, reason: str) -> TritonModelException:
        """What the model is told when the server would not do something."""
        return TritonModelException(
            f"{what}: Failed to process the request for model '{self.instance}', message: {reason}"
        )


class Metric:
    """One series of a family, made by `MetricFamily.Metric`. For any thread.

    Raises TritonModelException for what its kind can't do, and once its family is gone.
    """

    __slots__ = ("_bounds", "_first", "_is_cleared", "_kind", "_metrics")

    def __init__(self, metrics: Metrics, kind: MetricKind, first: int, bounds: Sequence[float]) -> None:
        self._metrics = metrics
        self._kind = kind
        self._first = first
        self._bounds = bounds
        self._is_cleared = False

    def increment(self, value: float) -> None:
        """Adds `value`: 0 or more for a counter, anything for a gauge."""
        self._check("increment", value)
        if self._kind is MetricKind.COUNTER:
            if value < 0:
                raise self._refusal(
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
        """Makes `value` the gauge's."""
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
        """What the counter or gauge stands at, all processes of the worker together."""
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
        return self._refusal(what, f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}")

    def _refusal(self, what: str, reason: str) -> TritonModelException:
        return self._metrics.refusal(f"Failed to {what} metric value", reason)


class MetricFamily:
    """A metric by its name, with series by their labels (`Metric`).

    Whoever makes a family that is there already gets the same one, if it is of the same kind. It is on the metrics page as
    long as anybody has it: its object has to be kept as long as its metrics are used.
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
        """The series with these labels, which all who give the same ones share; it is there from now on.

        `buckets`, upper bounds in ascending order, are for histograms, and only for them; those that a series was made
        with stay its. Raises TritonModelException for others, and for names of labels that Prometheus has not.
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
            self._process.gone.put(self._handle)


def current_metrics() -> Metrics:
    """The metrics of this process. Raises TritonModelException outside of a server."""
    current_calls()
    if Metrics.current is None:
        raise TritonModelException("there is no server to count for")
    return Metrics.current
