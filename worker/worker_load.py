"""`WorkerLoad`: how busy a worker's instances are. Coordinators of ensembles are left out: they wait for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from telemetry.utilization import Utilization
from worker.model_loader import LoadedResult
from worker.running_batch import RunningBatch
from worker.series import Series
from worker.served_version import ServedVersion


class WorkerLoad:
    """Of the models that a worker has, and what its instances hold; `look` is called about once a second."""

    def __init__(self) -> None:
        self._utilization = Utilization()

    def look(self, now_us: int, models: Mapping[str, LoadedResult], held: Iterable[RunningBatch | Series]) -> None:
        """Looks at all of them."""
        versions = _versions(models)
        busy_us = sum(version.statistics.busy_ns for version in versions.values()) // 1000
        instances = sum(len(version.instances) for version in versions.values())
        self._utilization.look(now_us, busy_us, _busy(versions, held), instances)

    def told(self, models: Mapping[str, LoadedResult], held: Iterable[RunningBatch | Series]) -> dict[str, float]:
        """As `schemas.statistics.WorkerLoadCounters` has it: what is busy now, and the utilization as of the last look."""
        versions = _versions(models)
        return {
            "instances": sum(len(version.instances) for version in versions.values()),
            "busy": _busy(versions, held),
            "utilization": self._utilization.value,
        }


def _versions(models: Mapping[str, LoadedResult]) -> dict[tuple[str, int], ServedVersion]:
    return {
        (name, number): served
        for name, result in models.items()
        if result.config is None or result.config.ensemble_scheduling is None
        for number, served in result.served.items()
    }


def _busy(versions: Mapping[tuple[str, int], ServedVersion], held: Iterable[RunningBatch | Series]) -> int:
    """Instances that have been given something; another batch that waits for one of them counts no second time."""
    messages = [one.message for one in list(held)]
    return len(
        {(m.model, m.version, m.instance) for m in messages if (m.model, m.version) in versions},
    )
