"""Several schedulers share the queues of models: a new one gets its share, a stopped or dead one loses it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nats
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.request_ledger import Ledger, assert_nothing_lost
from tests.support.clients.stock import http_inputs
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_small_zoo
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import wait_until
from weir.bus.naming import subjects
from weir.schemas.wire.batches import QueueOwner


class Cluster:
    """Two schedulers, a worker and a gateway. Each scheduler that ends has a successor."""

    def __init__(self, folder: Path) -> None:
        write_small_zoo(folder / "models")
        write_accumulator(folder / "models", "accumulator")
        self.start = Start(folder)
        self.schedulers: dict[str, RoleProcess] = {}
        self.add()
        self.start.worker()
        self.gateway: Endpoints = self.start.gateway()
        wait_until(self.gateway.is_ready)

    def add(self) -> None:
        scheduler = self.start("scheduler")
        self.schedulers[scheduler.facts["scheduler"]] = scheduler

    def owners(self) -> dict[str, str]:
        """The owner of each model's queue, by its record."""
        return asyncio.run(_owners(self.start.nats.url))

    def is_even(self) -> bool:
        shares = Counter(self.owners().values())
        counts = [shares.pop(id, 0) for id in self.schedulers]
        return not shares and max(counts) - min(counts) <= 1

    def owner(self, model: str) -> RoleProcess:
        return self.schedulers[self.owners()[model]]

    def end(self, role: RoleProcess, number: signal.Signals) -> None:
        role.end(number)
        self.schedulers = {id: other for id, other in self.schedulers.items() if other is not role}


async def _owners(url: str) -> dict[str, str]:
    client = await nats.connect(url)
    try:
        bucket = await client.jetstream().key_value(subjects.OWNERS_BUCKET)
        entries = [await bucket.get(key) for key in await bucket.keys()]
        reply = [QueueOwner.unpack(entry.value or b"") for entry in entries]
        return {record.model: record.owner for record in reply}
    finally:
        await client.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("owners"))
    try:
        yield cluster
        cluster.start.end_all()
    finally:
        cluster.start.close()


@pytest.mark.timeout(120)
def test_schedulers_come_are_paused_die_and_leave_under_load(cluster: Cluster) -> None:
    _recoveries(cluster)


@pytest.mark.timing
@pytest.mark.timeout(120)
def test_queues_have_another_owner_within_three_seconds(cluster: Cluster) -> None:
    took = _recoveries(cluster)
    assert max(took.values()) < 3.0, took


def _recoveries(cluster: Cluster) -> dict[str, float]:
    """The seconds until both models answered again, by what befell the owner of a queue; no request is lost."""
    ledger = Ledger(cluster.gateway, threads=4, pause_s=0.02)
    took: dict[str, float] = {}
    with ledger.sending():
        wait_until(lambda: len(ledger.entries) > 50)
        cluster.add()
        wait_until(cluster.is_even)
        paused = cluster.owner("slow")
        moment = time.monotonic()
        paused.process.send_signal(signal.SIGSTOP)
        took["paused"] = ledger.wait_for_answers(moment)
        paused.process.send_signal(signal.SIGCONT)
        wait_until(cluster.is_even)
        ledger.wait_for_answers(time.monotonic())
        owner = cluster.owner("slow")
        moment = time.monotonic()
        cluster.end(owner, signal.SIGKILL)
        took["killed"] = ledger.wait_for_answers(moment)
        cluster.add()
        wait_until(cluster.is_even)
        owner = cluster.owner("slow")
        moment = time.monotonic()
        cluster.end(owner, signal.SIGTERM)
        took["told to end"] = ledger.wait_for_answers(moment)
        wait_until(cluster.is_even)
    print(ledger.summary("owner paused, killed, told to end", 3, list(took.values())), took)
    assert_nothing_lost(ledger)
    return took


def test_a_sequence_whose_scheduler_has_died_ends_with_an_error_that_names_it(cluster: Cluster) -> None:
    def add(value: float, **of: bool) -> float:
        with cluster.gateway.http() as client:
            inputs = http_inputs({"IN": np.array([[value]], np.float32)})
            return float(client.infer("accumulator", inputs, sequence_id=4711, **of).as_numpy("OUT").item())

    wait_until(cluster.is_even)
    assert add(1, sequence_start=True) == 1
    while len(cluster.schedulers) < 2:
        cluster.add()
    assert add(2) == 3
    owner = cluster.owner("accumulator")
    assert add(3) == 6, "a queue with sequences stays where it is"
    assert cluster.owner("accumulator") is owner
    cluster.end(owner, signal.SIGKILL)
    with pytest.raises(InferenceServerException, match=r"sequence 4711 .*start the sequence again"):
        add(4)
    assert add(5, sequence_start=True, sequence_end=True) == 5
