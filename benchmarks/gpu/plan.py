"""`Plan`: what one run of the GPU benchmarks measures, where, and with networks of which sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """On `device` "cuda" or "cpu". A CPU rehearses the run: the same code with tiny networks, whose figures mean nothing.

    `seconds` is the length of one measurement, `folder` gets models and results. After `deadline_s` (monotonic) no section
    begins, and none begins another row.
    """

    device: str
    folder: Path
    seconds: float = 1.0
    batches: Sequence[int] = (1, 8, 64)
    instances: Sequence[int] = (1, 2, 4)
    streams: Sequence[int] = (1, 16, 64)
    gateways: Sequence[int] = (1, 2, 4, 8)
    backends: Sequence[str] = ("pytorch", "onnxruntime", "tensorrt")
    networks: Sequence[str] = ("residual", "encoder128", "encoder512", "detector")
    loads: int = 100
    tokens: int = 64
    deadline_s: float = field(default_factory=lambda: time.monotonic() + 3600)

    @property
    def on_gpu(self) -> bool:
        """Whether the run is real, and no rehearsal."""
        return self.device == "cuda"

    @property
    def kind(self) -> str:
        """The kind of the models' instances."""
        return "KIND_GPU" if self.on_gpu else "KIND_CPU"

    @property
    def has_time(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self.deadline_s

    def size(self, real: int, rehearsed: int) -> int:
        """A size of a network, which is small on a CPU."""
        return real if self.on_gpu else rehearsed


def rehearsal(folder: Path) -> Plan:
    """The smallest plan that runs every line of the sections that a CPU can run."""
    return Plan(
        device="cpu",
        folder=folder,
        seconds=0.2,
        batches=(1, 2),
        instances=(1, 2),
        streams=(1, 2),
        gateways=(1, 2),
        loads=2,
        tokens=4,
    )
