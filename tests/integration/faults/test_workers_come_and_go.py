"""Workers on two hosts join, are drained and die under load: no errors, no losses."""

from __future__ import annotations

import asyncio
import itertools
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
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import running, wait_until
from weir.schemas.wire.statistics import WorkerCounters, unpack_counters

HOSTS = ("", "another")


class Asking:
    """Threads that ask model `echo` for tensors of 40 B and of 800 KB, of which each answer must be its own.

    By HTTP alone: a process must not fork, to start a worker, while it speaks gRPC.
    """

    def __init__(self, served: Endpoints) -> None:
        self._served = served
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True) for n in (10, 10, 10, 200_000, 200_000)
        ]
        self._is_over = threading.Event()
        self._numbers = itertools.count(1)
        self.faults: list[str] = []
        self.answered: Counter[int] = Counter()

    @contextmanager
    def asking(self) -> Iterator[Asking]:
        with running(self._threads, self._is_over, timeout_s=40):
            yield self

    def wait_for(self, more: int) -> None:
        """Returns when so many more of each size have been answered that were sent from now on."""
        so_far = dict(self.answered)
        wait_until(lambda: all(self.answered[size] >= so_far.get(size, 0) + more for size in (10, 200_000)))

    def _ask(self, size: int) -> None:
        with self._served.http() as client:
            while not self._is_over.is_set():
                content = np.full((1, size), next(self._numbers), np.float32)
                try:
                    output = client.infer("echo", http_inputs({"IN": content})).as_numpy("OUT")
                except Exception as error:  # whatever it is, it is counted
                    self.faults.append(f"{type(error).__name__}: {error}")
                else:
                    if not np.array_equal(output, content):
                        self.faults.append("wrong")
                    self.answered[size] += 1
                time.sleep(0.01)


@pytest.mark.timeout(120)
def test_a_worker_that_is_drained_and_one_that_dies_cost_nothing(start: Start, tmp_path: Path) -> None:
    _come_and_go(start, tmp_path, drains=1, kills=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_that_are_drained_and_ten_that_die_cost_nothing(start: Start, tmp_path: Path) -> None:
    _come_and_go(start, tmp_path, drains=10, kills=10)


def _come_and_go(start: Start, folder: Path, drains: int, kills: int) -> None:
    write_identity(folder / "models", "echo", "FP32", "dynamic_batching { }")
    start("scheduler")
    workers = [start.worker(host=host) for host in HOSTS]
    served = start.gateway()
    wait_until(lambda: served.is_ready("echo"))
    recoveries: list[float] = []
    joined = 0
    asked = Asking(served)
    with asked.asking():
        asked.wait_for(10)
        for round_number in range(drains + kills):
            leaving = round_number % 2
            moment_s = time.monotonic()
            if round_number < drains:
                assert workers[leaving].end() == 0, workers[leaving].log()
            else:
                workers[leaving].end(signal.SIGKILL)
            asked.wait_for(6)  # of which those under way before are few
            recoveries.append(time.monotonic() - moment_s)
            if round_number + 1 < drains + kills:  # nobody goes after the last one
                workers[leaving] = _joined(start, HOSTS[leaving])
                joined += 1
    print(
        f"{drains} drains, {kills} kills: {dict(asked.answered)} requests by size, {len(asked.faults)} faults,", end=" "
    )
    print(
        f"at most {max(recoveries):.2f} s until several were answered; {joined} new workers ran a batch",
    )
    assert asked.faults == []


def _joined(start: Start, host: str) -> RoleProcess:
    """A new worker that has run something."""
    known = asyncio.run(_have_run(start.nats.url))
    worker = start.worker(host=host)  # by this thread: a role goes with the thread that has started it
    wait_until(lambda: asyncio.run(_have_run(start.nats.url)) - known)
    return worker


async def _have_run(nats_url: str) -> set[str]:
    """The workers that have run something."""
    client = await nats.connect(nats_url)
    try:
        told = await _told(client, await client.subscribe("told-to-test"))
    finally:
        await client.close()
    return {worker.worker for worker in told if any(row.execution_count for row in worker.models)}


async def _told(client: Client, answers: Subscription) -> list[WorkerCounters]:
    await client.publish("statistics.query", reply="told-to-test")
    told: list[WorkerCounters] = []
    try:
        while len(told) < len(HOSTS):
            answer = unpack_counters((await answers.next_msg(0.1)).data)
            if isinstance(answer, WorkerCounters):  # and not of the scheduler
                told.append(answer)
    except TimeoutError:
        pass  # fewer workers are there
    return told
