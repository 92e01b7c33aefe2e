"""All faults by their ids."""

from __future__ import annotations

from benchmarks.faults import kills, mix
from benchmarks.faults.scene import Fault

FAULTS: dict[str, Fault] = {
    "F-01": kills.worker,
    "F-02": kills.scheduler,
    "F-03": kills.gateway,
    "F-04": kills.broker,
    "F-05": kills.lazy_broker,
    "F-06": kills.everything,
    "F-30": mix.random_mix,
}
