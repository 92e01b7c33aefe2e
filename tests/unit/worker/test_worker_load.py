"""What a worker tells of its instances: how many hold a batch, and how busy they were."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker.worker_load import WorkerLoad

S = 1_000_000


def result(instances: int, busy_s: float, ensemble: object = None) -> Any:
    served = SimpleNamespace(instances=[None] * instances, statistics=SimpleNamespace(busy_ns=int(busy_s * 1e9)))
    return SimpleNamespace(config=SimpleNamespace(ensemble_scheduling=ensemble), served={1: served})


def held(model: str, instance: int, version: int = 1) -> Any:
    return SimpleNamespace(message=SimpleNamespace(model=model, version=version, instance=instance))


def test_an_instance_is_busy_once_and_coordinators_are_none() -> None:
    models = {"a": result(2, 0), "b": result(2, 0), "all": result(1, 0, ensemble=object())}
    batches = [held("a", 0), held("a", 0), held("b", 1), held("all", 0), held("gone", 0), held("a", 0, version=2)]
    assert WorkerLoad().told(models, batches) == {"instances": 4, "busy": 2, "utilization": 0.0}


def test_utilization_is_of_the_last_seconds() -> None:
    load = WorkerLoad()
    for second in range(1, 21):
        load.look(second * S, {"a": result(2, second), "b": result(2, 0)}, [])
    assert load.told({}, [])["utilization"] == pytest.approx(0.25, abs=0.01)
