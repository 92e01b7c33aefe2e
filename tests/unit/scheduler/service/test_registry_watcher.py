"""What workers' records mean for the policy of a queue, and which queues a model has."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduling.requests import request
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.batching.custom_strategy import StrategyFiles
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.service.registry_watcher import RegistryWatcher, latest_config, queues_by, queues_of
from weir.scheduler.service.statistics import LoadSignals
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord

READY, UNLOADING, LOADING = ModelState.READY, ModelState.UNLOADING, ModelState.LOADING


def config(partitions: int = 1) -> dict[str, Any]:
    return {"name": "m", "parameters": {"weir_partitions": {"string_value": str(partitions)}}}


def record(partitions: int = 1, written_ns: int = 0, **versions: ModelState) -> ModelRecord:
    """A record with versions such as `v1`, each with two instances."""
    rows = {int(name[1:]): VersionRecord(state, instances=2) for name, state in versions.items()}
    return ModelRecord("m", rows, config(partitions), written_ns=written_ns)


class Cluster:
    """The registry's view of some workers, and one queue of model m."""

    def __init__(self, partition: int = 0) -> None:
        self.workers: dict[str, Any] = {}
        self.known: dict[str, ModelRecord] = {}
        self.watcher = RegistryWatcher(self, StrategyFiles(), self.known.get)  # type: ignore[arg-type]
        scheduler = ModelScheduler("m")
        self.owned: Any = SimpleNamespace(
            name="m",
            queue=LiveQueue("m", partition),
            scheduler=scheduler,
            released_versions=set(),
            signals=LoadSignals(scheduler),
        )

    def reports(self, worker: str, reported: ModelRecord, draining: bool = False) -> None:
        self.workers[worker] = SimpleNamespace(record=SimpleNamespace(draining=draining), models={"m": reported})

    def update(self) -> list[Any]:
        return [failure for ended in self.watcher.update(self.owned, 0) for failure in ended[1]]

    def instances(self) -> dict[int, int]:
        return {number: version.instance_count for number, version in self.owned.scheduler.versions().items()}

    def unneeded(self, *versions: int, worker: str = "w", reply: str = "") -> list[int] | None:
        drain = DrainMessage.of(worker, "m", list(versions))
        return self.watcher.unneeded_versions(self.owned, drain, reply or subjects.drained(worker))


def test_a_policy_gets_the_versions_and_instances_of_all_workers():
    cluster = Cluster()
    cluster.reports("v", record(v1=READY, v2=READY))
    cluster.reports("w", record(v2=READY, v3=LOADING))
    assert cluster.update() == []
    assert cluster.instances() == {1: 2, 2: 4}
    del cluster.workers["v"]
    cluster.owned.scheduler.worker_lost(0, "v")
    cluster.update()
    assert cluster.instances() == {1: 0, 2: 2}


def test_a_worker_that_is_draining_gets_nothing_more():
    cluster = Cluster()
    cluster.reports("w", record(v1=READY), draining=True)
    cluster.update()
    assert cluster.instances() == {}


def test_a_malformed_record_is_logged_and_not_used(caplog: pytest.LogCaptureFixture):
    cluster = Cluster()
    cluster.reports("w", ModelRecord("m", {1: VersionRecord(READY, instances=1)}, {"name": "m", "max_batch_size": "x"}))
    with caplog.at_level(logging.WARNING):
        cluster.update()
    assert cluster.instances() == {}
    assert "model m: ignoring a malformed record of a worker" in caplog.text


def test_requests_of_a_withdrawn_model_fail_with_the_update():
    cluster = Cluster()
    cluster.owned.scheduler.enqueue([request(version=1)])
    cluster.reports("w", ModelRecord("m", {1: VersionRecord(ModelState.UNAVAILABLE)}, config()))
    (failure,) = cluster.update()
    assert "is not at ready state" in failure.error.message or "no available versions" in failure.error.message


def test_a_remembered_model_is_configured_before_its_first_worker():
    cluster = Cluster()
    cluster.known["m"] = record(v1=READY)
    assert cluster.update() == []
    assert cluster.instances() == {1: 0}


def test_a_partition_gets_its_share_of_the_instances():
    clusters = [Cluster(partition) for partition in range(2)]
    for cluster in clusters:
        cluster.reports("w", record(2, v1=READY))
        cluster.update()
    assert [cluster.instances() for cluster in clusters] == [{1: 1}, {1: 1}]


def test_versions_without_requests_may_be_unloaded():
    cluster = Cluster()
    cluster.reports("w", record(v1=UNLOADING, v2=READY))
    cluster.update()
    assert cluster.unneeded(1, 2, 9) == [1], "version 2 is not being unloaded, and 9 is unknown"
    assert cluster.owned.released_versions == {("w", 1)}
    cluster.reports("w", record(v1=READY, v2=READY))
    cluster.update()
    assert cluster.owned.released_versions == set(), "it was loaded again"


def test_a_version_is_needed_while_requests_wait_for_it():
    cluster = Cluster()
    cluster.reports("w", record(v1=READY))
    cluster.update()
    cluster.owned.scheduler.enqueue([request(version=1)])
    cluster.reports("w", record(v1=UNLOADING))
    cluster.update()
    assert cluster.unneeded(1) == []


def test_a_drain_request_of_an_unknown_worker_or_with_another_reply_subject_is_ignored():
    cluster = Cluster()
    cluster.reports("w", record(v1=UNLOADING))
    assert cluster.unneeded(1, worker="stranger") is None
    assert cluster.unneeded(1, reply="somewhere.else") is None


def test_a_model_has_a_queue_for_each_partition():
    assert queues_of(ModelConfig.model_validate({"name": "m"})) == [LiveQueue("m")]
    assert queues_of(ModelConfig.model_validate(config(2)), "ns::m") == [LiveQueue("ns::m"), LiveQueue("ns::m", 1)]
    assert queues_of(None, "m") == [LiveQueue("m")]


def test_the_newest_record_decides_on_the_number_of_queues():
    records = [record(4, 5), record(2, 9), ModelRecord("m", written_ns=11)]
    assert len(queues_by(records, "m")) == 2
    assert latest_config([]) is None
    assert queues_by([ModelRecord("m", config={"parameters": {"weir_partitions": 3}})], "m") == [LiveQueue("m")]


def test_queues_of_former_partitions_are_kept():
    cluster = Cluster()
    cluster.reports("w", record(3, v1=READY))
    assert cluster.watcher.queues_of("m") == [LiveQueue("m", partition) for partition in range(3)]
    cluster.reports("w", record(1, v1=READY))
    assert len(cluster.watcher.queues_of("m")) == 3
