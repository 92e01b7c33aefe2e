"""The roles as commands of their own against one nats-server, as containers run them."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import numpy as np
import pytest
from asking import http_inputs
from endpoints import Endpoints
from ensembles import Step, write_ensemble, write_ledger_ensembles
from ledger import Ledger
from model_zoo import write_identity, write_slow, write_small_zoo
from role_process import RoleProcess
from serving import clean_environment, segments_of, wait_until

from bus.embedded import EmbeddedNats
from schemas.statistics import WorkerCounters, unpack_counters


class Start:
    """Starts roles against one nats-server, and ends them."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self._folder = folder
        self._roles: list[RoleProcess] = []
        self.nats = EmbeddedNats(folder / "nats")
        self.nats.start()

    def __call__(self, role: str, *options: str) -> RoleProcess:
        self._roles.append(RoleProcess(self._folder / "logs", role, f"--nats={self.nats.url}", *options))
        return self._roles[-1]

    def worker(self) -> RoleProcess:
        """A worker of the test's models."""
        return self("worker", f"--model-repository={self._folder / 'models'}")

    def gateway(self) -> Endpoints:
        """Where a new gateway listens."""
        ports = self("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0").facts
        return Endpoints(*(f"127.0.0.1:{ports[f'{name}_port']}" for name in ("http", "grpc", "metrics")))

    def end_all(self) -> None:
        """Ends what still runs, those that ask before those that answer; nothing may be left of it."""
        running = [role for role in self._roles if role.process.poll() is None]
        segments = segments_of([role.process.pid for role in running])
        for role in reversed(running):
            assert role.end() == 0, role.log()
        assert not {name for name in segments if Path("/dev/shm", name).exists()}

    def close(self) -> None:
        """Kills what still runs."""
        for role in self._roles:
            role.process.kill()
            role.process.wait()
        self.nats.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starting = Start(tmp_path)
    try:
        yield starting
        starting.end_all()
    finally:
        starting.close()


@pytest.mark.timeout(120)
def test_two_workers_share_the_load_and_one_may_die(start: Start, tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    start("scheduler")
    workers = [start.worker() for _ in range(2)]
    served = start.gateway()
    wait_until(served.is_ready)
    ledger = Ledger(served)
    with ledger.sending():
        wait_until(lambda: len(ledger.entries) > 300)
        shares = asyncio.run(_executions_by_worker(start.nats.url, 2))
        moment = time.monotonic()
        workers[0].end(signal.SIGKILL)
        recovery = ledger.wait_for_answers(moment)
        wait_until(lambda: len(ledger.entries) > 600)
    print(ledger.summary("kill -9 of one of two workers", 1, [recovery]))
    assert min(shares) > 0.2 * sum(shares)
    assert (ledger.unanswered, ledger.faults) == (0, [])
    assert recovery < 1.0, "the other worker goes on"
    assert served.is_ready()


@pytest.mark.timeout(120)
def test_a_coordinator_of_ensembles_may_die(start: Start, tmp_path: Path) -> None:
    """Both models of the ledger are ensembles: what a dead worker coordinated, and steps that it ran, are done again."""
    write_ledger_ensembles(tmp_path / "models")
    start("scheduler")
    workers = [start.worker() for _ in range(3)]
    served = start.gateway()
    wait_until(served.is_ready)
    ledger = Ledger(served, delay_ms=5.0)
    with ledger.sending():
        wait_until(lambda: len(ledger.entries) > 200)
        moment = time.monotonic()
        workers[0].end(signal.SIGKILL)
        recovery = ledger.wait_for_answers(moment)
        wait_until(lambda: len(ledger.entries) > 400)
        assert workers[1].end() == 0, "one that is told to stop hands on what it coordinates"
        so_far = len(ledger.entries)
        wait_until(lambda: len(ledger.entries) > so_far + 100)
    print(ledger.summary("kill -9 of one of three coordinators", 1, [recovery]))
    assert (ledger.unanswered, ledger.faults) == (0, [])


@pytest.mark.timeout(120)
def test_an_ensemble_waits_for_models_of_another_worker(start: Start, tmp_path: Path) -> None:
    write_identity(tmp_path / "steps", "fast_step", "FP32")
    steps: list[Step] = [("fast_step", {"IN": "IN"}, {"OUT": "M"}), ("fast_step", {"IN": "M"}, {"OUT": "OUT"})]
    write_ensemble(tmp_path / "models", "pair", {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}, steps, 8)
    start("scheduler")
    served = start.gateway()
    start.worker()
    assert not served.is_ready("pair")
    of_steps = start("worker", f"--model-repository={tmp_path / 'steps'}")
    wait_until(lambda: served.is_ready("pair"))
    content = np.random.default_rng(1).random((1, 100_000), np.float32)  # which lies in the other worker's memory
    with served.http() as client:
        assert np.array_equal(client.infer("pair", http_inputs({"IN": content})).as_numpy("OUT"), content)
        assert of_steps.end() == 0
        # A worker that is being replaced is waited for, and so is what its models are needed for.
        start("worker", f"--model-repository={tmp_path / 'steps'}")
        assert np.array_equal(client.infer("pair", http_inputs({"IN": content})).as_numpy("OUT"), content)


async def _executions_by_worker(nats_url: str, workers: int) -> list[int]:
    """How many batches each worker has run, as each of them tells."""
    client = await nats.connect(nats_url)
    answers = await client.subscribe("told")
    await client.publish("statistics.query", reply="told")
    told: list[WorkerCounters] = []
    while len(told) < workers:
        answer = unpack_counters((await answers.next_msg(5)).data)
        if isinstance(answer, WorkerCounters):  # and not of the scheduler
            told.append(answer)
    await client.close()
    return [sum(row.execution_count for row in answer.models) for answer in told]


@pytest.mark.timeout(120)
def test_roles_may_come_in_any_order(start: Start, tmp_path: Path) -> None:
    write_slow(tmp_path / "models")
    served = start.gateway()
    assert not served.is_ready()
    worker = start.worker()
    wait_until(served.is_ready)
    arrays = {"VALUE": np.array([[5]], np.int64), "DELAY_MS": np.array([[1]], np.float32)}
    with served.http() as client:
        start("scheduler")
        assert client.infer("slow", http_inputs(arrays)).as_numpy("VALUE_OUT").item() == 5
        assert worker.end() == 0
        wait_until(lambda: not served.is_ready())
        start.worker()
        wait_until(served.is_ready)
        assert client.infer("slow", http_inputs(arrays)).as_numpy("VALUE_OUT").item() == 5


@pytest.mark.timeout(120)
def test_two_gateways_answer_their_own(start: Start, tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    start("scheduler")
    start.worker()
    ledgers = [Ledger(start.gateway(), threads=4) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for ledger in ledgers:
            wait_until(ledger.server.is_ready)
            stack.enter_context(ledger.sending())
        wait_until(lambda: all(len(ledger.entries) > 200 for ledger in ledgers))
    for ledger in ledgers:
        assert (ledger.unanswered, ledger.faults) == (0, [])


def test_a_role_without_a_broker_says_so(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "weir", "scheduler"],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (ran.returncode, ran.stderr) == (1, "error: --nats must be specified\n")
