"""Models that take a fixed time on any machine: they sleep, without the interpreter's lock, and give back what came."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """
backend: "sleeper" max_batch_size: {batch}
input {{ name: "IN" data_type: TYPE_INT64 dims: [ 1 ] }}
output {{ name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
{batching}
"""
_BACKEND = """
import time

import numpy as np

from weir.backend import ArrayBackend


class Backend(ArrayBackend):
    def open(self, model):
        def run(inputs):
            time.sleep({seconds})
            return {{"OUT": np.array(inputs["IN"])}}

        return run
"""


def write_sleeper(repository: Path, name: str, ms: float, batch: int = 1, instances: int = 1) -> None:
    """One whose batches of up to `batch` take `ms`; 0: as long as it takes to copy them."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    batching = "dynamic_batching { }" if batch > 1 else ""
    (folder / "config.pbtxt").write_text(_CONFIG.format(batch=batch, instances=instances, batching=batching))
    (folder / "backend.py").write_text(_BACKEND.format(seconds=ms / 1000))
