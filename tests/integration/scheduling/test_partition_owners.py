"""Partitions of one model on several schedulers: one is killed, another is suspended, the rest is unaffected."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import numpy as np
import pytest

from tests.support.clients.sequence_ledger import SequenceLedger
from tests.support.clients.stock import http_inputs
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import running, wait_until
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.schemas.wire.batches import QueueOwner

PARTITIONS = 4
PARAMETER = f'parameters {{ key: "weir_partitions" value {{ string_value: "{PARTITIONS}" }} }}\n'
PLAIN, SUMS = "plain", "sums"
QUEUES = [LiveQueue(model, partition) for model in (PLAIN, SUMS) for partition in range(PARTITIONS)]

STATE_LOST = re.compile(
    r"the state of sequence \d+ .* was lost with the scheduler that had it: start the sequence again"
)

_PATIENCE_S = 40.0


class Asking:
    """Threads that ask model PLAIN for tensors of their own, of which each answer must be that."""

    def __init__(self, served: Endpoints, threads: int = 6) -> None:
        self._served = served
        self._numbers = itertools.count(1)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(threads)]
        self.faults: list[str] = []
        self.sent: set[int] = set()
        self.ended: list[int] = []

    @contextmanager
    def asking(self) -> Iterator[Asking]:
        with running(self._threads, self._is_over):
            yield self

    def wait_for(self, more: int) -> None:
        """Returns when so many more have been answered."""
        so_far = len(self.ended)
        wait_until(lambda: len(self.ended) >= so_far + more, _PATIENCE_S)

    def _ask(self) -> None:
        with self._served.http(timeout_s=60) as client:
            while not self._is_over.is_set():
                number = next(self._numbers)
                self.sent.add(number)
                content = np.full((1, 3), number, np.float32)
                try:
                    answer = client.infer(PLAIN, http_inputs({"IN": content})).as_numpy("OUT")
                except Exception as error:  # whatever it is, it is counted
                    self.faults.append(f"{type(error).__name__}: {error}")
                else:
                    if not np.array_equal(answer, content):
                        self.faults.append(f"wrong: {answer} for {number}")
                self.ended.append(number)
                time.sleep(0.005)


class Cluster:
    """Three schedulers, and workers and gateways."""

    def __init__(self, folder: Path, workers: int = 1, gateways: int = 1) -> None:
        write_identity(folder / "models", PLAIN, "FP32", PARAMETER, instances=PARTITIONS)
        write_accumulator(folder / "models", SUMS, batch=8, instances=PARTITIONS, more=PARAMETER)
        self.start = Start(folder)
        self.schedulers: dict[str, RoleProcess] = {}
        for _ in range(3):
            self.add()
        for _ in range(workers):
            self.start.worker()
        self.gateways = [self.start.gateway() for _ in range(gateways)]
        wait_until(lambda: all(gateway.is_ready() for gateway in self.gateways), _PATIENCE_S)

    def add(self) -> None:
        scheduler = self.start("scheduler")
        self.schedulers[scheduler.facts["scheduler"]] = scheduler

    def owners(self) -> dict[LiveQueue, str]:
        """Whose each queue is by its record, once all have one who is there, and as many as any other."""

        def at_rest() -> dict[LiveQueue, str] | None:
            found = asyncio.run(_owners(self.start.nats.url))
            counts = [Counter(found.values())[scheduler] for scheduler in self.schedulers]
            return found if sum(counts) == len(QUEUES) and max(counts) - min(counts) <= 1 else None

        found: dict[LiveQueue, str] = wait_until(at_rest, _PATIENCE_S)
        return found

    def wait_until_all_partitions_deliver(self) -> None:
        def all_deliver() -> bool:
            delivered = asyncio.run(_delivered(self.start.nats.url))
            return all(delivered[queue.consumer] for queue in QUEUES)

        wait_until(all_deliver, _PATIENCE_S)

    def hurt(self, victim: str, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            self.schedulers.pop(victim).end(number)
        else:
            self.schedulers[victim].process.send_signal(number)


async def _owners(url: str) -> dict[LiveQueue, str]:
    client = await nats.connect(url)
    try:
        bucket = await client.jetstream().key_value(subjects.OWNERS_BUCKET)
        entries = [await bucket.get(key) for key in await bucket.keys()]
        reply = [QueueOwner.unpack(entry.value or b"") for entry in entries]
        return {LiveQueue(record.model, record.partition): record.owner for record in reply}
    finally:
        await client.close()


async def _delivered(url: str) -> Counter[str]:
    client = await nats.connect(url)
    try:
        found = await client.jetstream().consumers_info(subjects.LIVE_STREAM)
        return Counter({info.name: info.delivered.consumer_seq for info in found if info.delivered})
    finally:
        await client.close()


@pytest.mark.timeout(180)
def test_an_owner_that_dies_and_one_that_stands_still_cost_only_their_sequences(tmp_path: Path) -> None:
    _try(tmp_path, rounds=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_owners_that_die_and_ten_that_stand_still_cost_only_their_sequences(tmp_path: Path) -> None:
    _try(tmp_path, rounds=10, workers=2, gateways=2)


def _try(folder: Path, rounds: int, **counts: int) -> None:
    cluster = Cluster(folder, **counts)
    try:
        _hurt(cluster, rounds)
        cluster.start.end_all()
    finally:
        cluster.start.close()


def _hurt(cluster: Cluster, rounds: int) -> None:
    asked = Asking(cluster.gateways[0])
    sequences = SequenceLedger(cluster.gateways[-1], SUMS, PARTITIONS)
    hurt: set[int] = set()
    longest_s = {signal.SIGKILL: 0.0, signal.SIGSTOP: 0.0}
    owners = cluster.owners()
    for model in (PLAIN, SUMS):
        assert len({owners[queue] for queue in QUEUES if queue.model == model}) > 1, f"several share {model}"
    with asked.asking(), sequences.sending():
        cluster.wait_until_all_partitions_deliver()
        for number in range(rounds):
            for fault in longest_s:
                owners = cluster.owners()
                victim = owners[LiveQueue(SUMS, number % PARTITIONS)]
                hurt |= {queue.partition for queue in QUEUES if queue.model == SUMS and owners[queue] == victim}
                moment_s = time.monotonic()
                cluster.hurt(victim, fault)
                longest_s[fault] = max(longest_s[fault], sequences.wait_for_all(moment_s))
                asked.wait_for(20)
                if fault is signal.SIGSTOP:
                    cluster.hurt(victim, signal.SIGCONT)
                    sequences.wait_for_all(time.monotonic())
                    asked.wait_for(20)
            if number + 1 < rounds:
                cluster.add()
    broken = [row for row in sequences.ended if row.error]
    print(
        f"{rounds} owners killed, {rounds} paused: {len(asked.sent)} requests, lost {len(asked.sent) - len(asked.ended)}; "
        f"{sequences.sent} of {len(sequences.ended)} sequences, {len(broken)} ended with an error, lost {sequences.lost}, "
        f"wrong {len(sequences.wrong)}; until all partitions answered {longest_s[signal.SIGKILL]:.2f} s after kills, "
        f"{longest_s[signal.SIGSTOP]:.2f} s after pauses, at most"
    )
    assert asked.faults == []
    assert sorted(asked.ended) == sorted(asked.sent)
    assert sequences.wrong == []
    assert sequences.lost == 0
    assert [row for row in broken if not STATE_LOST.search(row.error)] == []
    assert {row.partition for row in broken} <= hurt, "others have lost nothing"
    assert broken, "a scheduler died that had sequences"
