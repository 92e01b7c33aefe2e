"""`ServerFigures`: what the server did during a level of load, as the difference of its statistics.

Source: Triton's statistics extension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass(frozen=True)
class ServerCounters:
    """The statistics of all versions of a model at one time: counts, nanoseconds, and runs by batch size."""

    inferences: int = 0
    executions: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ns: Counter[str] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)

    @classmethod
    def read(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """The sum of rows of `model_stats`. Numbers may be text, as in protobuf's JSON; what is missing is 0."""
        inferences = executions = 0
        counts, ns, batches = Counter[str](), Counter[str](), Counter[int]()
        for row in rows:
            inferences += int(row.get("inference_count", 0))
            executions += int(row.get("execution_count", 0))
            durations = row.get("inference_stats", {})
            for name in _DURATIONS:
                counts[name] += int(durations.get(name, {}).get("count", 0))
                ns[name] += int(durations.get(name, {}).get("ns", 0))
            for batch in row.get("batch_stats", ()):
                batches[int(batch.get("batch_size", 0))] += int(batch.get("compute_infer", {}).get("count", 0))
        return cls(inferences, executions, counts, ns, batches)


@dataclass(frozen=True)
class ServerFigures:
    """Of one stretch of time: rows inferred, runs of the model, runs by batch size, and mean milliseconds of a request."""

    inferences: int
    executions: int
    batches: dict[int, int]
    queue_ms: float
    compute_input_ms: float
    compute_infer_ms: float
    compute_output_ms: float
    cache_hits: int

    @classmethod
    def between(cls, before: ServerCounters, after: ServerCounters) -> Self:
        """The difference of two readings."""

        def mean_ms(name: str) -> float:
            count = after.counts[name] - before.counts[name]
            return (after.ns[name] - before.ns[name]) / count / 1e6 if count > 0 else 0.0

        batches = {size: after.batches[size] - before.batches[size] for size in sorted(after.batches)}
        return cls(
            inferences=after.inferences - before.inferences,
            executions=after.executions - before.executions,
            batches={size: count for size, count in batches.items() if count > 0},
            queue_ms=mean_ms("queue"),
            compute_input_ms=mean_ms("compute_input"),
            compute_infer_ms=mean_ms("compute_infer"),
            compute_output_ms=mean_ms("compute_output"),
            cache_hits=after.counts["cache_hit"] - before.counts["cache_hit"],
        )

    @property
    def batch_size(self) -> float:
        """The mean number of rows of a run; 0 without runs."""
        return self.inferences / self.executions if self.executions > 0 else 0.0

    @property
    def compute_ms(self) -> float:
        """The mean time of a request in its instance: input, inference and output."""
        return self.compute_input_ms + self.compute_infer_ms + self.compute_output_ms
