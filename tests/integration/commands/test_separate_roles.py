"""Roles as separate commands against one nats-server, as containers run them."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import nats
import numpy as np
import pytest

from tests.support.clients.request_ledger import Ledger
from tests.support.clients.stock import http_inputs
from tests.support.models.ensembles import Step, write_ensemble, write_ledger_ensembles
from tests.support.models.zoo import write_identity, write_slow, write_small_zoo
from tests.support.servers.roles import Start
from tests.support.servers.weir_server import clean_environment
from tests.support.waiting import wait_until
from weir.schemas.wire.statistics import WorkerCounters, unpack_counters


@pytest.mark.timeout(120)
def test_two_workers_share_the_load_and_one_may_die(start: Start, tmp_path: Path) -> None:
    _recovery_s(start, tmp_path)


@pytest.mark.timing
@pytest.mark.timeout(120)
def test_the_other_worker_answers_within_a_second(start: Start, tmp_path: Path) -> None:
    assert _recovery_s(start, tmp_path) < 1.0


def _recovery_s(start: Start, tmp_path: Path) -> float:
    """The seconds from the death of one of two workers until both models answered; no request is lost."""
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
    assert served.is_ready()
    return recovery


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
