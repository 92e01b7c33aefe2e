"""The rows of the comparison, and the target of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Protocol(StrEnum):
    """How requests come in."""

    HTTP = "HTTP"  # KServe v2 with binary tensors
    GRPC = "gRPC"


@dataclass(frozen=True)
class Workload:
    """A closed loop: `in_flight` requests at any time, each followed by the next once it is answered."""

    network: str
    in_flight: int
    protocol: Protocol = Protocol.HTTP

    def __str__(self) -> str:
        return f"{self.network}, {self.in_flight} in flight, {self.protocol}"


class Quantity(StrEnum):
    """A figure of a measurement; the values are `Measurement`'s names."""

    CPU = "cpu_ms"
    RATE = "requests_per_s"
    LATENCY = "p50_ms"


class Baseline(StrEnum):
    """What a target is a multiple of."""

    TRITON = "triton"
    ONNXRUNTIME = "onnxruntime"
    NOTHING = ""


@dataclass(frozen=True)
class Target:
    """A row of the table. `must` and `aim` are multiples of the baseline's figure, or the figure itself without one."""

    key: str
    workload: Workload | None
    quantity: Quantity
    baseline: Baseline
    must: float | None = None
    aim: float | None = None

    def reached(self, value: float | None) -> str:
        """Which of the two `value`, in the unit of `must` and `aim`, is good enough for."""
        if value is None or self.must is None or self.aim is None:
            return "" if self.must is None else "?"
        sign = 1 if self.quantity is Quantity.RATE else -1
        return next(
            (word for limit, word in ((self.aim, "aim"), (self.must, "must")) if sign * value >= sign * limit), "no"
        )


TARGETS = [
    Target("identity-1", Workload("identity_fp32", 1), Quantity.LATENCY, Baseline.NOTHING),
    Target("identity-1-cpu", Workload("identity_fp32", 1), Quantity.CPU, Baseline.TRITON),
    Target("identity-8", Workload("identity_fp32", 8), Quantity.CPU, Baseline.TRITON, 1.15, 0.95),
    Target("grpc-identity-8", Workload("identity_fp32", 8, Protocol.GRPC), Quantity.CPU, Baseline.TRITON, 0.85, 0.7),
    Target("identity-64", Workload("identity_fp32", 64), Quantity.CPU, Baseline.TRITON, 0.65, 0.5),
    Target("identity-64-rate", Workload("identity_fp32", 64), Quantity.RATE, Baseline.TRITON, 1.5, 2.1),
    Target("mlp-8", Workload("mlp", 8), Quantity.CPU, Baseline.TRITON, 1.3, 1.0),
    Target("grpc-mlp-8", Workload("mlp", 8, Protocol.GRPC), Quantity.CPU, Baseline.TRITON, 1.1, 0.8),
    Target("mlp-64", Workload("mlp", 64), Quantity.CPU, Baseline.TRITON, 0.95, 0.75),
    Target("grpc-mlp-64", Workload("mlp", 64, Protocol.GRPC), Quantity.CPU, Baseline.TRITON, 0.8, 0.6),
    Target("cnn-1", Workload("cnn", 1), Quantity.CPU, Baseline.ONNXRUNTIME, 1.2, 1.05),
    Target("cnn-8", Workload("cnn", 8), Quantity.CPU, Baseline.ONNXRUNTIME, 1.12, 1.05),
    Target("bert-32", Workload("bert_tiny", 32), Quantity.CPU, Baseline.TRITON),
]

BATCHER = Target("batcher", None, Quantity.RATE, Baseline.NOTHING, 200_000, 500_000)
"""The sans-IO batcher alone, on one core, as `benchmarks.scheduler_core` measures it."""
